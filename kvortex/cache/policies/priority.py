"""Gives up the block of lowest priority, by a formula of frequency, size and age.

priority = uses x log2(2 x size) / (1 + overdue / idle_after)

uses      times that a request asked for the block, its store included
size      blocks that are of no use without it: itself and those behind it in the prompt, at its last use
overdue   seconds unused beyond idle_after; 0 before
"""

from __future__ import annotations

import heapq
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Final

from kvortex.cache.policies.base import Choice, displace
from kvortex.cache.policies.ranked import Ranked
from kvortex.keys import BlockKey

_MAX_USES: Final = 255
_NUM_RANKS: Final = 16
"""Octaves of uses x log2(2 x size)."""
_UNKNOWN, _EVICTABLE, _BLOCKED = range(3)


class Priority:
    """See the module's text. What stands above the line counts by its octave.

    In one octave the block unused longest is the lowest, so the lowest of all is among the oldest of each octave,
    whatever time it is: a victim costs a few comparisons, however many blocks there are.
    """

    def __init__(self, num_slots: int, *, clock: Callable[[], float] = time.monotonic, idle_after_s: float) -> None:
        assert num_slots > 0, num_slots
        self._num_slots = num_slots
        self._clock = clock
        self._idle_after_s = max(idle_after_s, 1e-3)
        self.reset()

    def __len__(self) -> int:
        return self._count

    def reset(self) -> None:
        self._ranked = Ranked(_NUM_RANKS)
        self._state = bytearray(self._num_slots)
        self._uses = bytearray(self._num_slots)
        self._size = array("i", [0]) * self._num_slots
        self._used_s = array("d", [0.0]) * self._num_slots
        self._count = 0

    def prompt(self, keys: Sequence[BlockKey], num_tokens: int) -> None:
        pass

    def answered(self, keys: Sequence[BlockKey], num_output_tokens: int) -> None:
        pass

    def admitted(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:  # noqa: ARG002
        for slot in slots:
            assert self._state[slot] == _UNKNOWN, f"slot {slot} is here already"
            self._state[slot] = _EVICTABLE
            self._uses[slot] = 0
        self._use(slots)
        self._count += len(slots)

    def used(self, slots: Sequence[int]) -> None:
        self._use(list(dict.fromkeys(slots)))

    def blocked(self, slots: Sequence[int]) -> None:
        for slot in slots:
            assert self._state[slot] == _EVICTABLE, f"slot {slot} is not evictable"
            self._state[slot] = _BLOCKED
            self._ranked.discard(slot)
        self._count -= len(slots)

    def evictable(self, slots: Sequence[int]) -> None:
        """The end of a pin counts as a use for the age only."""
        now_s = self._clock()
        for slot in reversed(slots):
            assert self._state[slot] == _BLOCKED, f"slot {slot} is not blocked"
            self._state[slot] = _EVICTABLE
            self._used_s[slot] = now_s
            self._ranked.put(slot, self._rank(slot))
        self._count += len(slots)

    def removed(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._count -= self._state[slot] == _EVICTABLE
            self._forget(slot)

    def evict(self, count: int) -> list[int]:
        assert count <= self._count, f"evict {count} of {self._count} evictable slots"
        ranked, now_s = self._ranked, self._clock()
        lowest = [self._oldest(rank, now_s) for rank in ranked.filled_ranks()]
        heapq.heapify(lowest)
        victims: list[int] = []
        for _ in range(count):
            _, rank = lowest[0]
            slot = ranked.oldest_of(rank)
            victims.append(slot)
            self._forget(slot)
            if ranked.is_empty(rank):
                heapq.heappop(lowest)
            else:
                heapq.heapreplace(lowest, self._oldest(rank, now_s))
        self._count -= count
        return victims

    def choose(self, keys: Sequence[BlockKey], count: int) -> Choice:
        return displace(self, keys, count)

    def _oldest(self, rank: int, now_s: float) -> tuple[float, int]:
        """(priority, rank) of the oldest block of a rank."""
        age_s = now_s - self._used_s[self._ranked.oldest_of(rank)]
        overdue = max(0.0, age_s - self._idle_after_s)
        return (1 << rank) / (1 + overdue / self._idle_after_s), rank

    def _use(self, slots: Sequence[int]) -> None:
        """A request asked for these distinct blocks, head first."""
        now_s = self._clock()
        for size, slot in enumerate(reversed(slots), 1):
            self._uses[slot] = min(_MAX_USES, self._uses[slot] + 1)
            self._size[slot] = size
            self._used_s[slot] = now_s
            if self._state[slot] == _EVICTABLE:
                self._ranked.discard(slot)
                self._ranked.put(slot, self._rank(slot))

    def _rank(self, slot: int) -> int:
        octaves_of_size = self._size[slot].bit_length()
        return min(_NUM_RANKS, (self._uses[slot] * octaves_of_size).bit_length()) - 1

    def _forget(self, slot: int) -> None:
        self._ranked.discard(slot)
        self._state[slot] = _UNKNOWN
