"""When to copy cold blocks to RAM, and which.

Storing begins when the share of VRAM that is resident (complete and without a copy) passes `threshold`, and goes on,
at most `batch_blocks` a step and what became resident in that step, until it is down to `target`. So VRAM always has
blocks that it may take at once, a step that computes more than a batch does not outrun the copies, and no copy stands
on the path of an allocation. A threshold of 0 is write-through. Blocks that RAM gave up or would not take do not count:
to copy them is not worth it, and VRAM may take them at once.

How much room a burst of allocations needs depends on the load, not on a share: sixteen conversations that return in one
step may take three quarters of VRAM at once. As many as run may be replaced at once by others that return, so the marks
leave that much room. A block that VRAM takes before it was copied all the same says that they are still too high for
this load: they drop to write-through. They come back up over `RECOVERY_S` without such a need.

What the marks ask for goes to free slots only. Once RAM is full, a copy costs another block its place, and a block that
both tiers hold takes two: then only those blocks are stored that VRAM takes next, `ahead_blocks` and what waiting
requests want, and their slots come first from spare copies, then from what the policy gives up. So VRAM and RAM hold
nearly their sum. Write-through stays what it says: every block has a copy, whatever that displaces.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvortex.cache.gate import NOBODY, Line
from kvortex.cache.index import BlockIndex, Reservation
from kvortex.cache.residency import Candidate, Residency
from kvortex.cache.spares import Spares
from kvortex.keys import BlockKey

RECOVERY_S: Final = 600.0
"""Seconds in which marks that were moved all the way down come back up. Long: a copy too many costs little."""


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Shares of the VRAM blocks, 0 to 1, `target <= threshold`; blocks a step; seconds.

    Attributes:
        ahead_blocks: blocks that VRAM takes next which are kept safe when RAM is full; at most what `threshold` leaves.
    """

    threshold: float
    target: float
    batch_blocks: int
    idle_after_s: float
    ahead_blocks: int = 0

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


LOOKS_AHEAD: Final = 8
"""What VRAM takes next is looked at again when it has taken this part of it."""
MOST_BEHIND: Final = 2048
"""Blocks looked at in one step for those behind the first in line."""

NOTHING = StoreDecision()


