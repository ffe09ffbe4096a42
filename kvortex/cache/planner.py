"""When to copy cold blocks to RAM, and which.

Storing begins when the share of VRAM that is resident (complete and without a copy) passes `threshold`, and goes on,
at most `batch_blocks` a step and what became resident in that step, until it is down to `target`. So VRAM always has
blocks that it may take at once, a step that computes more than a batch does not outrun the copies, and no copy stands
on the path of an allocation. A threshold of 0 is write-through. Blocks that RAM gave up or would not take do not count:
to copy them is not worth it, and VRAM may take them at once.

How much room a burst of allocations needs depends on the load, not on a share: sixteen conversations that return in one
step may take three quarters of VRAM at once. A block that VRAM takes before it was copied says that the marks are too
high for this load: they drop to write-through, and come back up over `RECOVERY_S` without such a loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvortex.cache.index import BlockIndex, Reservation
from kvortex.cache.residency import Candidate, Residency
from kvortex.keys import BlockKey

RECOVERY_S: Final = 600.0
"""Seconds in which marks that were moved all the way down come back up. Long: a copy too many costs little."""


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Shares of the VRAM blocks, 0 to 1, `target <= threshold`; blocks a step; seconds."""

    threshold: float
    target: float
    batch_blocks: int
    idle_after_s: float

    def __post_init__(self) -> None:
        assert 0 <= self.target <= self.threshold <= 1, (self.target, self.threshold)
        assert self.batch_blocks >= 1, self.batch_blocks


@dataclass(frozen=True, slots=True)
class StoreDecision:
    """What one step stores: block `candidates[i]` goes to `reservation.slots[i]`; no reservation, nothing to store.

    Attributes:
        evicted: keys that RAM gave up for them.
        refused: blocks that found no slot, all being pinned or written; counted once, they are due again after their
            next use.
        not_worth: blocks that are worth less than all that RAM holds; counted once, due again after their next use.
    """

    candidates: tuple[Candidate, ...] = ()
    reservation: Reservation | None = None
    evicted: tuple[BlockKey, ...] = ()
    refused: int = 0
    not_worth: int = 0


NOTHING = StoreDecision()


class OffloadPlanner:
    """Decides, once a step, which blocks to store. EngineCore process, scheduler thread."""

    def __init__(
        self,
        watermarks: Watermarks,
        capacity_blocks: int,
        residency: Residency,
        index: BlockIndex,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._marks = watermarks
        self._capacity_blocks = capacity_blocks
        self._clock = clock
        self._arrivals_seen = residency.arrivals
        self._extra_room = 0.0
        self._extra_room_at = clock()
        self._start_above = int(watermarks.threshold * capacity_blocks)
        self._stop_at = int(watermarks.target * capacity_blocks)
        self._residency = residency
        self._index = index
        self._storing = False
        self.in_flight_blocks = 0
        """Blocks given out and not yet reported by `ended`."""

    def plan(self, in_use: Callable[[int], bool]) -> StoreDecision:
        """This step's stores. Slots are reserved for those blocks that are worth more than what the policy gives up.

        Costs the blocks it stores; one comparison when nothing is due.
        """
        due = self._residency.resident_blocks - self._residency.given_up_blocks - self.in_flight_blocks
        arrived = self._residency.arrivals - self._arrivals_seen
        self._arrivals_seen = self._residency.arrivals
        room = int(self.extra_room_blocks)
        stop_at = max(0, self._stop_at - room)
        if due > max(0, self._start_above - room):
            self._storing = True
        if due <= stop_at:
            self._storing = False
        if not self._storing:
            return NOTHING
        wanted = min(due - stop_at, self._marks.batch_blocks + arrived)
        self._storing = due - wanted > stop_at
        taken = self._residency.take(wanted, in_use=in_use, idle_after_s=self._marks.idle_after_s)
        # Two VRAM blocks may hold the same content; one copy serves both.
        candidate_of = {c.key: c for c in taken}
        absent = self._index.absent(candidate_of)
        return self._reserve([candidate_of[key] for key in absent]) if absent else NOTHING

    def _reserve(self, candidates: Sequence[Candidate]) -> StoreDecision:
        keys = [c.key for c in candidates]
        refused = max(0, len(keys) - self._index.free - self._index.evictable)
        room = self._index.make_room(keys)
        self._residency.copies_lost(room.evicted)
        wanted = set(room.keys)
        left = [key for key in keys if key not in wanted]
        not_worth = len(left) - refused
        self._residency.declined(left[:not_worth])  # the tails behind them are what found no slot
        if not wanted:
            return StoreDecision(refused=refused, not_worth=not_worth)
        reservation = self._index.reserve(room.keys)
        assert isinstance(reservation, Reservation), reservation
        self.in_flight_blocks += len(wanted)
        kept = tuple(c for c in candidates if c.key in wanted)
        return StoreDecision(kept, reservation, room.evicted, refused, not_worth)

    @property
    def extra_room_blocks(self) -> float:
        """How far both marks are down, in blocks."""
        regained = self._capacity_blocks * (self._clock() - self._extra_room_at) / RECOVERY_S
        return max(0.0, self._extra_room - regained)

    def block_lost(self) -> None:
        """VRAM took a resident block for something else before it was copied."""
        self._extra_room = float(self._capacity_blocks)
        self._extra_room_at = self._clock()

    def ended(self, num_blocks: int) -> None:
        """The stores of `num_blocks` blocks ended, whatever the outcome."""
        self.in_flight_blocks -= num_blocks
        assert self.in_flight_blocks >= 0, (self.in_flight_blocks, num_blocks)
