"""A result to read, the same for a terminal and for a page: rows of text, conditions, notes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvortex.bench.compare import EngineResult
from kvortex.bench.counters import PromptTokens
from kvortex.bench.documents import CompareResult, Conditions, ServeResult
from kvortex.bench.engines import Engine
from kvortex.bench.figures import Figures, Measured, in_ms
from kvortex.sizes import counted, format_bytes

NOTHING: Final = "-"
COLUMNS: Final = (
    "engine",
    "output tok/s",
    "of none",
    "of bound",
    "TTFT p50 / p99 ms",
    "TPOT p50 / p99 ms",
    "prompt: VRAM / RAM / computed",
    "ok / failed",
)
TITLES: Final = {
    Engine.NONE: "vLLM without offload",
    Engine.OFFLOADING: "vLLM's OffloadingConnector",
    Engine.SIMPLE: "vLLM's SimpleCPUOffloadConnector",
    Engine.KVORTEX: "KVortex",
    Engine.BOUND: "vLLM with all KV in VRAM: the bound",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One engine.

    Attributes:
        figures: all None where it was not measured.
        ratios: of output tokens/s to the reference engines'.
        tokens: where the measured turns' prompts came from, over all runs; None where nobody counted.
        turns: each turn's median time to the first token, in seconds.
        reason: why it, or a run of it, was not measured; "" when all were.
        outcome: the word for that.
    """

    name: str
    figures: Figures
    ratios: dict[Engine, float]
    ok: int
    failed: int
    tokens: PromptTokens | None
    turns: tuple[float | None, ...]
    reason: str = ""
    outcome: str = NOTHING

    @property
    def cells(self) -> tuple[str, ...]:
        """Text for COLUMNS."""
        f = self.figures
        rate = f.output_tokens_per_s
        return (
            self.name,
            _rate(rate) if rate is not None else self.outcome,
            _times(self.ratios.get(Engine.NONE)),
            _times(self.ratios.get(Engine.BOUND)),
            _pair(f.ttft_p50_s, f.ttft_p99_s),
            _pair(f.tpot_p50_s, f.tpot_p99_s),
            _shares(self.tokens),
            f"{self.ok} / {self.failed}",
        )


@dataclass(frozen=True, slots=True)
class Report:
    """
    Attributes:
        conditions: (what, how it was).
        notes: what a reader must know before believing the figures.
        headline: the outcome in a sentence; "" where there is none.
    """

    title: str
    rows: tuple[Row, ...]
    conditions: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    headline: str = ""


def serve_report(result: ServeResult) -> Report:
    server, measured = result.server, result.measured
    name = "kvortex" if server.kvortex else "server"
    row = _row(name, [measured], measured.figures, {})
    versions = f"vLLM {server.vllm or 'of unknown version'}"
    versions += f", KVortex {server.kvortex}" if server.kvortex else ", no KVortex"
    conditions = (
        ("model", server.model),
        ("server", f"{result.shown_url}: {versions}"),
        *_conditions(result.conditions, is_open_load=result.sessions is not None),
    )
    notes = [*measured.notes, *(f"a request failed: {example}" for example in measured.requests.examples)]
    if not result.is_local:
        notes.append("hardware and versions are those of the client; the server is elsewhere")
    return Report(f"Multi-turn load on {server.model}", (row,), conditions, tuple(notes))


def compare_report(result: CompareResult) -> Report:
    rows = tuple(_engine_row(engine) for engine in result.engines)
    runs = max((run.run for engine in result.engines for run in engine.runs), default=0)
    conditions = (
        ("model", result.model),
        ("runs", f"{runs} of each engine; medians over them, ratios within each"),
        *_conditions(result.conditions),
        *((f"engine {engine.engine}", _engine_in_words(engine)) for engine in result.engines),
        ("server logs", result.logs),
    )
    notes = [f"{row.name}: {row.reason}" for row in rows if row.reason]
    for engine, measured in result.measured_runs:
        notes += [f"{engine.engine}: {note}" for note in measured.notes]
        notes += [f"{engine.engine}: a request failed: {example}" for example in measured.requests.examples]
    title = f"Engines compared on {result.model}"
    return Report(title, rows, conditions, tuple(dict.fromkeys(notes)), _headline(rows))


