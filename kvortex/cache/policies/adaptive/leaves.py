"""The runs on which no held one hangs, ranked by what they are worth: where room is made."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Final

from kvortex.cache.policies.adaptive.hazard import EDGES_S, NUM_BINS
from kvortex.cache.policies.adaptive.runs import Runs
from kvortex.cache.policies.ranked import Ranked

_NUM_RANKS: Final = 512
_RANKS_AN_OCTAVE: Final = 16
_LOWEST_WORTH: Final = 1e-9
"""Hits a second; 2^-30, the lowest rank."""

_WORTH: Final = struct.Struct("f")


class Leaves:
    """Leaves by rank and by age, and the other runs that hold an evictable slot."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._by_rank = Ranked(_NUM_RANKS)
        self._by_age = Ranked(NUM_BINS + 1)
        self._others = Ranked(1)
        self.now_s = -math.inf

    def lowest_rank(self) -> int | None:
        """None: there is no leaf."""
        return self._by_rank.lowest_rank() if self._by_rank else None

    def worst(self, *, by_age: bool) -> int:
        """The leaf to take room from first: of the lowest rank, or `by_age`, the oldest. If there is none, every tail
        is pinned, or hangs on a pinned one: another run, whose heads must do."""
        if not self._by_rank:
            return self._others.newest_of_lowest()
        # Of one rank the newest: that it is the better of the two is a coin flip.
        return self._by_age.oldest_of_highest() if by_age else self._by_rank.newest_of_lowest()

    def settle(self, run: int) -> None:
        """Puts a run where what it holds says: leaf, other, or nowhere. One that stays a leaf keeps its place."""
        if self._runs.is_leaf(run):
            self._others.discard(run)
            if run not in self._by_rank:
                self._by_rank.put(run, self.rank(run))
                self._by_age.put(run, self._runs.age_bin[run])
            return
        self._by_rank.discard(run)
        self._by_age.discard(run)
        if not self._runs.evictable[run]:
            self._others.discard(run)
        elif run not in self._others:
            self._others.put(run, 0)

    def settle_slots(self, slots: Iterable[int]) -> None:
        """The same for the runs of these slots."""
        for run in dict.fromkeys(self._runs.run_of[slot] for slot in slots):
            self.settle(run)

    def rerank(self, run: int) -> None:
        """A leaf's worth or age bin has changed."""
        if run in self._by_rank:
            self._by_rank.discard(run)
            self._by_age.discard(run)
            self.settle(run)

    def check(self, runs: Iterable[int]) -> None:
        """Asserts that each run is where it belongs."""
        for run in runs:
            is_leaf = self._runs.is_leaf(run)
            is_other = not is_leaf and self._runs.evictable[run] > 0
            places = (run in self._by_rank, run in self._by_age, run in self._others)
            assert places == (is_leaf, is_leaf, is_other), (run, places, is_leaf, is_other)

    def rank(self, run: int) -> int:
        """Of the run's worth at its age: 16 ranks an octave."""
        worth, bin_ = self._runs.worth[run], self._runs.age_bin[run]
        if not worth:
            return 0
        value: float = _WORTH.unpack_from(worth, 4 * bin_)[0]
        if bin_ < NUM_BINS:
            start_s, end_s = EDGES_S[bin_], EDGES_S[bin_ + 1]
            share = (self.now_s - self._runs.born_s[run] - start_s) / (end_s - start_s)
            share = min(1.0, max(0.0, share))
            value = value * (1 - share) + _WORTH.unpack_from(worth, 4 * bin_ + 4)[0] * share
        rank = int((math.log2(value + _LOWEST_WORTH) + 30) * _RANKS_AN_OCTAVE)
        return min(_NUM_RANKS - 1, max(0, rank))