class VramOrder(Protocol):
    """What the planner asks of vLLM's block pool."""

    def in_use(self, block_id: int) -> bool:
        """True while a request holds the block."""
        ...

    def next_taken(self) -> Iterable[int]:
        """The blocks that no request holds, in the order in which VRAM takes them."""
        ...

    @property
    def free_blocks(self) -> int:
        """How many those are."""
        ...

    @property
    def in_use_blocks(self) -> int:
        """How many blocks requests hold."""
        ...


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
        self._write_through = watermarks.threshold == 0
        self._ahead_blocks = min(watermarks.ahead_blocks, capacity_blocks - self._start_above)
        self._looked_at: tuple[int, int] | None = None
        self._let_go_after_s = math.inf
        self._spares = Spares(index, residency)
        self.in_flight_blocks = 0
        """Blocks given out and not yet reported by `ended`."""

    def plan(self, vram: VramOrder, line: Line = NOBODY) -> StoreDecision:
        """This step's stores. Slots are reserved for those blocks that are worth more than what the policy gives up.

        Costs the blocks it stores, and a look at those that VRAM takes next for each few that it has taken; a few
        comparisons when nothing is due.

        Args:
            line: the requests that wait until what is in the blocks they want is safe.
        """
        self._need_room(self._start_above - (self._capacity_blocks - vram.in_use_blocks))
        taken = self._due_by_share(vram.in_use)
        next_taken, spared = self._due_next(vram, line, self._index.free - len(taken))
        taken += next_taken
        # Two VRAM blocks may hold the same content; one copy serves both.
        candidate_of = {c.key: c for c in taken}
        absent = self._index.absent(candidate_of)
        return (
            self._reserve([candidate_of[key] for key in absent], spared, vram.in_use) if absent or spared else NOTHING
        )

    def _due_by_share(self, in_use: Callable[[int], bool]) -> list[Candidate]:
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
            return []
        wanted = min(due - stop_at, self._marks.batch_blocks + arrived)
        self._storing = due - wanted > stop_at
        if not self._write_through:
            wanted = min(wanted, self._index.free)
        return self._residency.take(wanted, in_use=in_use, idle_after_s=self._marks.idle_after_s)

    def _due_next(self, vram: VramOrder, line: Line, free_slots: int) -> tuple[list[Candidate], list[BlockKey]]:
        """Of the blocks that VRAM takes next, those to store now; and the copies that were spared for them.

        What the first in line wants must be safe soon: where neither free slots nor spare copies, nor those that loads
        under way will leave, are enough, the policy finds room. Those behind it take what is to be had.
        """
        if self._write_through or not self._residency.queued_blocks or not (line.blocks or self._has_moved_on(vram)):
            return [], []
        first = max(line.first_blocks, self._ahead_blocks)
        blocks, first = self._next_prompts(vram, first, min(line.blocks + self._ahead_blocks, first + MOST_BEHIND))
        due = self._residency.due_among(blocks)
        spared = self._spare(len(due) - free_slots, vram.in_use)
        at_hand = free_slots + len(spared)
        urgent = bisect_left(due, first)
        now = min(len(due), at_hand + max(0, urgent - at_hand - self._index.pinned))
        self._looked_at = (self._residency.changes, vram.free_blocks) if now == len(due) else None
        # vLLM takes a prompt's tail first; the policy expects heads before tails.
        return self._residency.take_these(blocks[place] for place in reversed(due[:now])), spared

    def _has_moved_on(self, vram: VramOrder) -> bool:
        """Whether VRAM has taken a part of what was looked at. Each look pays for what was taken since the last."""
        if self._looked_at is None:
            return self._ahead_blocks > 0
        before, free_blocks = self._looked_at
        taken = max(self._residency.changes - before, free_blocks - vram.free_blocks)
        return taken * LOOKS_AHEAD >= self._ahead_blocks > 0

    def _next_prompts(self, vram: VramOrder, first: int, most: int) -> tuple[list[int], int]:
        """The next `most` blocks that VRAM takes, and how many of them are the next `first`.

        Both go on to the end of what one request has let go of. VRAM takes a prompt's tail first: judged in parts, its
        head would be declined when its tail, of no use without it, has a slot already.
        """
        blocks: list[int] = []
        edge, last_s = 0, math.inf
        let_go_of, least = self._residency.let_go_s, min(first, most)
        for block_id in vram.next_taken():
            let_go_s = let_go_of.get(block_id, math.inf)
            if len(blocks) >= least and (let_go_s == math.inf or let_go_s != last_s):
                if len(blocks) >= first and not edge:
                    edge = len(blocks)
                if len(blocks) >= most:
                    self._let_go_after_s = last_s
                    break
            blocks.append(block_id)
            last_s = let_go_s
        else:
            self._let_go_after_s = math.inf
        return blocks, edge or len(blocks)

    def in_vram_too(self, slots: Sequence[int]) -> None:
        """A request uses the blocks of these slots in VRAM, head first: their copies may be spared."""
        self._spares.add(slots)

    def _reserve(
        self, candidates: Sequence[Candidate], spared: Sequence[BlockKey], in_use: Callable[[int], bool]
    ) -> StoreDecision:
        keys = [c.key for c in candidates]
        refused = max(0, len(keys) - self._index.free - self._index.evictable)
        room = self._index.make_room(keys)
        self._copies_lost(room.evicted, in_use)
        wanted = set(room.keys)
        left = [key for key in keys if key not in wanted]
        not_worth = len(left) - refused
        self._residency.declined(left[:not_worth])  # the tails behind them are what found no slot
        if not wanted:
            return StoreDecision(evicted=(*spared, *room.evicted), refused=refused, not_worth=not_worth)
        reservation = self._index.reserve(room.keys)
        assert isinstance(reservation, Reservation), reservation
        self.in_flight_blocks += len(wanted)
        kept = tuple(c for c in candidates if c.key in wanted)
        return StoreDecision(kept, reservation, (*spared, *room.evicted), refused, not_worth)

    def _copies_lost(self, keys: Iterable[BlockKey], in_use: Callable[[int], bool]) -> None:
        """The policy gave these up. What VRAM keeps for a while is offered again before VRAM takes it."""
        residency = self._residency
        if not self._write_through:
            after_s = self._let_go_after_s
            residency.copies_spared(
                [key for key in keys if residency.stays(key, in_use=in_use, let_go_after_s=after_s)]
            )
        residency.copies_lost(keys)

    def _spare(self, slots: int, in_use: Callable[[int], bool]) -> list[BlockKey]:
        """Gives up to so many copies that are spare."""
        if slots <= 0:
            return []
        keys = self._index.give_up(self._spares.take(slots, in_use=in_use, let_go_after_s=self._let_go_after_s))
        self._residency.copies_spared(keys)
        return keys

    @property
    def extra_room_blocks(self) -> float:
        """How far both marks are down, in blocks."""
        regained = self._capacity_blocks * (self._clock() - self._extra_room_at) / RECOVERY_S
        return max(0.0, self._extra_room - regained)

    def outrun(self) -> None:
        """VRAM took a resident block for something else before it was copied, or a request waits until it is. With RAM
        full the marks say nothing."""
        if not self._index.free and not self._write_through:
            return
        self._need_room(self._capacity_blocks)

    def _need_room(self, blocks: int) -> None:
        if blocks > self.extra_room_blocks:
            self._extra_room = float(blocks)
            self._extra_room_at = self._clock()

    def ended(self, num_blocks: int) -> None:
        """The stores of `num_blocks` blocks ended, whatever the outcome."""
        self.in_flight_blocks -= num_blocks
        assert self.in_flight_blocks >= 0, (self.in_flight_blocks, num_blocks)
