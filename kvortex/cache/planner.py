"""When to copy cold blocks to RAM, and which.

Storing begins when the share of VRAM that is resident (complete and without a copy) passes `threshold`, and goes on,
at most `batch_blocks` a step and what became resident in that step, until it is down to `target`. So VRAM always has
blocks that it may take at once, a step that computes more than a batch does not outrun the copies, and no copy stands
on the path of an allocation. A threshold of 0 is write-through.

How much room a burst of allocations needs depends on the load, not on a share: sixteen conversations that return in one
step may take three quarters of VRAM at once. As many as run may be replaced at once by others that return, so the marks
leave that much room. A block that VRAM takes before it was copied all the same says that they are still too high for
this load: they drop to write-through. They come back up over `RECOVERY_S` without such a need.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvortex.cache.index import BlockIndex, KeyState, Refused, Reservation
from kvortex.cache.residency import Candidate, Residency

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
        refused: blocks that found no slot, all being pinned; counted once, they are due again after their next use.
    """

    candidates: tuple[Candidate, ...] = ()
    reservation: Reservation | None = None
    refused: int = 0


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

    def plan(self, in_use: Callable[[int], bool], in_use_blocks: int) -> StoreDecision:
        """This step's stores. Slots are reserved, evicting what the policy gives up; all or nothing for the batch.

        Costs the blocks it stores; a few comparisons when nothing is due.

        Args:
            in_use: whether a request holds the block.
            in_use_blocks: how many are held.
        """
        self._need_room(self._start_above - (self._capacity_blocks - in_use_blocks))
        due = self._residency.resident_blocks - self.in_flight_blocks
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
        # Two VRAM blocks may hold the same content; one copy serves both. The policy expects heads before tails, and
        # the queue gives tails first.
        unique = {c.key: c for c in reversed(taken) if self._index.state_of(c.key) is KeyState.ABSENT}
        candidates = tuple(unique.values())
        return self._reserve(candidates) if candidates else NOTHING

    def _reserve(self, candidates: tuple[Candidate, ...]) -> StoreDecision:
        answer = self._index.reserve([c.key for c in candidates])
        refused = 0
        if isinstance(answer, Refused):
            refused = len(candidates) - answer.available
            candidates = candidates[refused:]
            if not candidates:
                return StoreDecision(refused=refused)
            answer = self._index.reserve([c.key for c in candidates])
        assert isinstance(answer, Reservation), answer
        self._residency.copies_lost(answer.evicted)
        self.in_flight_blocks += len(candidates)
        return StoreDecision(candidates, answer, refused)

    @property
    def extra_room_blocks(self) -> float:
        """How far both marks are down, in blocks."""
        regained = self._capacity_blocks * (self._clock() - self._extra_room_at) / RECOVERY_S
        return max(0.0, self._extra_room - regained)

    def block_lost(self) -> None:
        """VRAM took a resident block for something else before it was copied."""
        self._need_room(self._capacity_blocks)

    def _need_room(self, blocks: int) -> None:
        if blocks > self.extra_room_blocks:
            self._extra_room = float(blocks)
            self._extra_room_at = self._clock()

    def ended(self, num_blocks: int) -> None:
        """The stores of `num_blocks` blocks ended, whatever the outcome."""
        self.in_flight_blocks -= num_blocks
        assert self.in_flight_blocks >= 0, (self.in_flight_blocks, num_blocks)
