"""Figures from results: rates, percentiles, counts of what failed. None is "there is nothing to work it out from"."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from kvortex.bench.counters import CountedBy, PromptTokens, Tiers
from kvortex.bench.load import Played
from kvortex.bench.request import Failed, Good
from kvortex.sizes import format_bytes

_MAX_EXAMPLES: Final = 5
_BUSY_CLIENT: Final = 0.8
_KNOWN_BEFORE: Final = 0.5


@dataclass(frozen=True, slots=True)
class Figures:
    """One run in numbers, of the measured turns and of good answers only.

    Attributes:
        output_tokens_per_s: tokens that came, over the turns' walls.
        ttft_p50_s: time to the first token; likewise its 99th percentile.
        tpot_p50_s: time from one token to the next, of answers with more than one.
        latency_p50_s: from sending to the end.
    """

    output_tokens_per_s: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    latency_p50_s: float | None
    latency_p99_s: float | None


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """One turn, good answers only.

    Attributes:
        tokens: where its prompts' KV came from; None where the server does not tell.
    """

    turn: int
    wall_s: float
    ok: int
    failed: int
    output_tokens: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    tokens: PromptTokens | None


@dataclass(frozen=True, slots=True)
class Requests:
    """Every request of the load, counted once.

    Attributes:
        failures: how many failed, by kind; HTTP ones with their status: `http_status 500`.
        examples: what was said about some of them.
        short_answers: good ones with fewer tokens than asked for.
    """

    sent: int
    ok: int
    failed: int
    failures: dict[str, int]
    examples: tuple[str, ...]
    short_answers: int

    @property
    def failed_share(self) -> float:
        return self.failed / self.sent if self.sent else 0.0

    def too_many_failed(self, max_share: float) -> bool:
        """Whether all failed, or more than the share that was allowed."""
        return self.failed > 0 and (self.ok == 0 or self.failed_share > max_share)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the measured turns' prompt tokens came from, and what KVortex copied over the whole load.

    Attributes:
        stored_bytes, loaded_bytes, failed_blocks, tiers: None where vLLM counted.
    """

    counted_by: CountedBy
    tokens: PromptTokens
    stored_bytes: int | None
    loaded_bytes: int | None
    failed_blocks: int | None
    tiers: Tiers | None


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of a workload on one server.

    Attributes:
        sources: None where the server does not tell.
        notes: what a reader must know before believing the figures.
    """

    figures: Figures
    requests: Requests
    turns: tuple[TurnFigures, ...]
    sources: Sources | None
    notes: tuple[str, ...]


def percentile(values: Sequence[float], share: float) -> float | None:
    """Linear between the two nearest values, as numpy and `vllm bench` have it; None of no values."""
    return float(np.percentile(values, share * 100)) if values else None


def in_ms(p50_s: float | None, p99_s: float | None) -> str | None:
    """A pair of times in milliseconds, to read."""
    if p50_s is None or p99_s is None:
        return None
    return " / ".join(f"{s * 1e3:,.0f}" if s >= 0.1 else f"{s * 1e3:.3g}" for s in (p50_s, p99_s))


def measure(played: Played) -> Measured:
    """The figures of a run."""
    workload = played.workload
    late = played.turns[workload.measured_from_turn - 1 :]
    good = [result for turn in late for result in turn.results if isinstance(result, Good)]
    wall_s = sum(turn.wall_s for turn in late)
    ttft = [result.ttft_s for result in good]
    tpot = [result.tpot_s for result in good if result.tpot_s is not None]
    latency = [result.latency_s for result in good]
    figures = Figures(
        output_tokens_per_s=sum(r.output_tokens for r in good) / wall_s if good and wall_s > 0 else None,
        ttft_p50_s=percentile(ttft, 0.5),
        ttft_p99_s=percentile(ttft, 0.99),
        tpot_p50_s=percentile(tpot, 0.5),
        tpot_p99_s=percentile(tpot, 0.99),
        latency_p50_s=percentile(latency, 0.5),
        latency_p99_s=percentile(latency, 0.99),
    )
    requests, sources = _requests(played), _sources(played)
    return Measured(figures, requests, tuple(_turns(played)), sources, tuple(_notes(played, sources)))


def median_figures(runs: Sequence[Figures]) -> Figures:
    """The median of each figure over the runs that have it."""
    return Figures(**{f.name: _median(getattr(run, f.name) for run in runs) for f in fields(Figures)})


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def median_ratio(pairs: Iterable[tuple[float | None, float | None]]) -> float | None:
    """The median of the ratios of (this, that), each pair of one run; None without a pair that has both."""
    return _median(this / that if this is not None and that else None for this, that in pairs)


def _requests(played: Played) -> Requests:
    results = [result for turn in played.turns for result in turn.results]
    failed = [result for result in results if isinstance(result, Failed)]
    good = [result for result in results if isinstance(result, Good)]
    details = dict.fromkeys(f"{_kind(failure)}: {failure.detail}" for failure in failed)
    return Requests(
        sent=len(results),
        ok=len(good),
        failed=len(failed),
        failures=dict(Counter(_kind(failure) for failure in failed).most_common()),
        examples=tuple(details)[:_MAX_EXAMPLES],
        short_answers=sum(result.output_tokens < played.workload.gen for result in good),
    )


def _kind(failure: Failed) -> str:
    return str(failure.kind) if failure.status is None else f"{failure.kind} {failure.status}"


def _turns(played: Played) -> Iterable[TurnFigures]:
    for index, turn in enumerate(played.turns):
        good = [result for result in turn.results if isinstance(result, Good)]
        ttft = [result.ttft_s for result in good]
        tpot = [result.tpot_s for result in good if result.tpot_s is not None]
        yield TurnFigures(
            turn=index + 1,
            wall_s=turn.wall_s,
            ok=len(good),
            failed=len(turn.results) - len(good),
            output_tokens=sum(result.output_tokens for result in good),
            ttft_p50_s=percentile(ttft, 0.5),
            ttft_p99_s=percentile(ttft, 0.99),
            tpot_p50_s=percentile(tpot, 0.5),
            tpot_p99_s=percentile(tpot, 0.99),
            tokens=_tokens_of_turn(played, index),
        )


def _tokens_of_turn(played: Played, index: int) -> PromptTokens | None:
    if not played.counters:
        return None
    return played.counters[index + 1].tokens - played.counters[index].tokens


def _sources(played: Played) -> Sources | None:
    if not played.counters:
        return None
    first, last = played.counters[0], played.counters[-1]
    before_late = played.counters[played.workload.measured_from_turn - 1]
    copies = last.copies - first.copies if last.copies is not None and first.copies is not None else None
    return Sources(
        counted_by=last.counted_by,
        tokens=last.tokens - before_late.tokens,
        stored_bytes=copies.stored_bytes if copies else None,
        loaded_bytes=copies.loaded_bytes if copies else None,
        failed_blocks=copies.failed_blocks if copies else None,
        tiers=last.tiers,
    )


def _notes(played: Played, sources: Sources | None) -> Iterable[str]:
    if played.stand_in_answers:
        yield (
            f"the server did not tell the token ids of {played.stand_in_answers} answers: the next prompts held other "
            "tokens in their place, so less of them could be in the cache"
        )
    if played.client_cpu_share > _BUSY_CLIENT:
        yield (
            f"this client was busy for {played.client_cpu_share:.0%} of the time: the figures may be its own, not the "
            "server's"
        )
    first = _tokens_of_turn(played, 0) if played.turns else None
    if first is not None and first.all and first.computed < first.all * _KNOWN_BEFORE:
        yield "the server knew most of turn 1 already: restart it, or give another --seed"
    if sources is None or sources.stored_bytes is None or sources.loaded_bytes is None:
        return
    if sources.stored_bytes and not sources.loaded_bytes:
        yield f"stored {format_bytes(sources.stored_bytes)}, reused 0: this load gains nothing from the RAM cache"
    if sources.failed_blocks:
        yield f"the copies of {sources.failed_blocks} blocks failed: see the server's log"
    if sources.tiers is not None and sources.tiers.ram_bytes < sources.tiers.vram_bytes:
        yield (
            f"the RAM cache ({format_bytes(sources.tiers.ram_bytes)}) is smaller than VRAM's KV "
            f"({format_bytes(sources.tiers.vram_bytes)}): it mostly mirrors it"
        )
