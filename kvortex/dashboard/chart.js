const WINDOWS_S = [60, 120, 300]; // the first that holds what was seen
const WINDOW_S = WINDOWS_S[WINDOWS_S.length - 1];
const LETTERS = ["a", "b", "c"];
const PLOT = { left: 58, right: 8, top: 8, bottom: 22, height: 170 };

function svg(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function html(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// The smallest of 1, 2, 4, 6, 8 times a power of ten that is not below `value`: its half is as short a number.
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= value * 0.999999);
}

// Lines over the last minutes, five at most. A series is told apart by its dashes, too; its value stands in the legend.
class Chart {
  // spec: title, names, format, and where they apply: most (a fixed top), stacked, least (the lowest top).
  constructor(spec) {
    this.spec = spec;
    this.points = [];
    this.pointed_at = null;
    this.values = spec.names.map(() => html("b", {}, "-"));
    const legend = spec.names.map((name, i) => {
      const mark = svg("svg", { viewBox: "0 0 26 12", "aria-hidden": "true" });
      mark.append(svg("line", { x1: 0, x2: 26, y1: 6, y2: 6, class: `line ${LETTERS[i]}` }));
      return html("li", {}, mark, `${name} `, this.values[i]);
    });
    this.plot = svg("svg", { class: "plot", role: "img" });
    this.element = html("section", { class: "card" }, html("h2", {}, spec.title), html("ul", { class: "legend" }, ...legend));
    this.element.append(this.plot);
    this.plot.addEventListener("pointermove", (event) => this.point_at(event.offsetX));
    this.plot.addEventListener("pointerleave", () => this.point_at(null));
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  clear() {
    this.points = [];
    this.draw();
  }

  // `values`: one a name; null where there is nothing to say, which leaves a gap.
  add(time_s, values) {
    this.points.push({ time_s, values });
    while (this.points[0].time_s < time_s - WINDOW_S) this.points.shift();
    this.draw();
  }

  point_at(x) {
    this.pointed_at = x;
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    const { left, right, top, bottom, height } = PLOT;
    const now = this.points.length ? this.points[this.points.length - 1].time_s : 0;
    const seen_s = this.points.length ? now - this.points[0].time_s : 0;
    const window_s = WINDOWS_S.find((size_s) => seen_s <= size_s) ?? WINDOW_S;
    const x = (time_s) => left + (1 + (time_s - now) / window_s) * (width - left - right);
    const most = this.most();
    const y = (value) => height - bottom - (value / most) * (height - top - bottom);
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const at = y(share * most);
      parts.push(svg("line", { class: "axis", x1: left, x2: width - right, y1: at, y2: at }));
      const label = this.spec.format(share * most);
      parts.push(svg("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, label));
    }
    for (const [ago_s, anchor] of [[window_s, "start"], [window_s / 2, "middle"], [0, "end"]]) {
      const label = ago_s ? `${ago_s < 120 ? `${ago_s} s` : `${ago_s / 60} min`} ago` : "now";
      parts.push(svg("text", { x: x(now - ago_s), y: height - 6, "text-anchor": anchor }, label));
    }
    for (const stretch of this.stretches()) parts.push(...this.lines(stretch, x, y));
    const shown = this.shown(x);
    if (this.pointed_at !== null && shown) {
      const at = x(shown.time_s);
      parts.push(svg("line", { class: "cursor", x1: at, x2: at, y1: top, y2: height - bottom }));
    }
    this.plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.plot.replaceChildren(...parts);
    this.tell(shown);
  }

  // The top of the scale.
  most() {
    if (this.spec.most !== undefined) return this.spec.most;
    const drawn = this.points.filter((point) => point.values).flatMap((point) => this.heights(point.values));
    return nice(Math.max(this.spec.least ?? 1, ...drawn));
  }

  heights(values) {
    let below = 0;
    return values.map((value) => (this.spec.stacked ? (below += value) : value));
  }

  // Runs of points without a gap.
  stretches() {
    const runs = [[]];
    for (const point of this.points) {
      if (point.values) runs[runs.length - 1].push(point);
      else if (runs[runs.length - 1].length) runs.push([]);
    }
    return runs.filter((run) => run.length);
  }

  lines(stretch, x, y) {
    const parts = [];
    const heights = stretch.map((point) => this.heights(point.values));
    const path = (i) => stretch.map((point, j) => `${x(point.time_s).toFixed(1)},${y(heights[j][i]).toFixed(1)}`);
    for (let i = this.spec.names.length - 1; i >= 0; i -= 1) {
      const above = path(i);
      if (this.spec.stacked && above.length > 1) {
        const below = i ? path(i - 1).reverse() : [
          `${x(stretch[stretch.length - 1].time_s).toFixed(1)},${y(0)}`, `${x(stretch[0].time_s).toFixed(1)},${y(0)}`,
        ];
        parts.push(svg("polygon", { class: `area ${LETTERS[i]}`, points: [...above, ...below].join(" ") }));
      }
      parts.push(svg("polyline", { class: `line ${LETTERS[i]}`, points: above.join(" ") }));
    }
    return parts;
  }

  // The point under the pointer, else the last one.
  shown(x) {
    if (this.pointed_at === null) return this.points[this.points.length - 1];
    const far = (point) => Math.abs(x(point.time_s) - this.pointed_at);
    return this.points.reduce((best, point) => (best && far(best) <= far(point) ? best : point), undefined);
  }

  tell(point) {
    const texts = this.spec.names.map((_, i) => (point && point.values ? this.spec.format(point.values[i]) : "-"));
    texts.forEach((text, i) => { this.values[i].textContent = text; });
    const summary = this.spec.names.map((name, i) => `${name} ${texts[i]}`).join(", ");
    this.plot.setAttribute("aria-label", `${this.spec.title}: ${summary}`);
  }
}
