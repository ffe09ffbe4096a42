const EVERY_S = 2;
const LONGEST_WAIT_S = 30;
const SHARE_OVER_S = 30;
const REASONS = /*reasons*/{};

const CHARTS = [
  {
    title: `Prompt tokens found, share over ${SHARE_OVER_S} s`, names: ["in VRAM", "in RAM"], format: percent,
    most: 1, stacked: true,
    values: (now, before, recent) => {
      const queried = now.tokens.queried - recent.tokens.queried;
      if (!queried) return null;
      return ["vram_hit", "ram_hit"].map((source) => (now.tokens[source] - recent.tokens[source]) / queried);
    },
  },
  {
    title: "Prompt tokens", names: ["from VRAM", "from RAM", "computed"], format: per_s, stacked: true, least: 10,
    values: (now, before) => ["vram_hit", "ram_hit", "computed"].map(
      (source) => rate(now, before, (s) => s.tokens[source])),
  },
  {
    title: "Link use", names: ["to VRAM (load)", "to RAM (store)"], format: bytes_per_s, least: 1e6,
    values: (now, before) => [rate(now, before, (s) => s.load.bytes), rate(now, before, (s) => s.store.bytes)],
  },
  {
    title: "Blocks on their way", names: ["to VRAM (load)", "to RAM (store)"], format: number, least: 4,
    values: (now) => [now.load.in_flight, now.store.in_flight],
  },
  {
    title: "VRAM, share of blocks", names: ["clean", "resident", "in use"], format: percent, most: 1,
    values: (now) => ["clean", "resident", "in_use"].map(
      (state) => now.tiers.vram[`${state}_blocks`] / now.tiers.vram.capacity_blocks),
  },
  {
    title: "RAM, share of blocks", names: ["used", "pinned by loads"], format: percent, most: 1,
    values: (now) => ["used", "pinned"].map((state) => now.tiers.ram[`${state}_blocks`] / now.tiers.ram.capacity_blocks),
  },
  {
    title: "Evictions, blocks", names: ["from VRAM", "from RAM", "lost uncopied"], format: per_s,
    values: (now, before) => ["vram_blocks", "ram_blocks", "vram_uncopied_blocks"].map(
      (kind) => rate(now, before, (s) => s.evicted[kind])),
  },
  {
    title: "Prefetch, blocks", names: ["issued", "used", "wasted", "late"], format: per_s,
    values: (now, before) => ["issued", "used", "wasted", "late"].map(
      (outcome) => rate(now, before, (s) => s.prefetch[`${outcome}_blocks`])),
  },
  {
    title: "Sessions", names: ["active", "known"], format: number, least: 4,
    values: (now) => [now.sessions.active, now.sessions.known],
  },
];

const rate = (now, before, of) => (of(now) - of(before)) / (now.uptime_s - before.uptime_s);
const at = (id) => document.getElementById(id);
const show = (id, text) => { at(id).textContent = text; };

const charts = CHARTS.map((spec) => new Chart(spec));
at("charts").append(...charts.map((chart) => chart.element));

let samples = []; // documents of the last SHARE_OVER_S, oldest first
let wait_s = EVERY_S;
let next_poll = null;
let answered_at = null;

function show_status(text, live) {
  show("status", text);
  at("status").className = live ? "live" : "gone";
  document.body.className = live ? "" : "stale";
}

async function ask() {
  const key = sessionStorage.getItem("kvortex-api-key");
  const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
  const answer = await fetch("stats", { headers, cache: "no-store", signal: AbortSignal.timeout(10000) });
  if (answer.ok) return answer.json();
  if (answer.status === 401) throw new Error("it asks for another API key; load this page again");
  const body = await answer.json().catch(() => ({}));
  throw new Error(body.detail ?? `it answers ${answer.status}`);
}

