"""Gives up the block that was used longest ago."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvortex.cache.policies.base import Choice, displace
from kvortex.keys import BlockKey

_OUTSIDE = -1


class LRU:
    """Least recently used first; within one batch, the tail of the prompt first.

    A block is used when it is stored, when a request asks for it, and when its last pin ends.

    A ring in two fixed arrays, 8 bytes a slot, rather than an OrderedDict: at a million slots the scheduler
    would stand still for 70 ms whenever its table is rebuilt.
    """

    def __init__(self, num_slots: int) -> None:
        assert num_slots > 0, num_slots
        self._num_slots = num_slots
        self.reset()

    def __len__(self) -> int:
        return self._count

    def reset(self) -> None:
        # The ring's anchor stands behind the last slot: the newer one beside it is the oldest slot of all.
        anchor = self._num_slots
        self._newer = array("i", [_OUTSIDE]) * (anchor + 1)
        self._older = array("i", [_OUTSIDE]) * (anchor + 1)
        self._newer[anchor] = self._older[anchor] = anchor
        self._count = 0

    def prompt(self, keys: Sequence[BlockKey], num_tokens: int) -> None:
        pass

    def answered(self, keys: Sequence[BlockKey], num_output_tokens: int) -> None:
        pass

    def admitted(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:  # noqa: ARG002
        self._append(slots)

    def used(self, slots: Sequence[int]) -> None:
        newer = self._newer
        # Blocked slots are passed over: the end of their pin is a later use anyway.
        inside = [slot for slot in dict.fromkeys(slots) if newer[slot] != _OUTSIDE]
        self._unlink(inside)
        self._append(inside)

    def blocked(self, slots: Sequence[int]) -> None:
        self._unlink(slots)

    def evictable(self, slots: Sequence[int]) -> None:
        self._append(slots)

    def removed(self, slots: Sequence[int]) -> None:
        newer = self._newer
        self._unlink([slot for slot in slots if newer[slot] != _OUTSIDE])

    def evict(self, count: int) -> list[int]:
        assert count <= self._count, f"evict {count} of {self._count} evictable slots"
        newer, older, anchor = self._newer, self._older, self._num_slots
        victims = []
        slot = newer[anchor]
        for _ in range(count):
            victims.append(slot)
            following = newer[slot]
            newer[slot] = _OUTSIDE
            slot = following
        newer[anchor] = slot
        older[slot] = anchor
        self._count -= count
        return victims

    def choose(self, keys: Sequence[BlockKey], count: int) -> Choice:
        return displace(self, keys, count)

    def _append(self, slots: Sequence[int]) -> None:
        """Adds slots from outside the ring as its newest; the first of them ends up newest."""
        newer, older, anchor = self._newer, self._older, self._num_slots
        newest = older[anchor]
        for slot in reversed(slots):
            assert newer[slot] == _OUTSIDE, f"slot {slot} is evictable already"
            newer[newest] = slot
            older[slot] = newest
            # Linked at both ends at once, so that a slot twice in the batch meets the assertion above.
            newer[slot] = anchor
            newest = slot
        older[anchor] = newest
        self._count += len(slots)

    def _unlink(self, slots: Sequence[int]) -> None:
        newer, older = self._newer, self._older
        for slot in slots:
            after = newer[slot]
            assert after != _OUTSIDE, f"slot {slot} is not evictable"
            before = older[slot]
            newer[before] = after
            older[after] = before
            newer[slot] = _OUTSIDE
        self._count -= len(slots)
