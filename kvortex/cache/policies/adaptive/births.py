"""Runs in order of birth: which pass a border of the age bins now, and which a cache that is LRU would still hold."""

from __future__ import annotations

from array import array
from typing import Final

from kvortex.cache.policies.adaptive.hazard import EDGES_S, NUM_BINS
from kvortex.cache.policies.adaptive.runs import NO_RUN, Runs

_CROSSINGS_A_CALL: Final = 1 << 14
"""Borders that one call lets runs pass; the next call goes on."""


class Births:
    """A ring of the runs born last; those that leave it age no more.

    Births are in order of time, so one pointer a border finds every run that is due, and LRU's contents are all runs
    younger than one more pointer: neither needs a queue or a cache beside this one.
    """

    def __init__(self, runs: Runs, size: int, num_slots: int) -> None:
        self._runs = runs
        self._size = size
        self._num_slots = num_slots
        self._ring = array("i", [NO_RUN]) * size
        self.first = 0
        """The oldest birth followed; births are counted from the start."""
        self.end = 0
        self._next_due = [0] * NUM_BINS
        self._lru_first = 0
        self._lru_blocks = 0

    def has_room_for(self, count: int) -> bool:
        return self.end + count - self.first <= self._size or self.first == self.end

    def add(self, run: int) -> None:
        """A run whose number of birth is `end` is born."""
        assert self.end - self.first < self._size, (self.first, self.end)
        self._ring[self.end % self._size] = run
        self.end += 1
        self._lru_blocks += self._runs.waiting[run]

    def at(self, birth: int) -> int:
        """The run of a birth that is followed."""
        return self._ring[birth % self._size]

    def follows(self, run: int) -> bool:
        return self._runs.birth[run] >= self.first

    def grew(self, run: int, blocks: int) -> None:
        """More blocks of a run wait to be asked for."""
        self._runs.waiting[run] += blocks
        if self._runs.in_lru[run]:
            self._lru_blocks += blocks

    def hit(self, run: int, blocks: int) -> None:
        """Blocks of a run were asked for, and belong to a later birth from now on."""
        self._runs.waiting[run] -= blocks
        if self._runs.in_lru[run]:
            self._lru_blocks -= blocks

    def crossings(self, now_s: float) -> list[tuple[int, int]]:
        """Runs, and the age bin that each has lived through; their `age_bin` is moved on."""
        ring, size, end = self._ring, self._size, self.end
        born_s, age_bin = self._runs.born_s, self._runs.age_bin
        crossed: list[tuple[int, int]] = []
        for bin_ in range(NUM_BINS):
            due_s = now_s - EDGES_S[bin_ + 1]
            birth = max(self._next_due[bin_], self.first)
            stop = min(end, birth + _CROSSINGS_A_CALL - len(crossed))
            while birth < stop and born_s[run := ring[birth % size]] <= due_s:
                birth += 1
                age_bin[run] = bin_ + 1
                crossed.append((run, bin_))
            self._next_due[bin_] = birth
        return crossed

    def lru_gives_up(self) -> None:
        """The oldest runs leave LRU until what is waiting in the others fits."""
        while self._lru_blocks > self._num_slots and self._lru_first < self.end:
            self._leave_lru(self.at(self._lru_first))

    def pop_oldest(self) -> int:
        """The oldest run is followed no more: nothing of it is waited for."""
        run = self.at(self.first)
        if self._lru_first == self.first:
            self._leave_lru(run)
        self.first += 1
        self._runs.waiting[run] = 0
        self._runs.age_bin[run] = NUM_BINS
        return run

    def end_if_over(self, run: int) -> None:
        """Ends a run of which nothing is known any more."""
        runs = self._runs
        if not runs.named[run]:
            if not self.follows(run):
                runs.release(run)
            elif not runs.waiting[run]:
                runs.forget_facts(run)

    def check(self) -> None:
        """Asserts that LRU's blocks are counted right."""
        lru = [self.at(birth) for birth in range(max(self._lru_first, self.first), self.end)]
        assert sum(self._runs.waiting[run] for run in lru) == self._lru_blocks, self._lru_blocks
        assert all(self._runs.in_lru[run] for run in lru), lru

    def _leave_lru(self, run: int) -> None:
        self._lru_first += 1
        self._lru_blocks -= self._runs.waiting[run]
        self._runs.in_lru[run] = False
