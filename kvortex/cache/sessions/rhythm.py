"""When a silent conversation goes on: learnt as a life table from the silences of all.

Silence is cut into bins that double. Of each bin it is counted how many conversations were still silent at its start,
and how many went on within it, so that those that never come back count from their first second on (the actuarial
estimate: Kaplan and Meier, 1958, on grouped data). People and tool loops differ, so conversations are told apart by
their own recent gaps, their pace, and by how many turns they have had, since many end after a few. A habit that was
seldom seen leans on all of its pace, a pace on all others together, and these on a prior: half are people, log-normal
around 20 s, half are tools, log-normal around 2 s, and half of all come back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

FIRST_EDGE_S: Final = 0.25
NUM_BINS: Final = 15
EDGES_S: Final[tuple[float, ...]] = tuple(FIRST_EDGE_S * (1 << i) for i in range(NUM_BINS))
"""Bin `b` of a silence ends here; who is silent for longer than the last, over an hour, is not expected any more."""

NUM_PACES: Final = 6
"""Pace 0: no gap is known yet. The others by the geometric mean of the recent gaps: under 1, 4, 16, 64 s, and over."""

NUM_TURNS: Final = 6
"""Conversations are told apart by how many turns they have had, too, up to so many: many end after a few."""

RECENT_GAPS: Final = 4

_PRIOR_WEIGHT: Final = 4.0
_POOLED_WEIGHT: Final = 8.0
_MAX_COUNT: Final = 512.0
"""Counts are halved there: habits change."""


def pace_of(gaps_s: Sequence[float]) -> int:
    """The pace of a conversation with these recent gaps."""
    if not gaps_s:
        return 0
    mean_log = sum(math.log(max(gap, 1e-3)) for gap in gaps_s) / len(gaps_s)
    return min(NUM_PACES - 1, max(1, 2 + math.floor(mean_log / math.log(4))))


class Habit(NamedTuple):
    """What is known of a silent conversation: its pace, and how many turns it has had, at most NUM_TURNS."""

    pace: int
    turns: int


def habit_of(pace: int, turns: int) -> Habit:
    """Of a conversation with this pace that has had so many turns."""
    return Habit(pace, max(1, min(turns, NUM_TURNS)))


HABITS: Final = tuple(Habit(pace, turns) for pace in range(NUM_PACES) for turns in range(1, NUM_TURNS + 1))


def bin_of(silent_s: float) -> int:
    """The bin of a silence that is so old; NUM_BINS when it is older than all."""
    if silent_s < FIRST_EDGE_S:
        return 0
    return min(NUM_BINS, 1 + math.floor(math.log2(silent_s / FIRST_EDGE_S)))


def _log_normal(seconds: float, median_s: float, sigma: float) -> float:
    return 0.5 * math.erfc(-math.log(seconds / median_s) / (sigma * math.sqrt(2)))


def _prior() -> tuple[float, ...]:
    """Of each bin, the share that comes back within it of those silent at its start."""
    shares: list[float] = []
    silent = 1.0
    for edge in EDGES_S:
        returned = 0.5 * (0.5 * _log_normal(edge, 20.0, 1.0) + 0.5 * _log_normal(edge, 2.0, 0.6))
        shares.append(1 - (1 - returned) / silent)
        silent = 1 - returned
    return tuple(shares)


PRIOR: Final = _prior()


class _LifeTable:
    """Counts of one habit, of one pace, or of all."""

    def __init__(self) -> None:
        self.silent = [0.0] * NUM_BINS
        self.returned = [0.0] * NUM_BINS

    def count(self, bin_: int, *, returned: bool) -> None:
        self.silent[bin_] += 1
        self.returned[bin_] += returned
        if self.silent[bin_] > _MAX_COUNT:
            self.silent[bin_] /= 2
            self.returned[bin_] /= 2

    def share(self, bin_: int, prior: float, weight: float) -> float:
        return (self.returned[bin_] + weight * prior) / (self.silent[bin_] + weight)


class Rhythms:
    """What is known of how conversations go on. Every call costs at most the bins."""

    def __init__(self) -> None:
        self._all = _LifeTable()
        self._of_pace = [_LifeTable() for _ in range(NUM_PACES)]
        self._of_habit = {habit: _LifeTable() for habit in HABITS}

    def stayed_silent(self, habit: Habit, bin_: int) -> None:
        """A conversation was silent through the whole bin."""
        self._count(habit, bin_, returned=False)

    def returned(self, habit: Habit, silent_s: float) -> None:
        """A conversation went on after so long; the bins before were told by `stayed_silent`."""
        if (bin_ := bin_of(silent_s)) < NUM_BINS:
            self._count(habit, bin_, returned=True)

    def _count(self, habit: Habit, bin_: int, *, returned: bool) -> None:
        self._all.count(bin_, returned=returned)
        self._of_pace[habit.pace].count(bin_, returned=returned)
        self._of_habit[habit].count(bin_, returned=returned)

    def _share(self, habit: Habit, bin_: int) -> float:
        pooled = self._all.share(bin_, PRIOR[bin_], _PRIOR_WEIGHT)
        of_pace = self._of_pace[habit.pace].share(bin_, pooled, _POOLED_WEIGHT)
        return self._of_habit[habit].share(bin_, of_pace, _POOLED_WEIGHT)

    def p_return_within(self, habit: Habit, silent_s: float, horizon_s: float) -> float:
        """The probability that a conversation silent for `silent_s` goes on within the next `horizon_s` seconds."""
        end_s = silent_s + horizon_s
        log_silent = 0.0
        for bin_ in range(bin_of(silent_s), NUM_BINS):
            begin = EDGES_S[bin_ - 1] if bin_ else 0.0
            if begin >= end_s:
                break
            covered = min(end_s, EDGES_S[bin_]) - max(silent_s, begin)
            share = min(self._share(habit, bin_), 1 - 1e-9)
            log_silent += covered / (EDGES_S[bin_] - begin) * math.log1p(-share)
        return -math.expm1(log_silent)

    def half_back_in_s(self, habit: Habit, silent_s: float) -> float:
        """In how many seconds half of such conversations are back; infinity where so many never are.

        Within a bin they are taken to come back at a steady rate, so that the answer is finer than the bins.
        """
        wanted = math.log(2)
        passed_s = 0.0
        for bin_ in range(bin_of(silent_s), NUM_BINS):
            begin = EDGES_S[bin_ - 1] if bin_ else 0.0
            left_s = EDGES_S[bin_] - max(silent_s, begin)
            rate = -math.log1p(-min(self._share(habit, bin_), 1 - 1e-9)) / (EDGES_S[bin_] - begin)
            if rate * left_s >= wanted:
                return passed_s + wanted / rate
            wanted -= rate * left_s
            passed_s += left_s
        return math.inf

    def expected_in_s(self, habit: Habit, silent_s: float) -> float:
        """When to expect it, from now: half of those that come back at all are back by then, to the bin's end.
        Infinity for who is not expected any more."""
        ever = self.p_return_within(habit, silent_s, math.inf)
        for bin_ in range(bin_of(silent_s), NUM_BINS):
            horizon_s = EDGES_S[bin_] - silent_s
            if 2 * self.p_return_within(habit, silent_s, horizon_s) >= ever > 0:
                return horizon_s
        return math.inf
