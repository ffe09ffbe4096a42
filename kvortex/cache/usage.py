"""When each slot's block was stored and last asked for, and how often: for people, not for the policy."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence


class SlotUsage:
    """20 bytes a slot in arrays that are never replaced, so that another thread may read them at any time.

    Attributes:
        stored_s, used_s: by `clock`; a block that was never asked for was used when it was stored.
        uses: requests that asked for the block since it was stored.
    """

    def __init__(self, num_slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.stored_s = array("d", [0.0]) * num_slots
        self.used_s = array("d", [0.0]) * num_slots
        self.uses = array("I", [0]) * num_slots

    def stored(self, slots: Sequence[int]) -> None:
        """New blocks lie in these slots."""
        now_s = self.clock()
        for slot in slots:
            self.stored_s[slot] = self.used_s[slot] = now_s
            self.uses[slot] = 0

    def used(self, slots: Sequence[int]) -> None:
        """A request asked for these blocks."""
        now_s, used_s, uses = self.clock(), self.used_s, self.uses
        for slot in slots:
            used_s[slot] = now_s
            uses[slot] += 1
