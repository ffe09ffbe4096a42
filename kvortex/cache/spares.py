"""Copies in RAM that nobody misses for now: of blocks that VRAM holds too and keeps for a while yet.

A block held twice is the cheapest to give up. But not every one: a cold block that VRAM is about to take would be lost,
or copied again at once. So a copy is spare while its VRAM block is in use, or was let go later than what VRAM takes
next. Given up, its VRAM block is resident again, and is copied once more before VRAM takes it: once for each use of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvortex.cache.index import BlockIndex
from kvortex.cache.residency import Residency


class Spares:
    """Slots that were spare when they were named; looked at again when one is wanted. Scheduler thread."""

    def __init__(self, index: BlockIndex, residency: Residency) -> None:
        self._index = index
        self._residency = residency
        self._slots: dict[int, None] = {}

    def add(self, slots: Sequence[int]) -> None:
        """A request uses the blocks of these slots in VRAM, head first; slots may be here already."""
        for slot in slots:
            self._slots.pop(slot, None)
            self._slots[slot] = None

    def take(self, count: int, *, in_use: Callable[[int], bool], let_go_after_s: float) -> list[int]:
        """Up to `count` slots whose copies are spare, the one named last first.

        Costs the slots taken and those that are spare no more, which it drops: each `add` pays for one of them.

        Args:
            let_go_after_s: cold blocks let go after this are not among those that VRAM takes next.
        """
        taken: list[int] = []
        while self._slots and len(taken) < count:
            slot, _ = self._slots.popitem()
            key = self._index.loose_key(slot)
            if key is not None and self._residency.stays(key, in_use=in_use, let_go_after_s=let_go_after_s):
                taken.append(slot)
        return taken