def _headline(rows: Sequence[Row]) -> str:
    """What KVortex gave, against whatever else was measured: gain or loss."""
    by_name = {row.name: row for row in rows}
    kvortex = by_name.get(Engine.KVORTEX)
    if kvortex is None or kvortex.figures.output_tokens_per_s is None:
        return ""
    said = f"KVortex: {_rate(kvortex.figures.output_tokens_per_s)} output tokens/s"
    for engine, words in ((Engine.NONE, "of vLLM without offload"), (Engine.BOUND, "of vLLM with all KV in VRAM")):
        if engine in kvortex.ratios:
            said += f", {kvortex.ratios[engine]:.2f} times those {words}"
    waits = [
        f"{TITLES[engine]} {_pair(by_name[engine].figures.ttft_p50_s, by_name[engine].figures.ttft_p99_s)}"
        for engine in (Engine.KVORTEX, Engine.NONE, Engine.BOUND)
        if engine in by_name
    ]
    return f"{said}. Time to the first token, median / 99th percentile, in ms: {'; '.join(waits)}."


def _engine_in_words(engine: EngineResult) -> str:
    ram = f", {format_bytes(engine.ram_bytes)} of RAM for KV" if engine.ram_bytes else ""
    command = f": {engine.command}" if engine.command else ""
    return f"{TITLES[engine.engine]}{ram}{command}"


def _engine_row(engine: EngineResult) -> Row:
    measured = [run.measured for run in engine.runs if run.measured is not None]
    row = _row(str(engine.engine), measured, engine.median, dict(engine.ratios))
    failed = next((run for run in engine.runs if run.reason), None)
    if failed is None:
        return row
    outcome = str(failed.outcome)
    return replace(row, reason=f"run {failed.run} {outcome}: {failed.reason}", outcome=outcome)


def _row(name: str, runs: Sequence[Measured], figures: Figures, ratios: dict[Engine, float]) -> Row:
    known = [run.sources.tokens for run in runs if run.sources is not None]
    turns = zip(*(run.turns for run in runs), strict=True)
    return Row(
        name=name,
        figures=figures,
        ratios=ratios,
        ok=sum(run.requests.ok for run in runs),
        failed=sum(run.requests.failed for run in runs),
        tokens=PromptTokens(*(sum(part) for part in zip(*map(_parts, known), strict=True))) if known else None,
        turns=tuple(_median([turn.ttft_p50_s for turn in same]) for same in turns),
    )


def _parts(tokens: PromptTokens) -> tuple[int, int, int]:
    return tokens.vram, tokens.ram, tokens.computed


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _conditions(conditions: Conditions, *, is_open_load: bool = False) -> tuple[tuple[str, str], ...]:
    w, versions = conditions.workload, conditions.versions
    at_once = "as many at a time as come" if is_open_load else f"{counted(w.concurrency, 'request')} at a time"
    driver = f", driver {versions.driver} (CUDA {versions.cuda})" if versions.driver else ""
    return (
        (
            "workload",
            f"{counted(w.conversations, 'conversation')} of {counted(w.turns, 'turn')}: {counted(w.first, 'token')} "
            f"first, {w.add:,} more a turn, {w.gen:,} generated, {at_once}; "
            f"seed {w.seed}, token ids {w.vocabulary}",
        ),
        ("measured", f"turns {w.measured_from_turn} to {w.turns}, answers that came whole"),
        ("hardware", str(conditions.hardware)),
        (
            "versions",
            f"vLLM {versions.vllm or 'not here'}, torch {versions.torch or 'not here'}, KVortex {versions.kvortex}, "
            f"Python {versions.python}{driver}",
        ),
        ("began", f"{conditions.began_at:%Y-%m-%d %H:%M} UTC"),
    )


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _times(ratio: float | None) -> str:
    return NOTHING if ratio is None else f"{ratio:.2f}x"


def _pair(p50_s: float | None, p99_s: float | None) -> str:
    return in_ms(p50_s, p99_s) or NOTHING


def _shares(tokens: PromptTokens | None) -> str:
    if tokens is None or tokens.all == 0:
        return NOTHING
    return " / ".join(f"{part / tokens.all:.0%}" for part in _parts(tokens))
