"""Figures of an open load of sessions: those of any load, and goodput under a stated limit, and what prefetch did."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvortex.bench.counters import Prefetched
from kvortex.bench.figures import Measured, Sources, in_ms, measure
from kvortex.bench.load import Played, Turn
from kvortex.bench.request import Good
from kvortex.bench.session_load import PlayedSessions
from kvortex.sizes import counted


@dataclass(frozen=True, slots=True)
class Goal:
    """A good request's times, at most: to the first token, and from one token to the next."""

    ttft_s: float
    tpot_s: float

    def is_met_by(self, result: Good) -> bool:
        return result.ttft_s <= self.ttft_s and (result.tpot_s is None or result.tpot_s <= self.tpot_s)


@dataclass(frozen=True, slots=True)
class SessionFigures:
    """Attributes:
    goodput_requests_per_s: requests of all turns that met the goal, over the load's wall.
    goodput_share: of all requests sent.
    prefetched: None where the server does not tell.
    prefetched_share: of the blocks loaded from RAM, those that were there before their request.
    wasted_share: of the blocks loaded from RAM, those brought for nothing.
    hint_s: how long before it came each session was announced; None where it was not.
    hints: what was said to the hints -> how often.
    for_s: no turn began later than so many seconds after the first one; None: all turns were taken.
    """

    who: str
    sessions_per_s: float
    goal: Goal
    wall_s: float
    most_in_flight: int
    goodput_requests_per_s: float | None
    goodput_share: float | None
    prefetched: Prefetched | None
    prefetched_share: float | None
    wasted_share: float | None
    hint_s: float | None
    hints: dict[str, int]
    for_s: float | None


def measure_sessions(played: PlayedSessions, goal: Goal) -> tuple[Measured, SessionFigures]:
    """The figures of a run."""
    load, wall_s = played.load, played.wall_s
    as_turns = Played(
        workload=load.workload,
        turns=tuple(Turn(wall_s, results) for results in played.turns),
        counters=(),
        stand_in_answers=played.stand_in_answers,
        client_cpu_share=played.client_cpu_share,
    )
    measured = measure(as_turns)
    good = [r for results in played.turns for r in results if isinstance(r, Good)]
    met = sum(goal.is_met_by(result) for result in good)
    sent = sum(map(len, played.turns))
    prefetched, loaded_blocks = _prefetched(played)
    figures = SessionFigures(
        who=str(load.who),
        sessions_per_s=load.rate,
        goal=goal,
        wall_s=wall_s,
        most_in_flight=played.most_in_flight,
        goodput_requests_per_s=met / wall_s if wall_s > 0 else None,
        goodput_share=met / sent if sent else None,
        prefetched=prefetched,
        prefetched_share=prefetched.used / loaded_blocks if prefetched and loaded_blocks else None,
        wasted_share=prefetched.wasted / loaded_blocks if prefetched and loaded_blocks else None,
        hint_s=load.hint_s,
        hints=dict(played.hints),
        for_s=load.for_s,
    )
    # Turns overlap: tokens of all turns came within the one wall.
    rate = sum(r.output_tokens for r in good) / wall_s if good and wall_s > 0 else None
    notes = (*measured.notes, *_notes(measured, figures))
    return (
        replace(
            measured,
            figures=replace(measured.figures, output_tokens_per_s=rate),
            sources=_sources(played),
            notes=notes,
        ),
        figures,
    )


def _sources(played: PlayedSessions) -> Sources | None:
    if played.counters is None:
        return None
    first, last = played.counters
    copies = last.copies - first.copies if last.copies is not None and first.copies is not None else None
    return Sources(
        counted_by=last.counted_by,
        tokens=last.tokens - first.tokens,
        stored_bytes=copies.stored_bytes if copies else None,
        loaded_bytes=copies.loaded_bytes if copies else None,
        failed_blocks=copies.failed_blocks if copies else None,
        tiers=last.tiers,
    )


def _prefetched(played: PlayedSessions) -> tuple[Prefetched | None, int]:
    """What was prefetched, and all blocks loaded."""
    if played.counters is None:
        return None, 0
    first, last = (counters.prefetched for counters in played.counters)
    if first is None or last is None:
        return None, 0
    gained = last - first
    return gained, gained.loaded


def _notes(measured: Measured, figures: SessionFigures) -> Iterable[str]:
    goal = figures.goal
    yield (
        f"open load: {figures.sessions_per_s:g} sessions a second begin, {figures.who}, at most "
        f"{counted(figures.most_in_flight, 'request')} at a time; sources are those of all turns"
    )
    if figures.for_s is not None:
        yield f"no turn began later than {figures.for_s:g} s after the first one: who would have gone on then was gone"
    for turn in measured.turns:
        if (ttft := in_ms(turn.ttft_p50_s, turn.ttft_p99_s)) is not None:
            tpot = in_ms(turn.tpot_p50_s, turn.tpot_p99_s)
            yield f"turn {turn.turn}, p50 / p99: TTFT {ttft} ms" + (f", TPOT {tpot} ms" if tpot is not None else "")
    if figures.goodput_requests_per_s is not None and figures.goodput_share is not None:
        yield (
            f"goodput: {figures.goodput_requests_per_s:.3g} requests/s, {figures.goodput_share:.1%} of all, with the "
            f"first token within {goal.ttft_s:g} s and each further one within {goal.tpot_s * 1e3:g} ms"
        )
    if figures.prefetched is not None and figures.prefetched_share is not None and figures.wasted_share is not None:
        yield (
            f"prefetch: {figures.prefetched_share:.1%} of the blocks loaded from RAM were there before their request, "
            f"{figures.wasted_share:.1%} were brought for nothing"
        )
    if figures.hint_s is not None:
        said = ", ".join(f"{answer} {times:,} times" for answer, times in sorted(figures.hints.items())) or "nothing"
        yield f"each session was announced {figures.hint_s:g} s before it came; the server said {said}"