async function poll() {
  clearTimeout(next_poll);
  try {
    take(await ask());
    answered_at = Date.now();
    wait_s = EVERY_S;
    show_status(`live, every ${EVERY_S} s`, true);
  } catch (failure) {
    wait_s = Math.min(2 * wait_s, LONGEST_WAIT_S);
    const since = answered_at === null ? "" : ` since ${seconds((Date.now() - answered_at) / 1000)}`;
    show_status(`No answer${since}, next try in ${wait_s} s: ${failure.message}`, false);
  }
  next_poll = setTimeout(poll, wait_s * 1000);
}

// Counters only grow: one that is smaller is another server's.
function is_another(stats, before) {
  const counters = (s) => [s.uptime_s, s.tokens.queried, s.tokens.computed, s.store.blocks, s.load.blocks];
  const earlier = counters(before);
  return counters(stats).some((value, i) => value < earlier[i]);
}

function take(stats) {
  const before = samples[samples.length - 1];
  if (before && stats.uptime_s === before.uptime_s) return;
  if (before && is_another(stats, before)) {
    samples = [];
    charts.forEach((chart) => chart.clear());
  }
  samples.push(stats);
  while (samples.length > 2 && samples[1].uptime_s <= stats.uptime_s - SHARE_OVER_S) samples.shift();
  show_numbers(stats);
  if (samples.length < 2) return;
  const previous = samples[samples.length - 2];
  charts.forEach((chart) => chart.add(stats.uptime_s, chart.spec.values(stats, previous, samples[0])));
}

function show_numbers(stats) {
  const { tokens, prompts } = stats;
  const ram = stats.tiers.ram;
  show("facts", `${stats.model} · KVortex ${stats.kvortex} · vLLM ${stats.vllm} · up ${seconds(stats.uptime_s)}`);
  show("verdict", stats.verdict.text);
  for (const source of ["vram_hit", "ram_hit", "computed"]) {
    show(source, count(tokens[source]));
    show(`${source}_share`, tokens.queried ? percent(tokens[source] / tokens.queried) : "-");
  }
  show("queried", count(tokens.queried));
  show("prompts", count(prompts.counted));
  show("ram_share", percent(ram.used_blocks / ram.capacity_blocks));
  show("ram_used", bytes(ram.used_bytes));
  show("ram_capacity", bytes(ram.capacity_bytes));
  show("failed", count(stats.failures.store + stats.failures.load));
  show("copied", count(stats.store.blocks + stats.load.blocks));
  show_missed(stats);
  show_copies(stats);
}

function cells(name, ...values) {
  return html("tr", {}, html("td", {}, ...name), ...values.map((value) => html("td", {}, value)));
}

function show_missed(stats) {
  const missed = Object.entries(stats.missed).filter(([, tokens]) => tokens > 0).sort((a, b) => b[1] - a[1]);
  const rows = missed.map(([reason, tokens]) => {
    const bar = html("div", { class: "bar" });
    const share = tokens / stats.tokens.computed;
    bar.style.width = `${share * 100}%`;
    const told = stats.verdict.reasons.find((known) => known.reason === reason);
    const more = told ? [html("small", { class: "soft" }, told.text)] : [];
    const row = cells([REASONS[reason] ?? reason, bar, ...more], count(tokens), percent(share));
    row.dataset.reason = reason;
    return row;
  });
  at("missed").replaceChildren(...(rows.length ? rows : [cells(["nothing was computed yet"], "", "")]));
}

function show_copies(stats) {
  at("copies").replaceChildren(...[["to RAM (store)", "store"], ["to VRAM (load)", "load"]].map(([name, way]) => cells(
    [name], count(stats[way].blocks), bytes(stats[way].bytes), count(stats[way].in_flight), count(stats.failures[way]))));
  const refused = Object.entries(stats.refused).filter(([, blocks]) => blocks > 0);
  const text = refused.map(([reason, blocks]) => `${reason.replaceAll("_", " ")} ${count(blocks)}`).join(", ");
  show("refused", text ? `Blocks not moved or dropped: ${text}.` : "No block was refused or dropped.");
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(next_poll);
  else poll();
});
poll();
