"""VRAM and RAM as the server runs them: its index, policy, residency and planner over a model of vLLM's block pool.

Requests are played one after another, and every copy ends at once: what a server does while several run is not here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

from kvortex.cache.gate import NOBODY, Line
from kvortex.cache.index import Reservation
from kvortex.cache.planner import OffloadPlanner, StoreDecision, Watermarks
from kvortex.cache.residency import Residency
from kvortex.keys import BlockKey
from kvortex.replay.tiers import IndexTier, Moved
from kvortex.replay.trace import TracedRequest

_THRESHOLD: Final = 0.85
_TARGET: Final = 0.75
_STEP_TOKENS: Final = 8192


class BlockPool:
    """vLLM's: blocks that no request holds lie in a row, and the one that lies longest is taken first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, BlockKey | None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of: dict[BlockKey, int] = {}

    def held(self, keys: Sequence[BlockKey]) -> list[int]:
        """The blocks of the leading keys that VRAM has."""
        blocks: list[int] = []
        for key in keys:
            if (block_id := self._block_of.get(key)) is None:
                break
            blocks.append(block_id)
        return blocks

    def hold(self, block_ids: Sequence[int]) -> None:
        """A request holds these from now on."""
        for block_id in block_ids:
            del self._free[block_id]

    def take(self, count: int) -> list[tuple[int, BlockKey | None]]:
        """The next blocks for a request, and what was in each."""
        taken = [self._free.popitem(last=False) for _ in range(count)]
        for _, key in taken:
            if key is not None:
                del self._block_of[key]
        return taken

    def let_go(self, block_ids: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """A request is over; the tail is taken first."""
        for block_id, key in zip(reversed(block_ids), reversed(keys), strict=True):
            self._free[block_id] = key
            self._block_of[key] = block_id

    def in_use(self, block_id: int) -> bool:
        return block_id not in self._free

    def next_taken(self) -> Iterator[int]:
        return iter(self._free)

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def in_use_blocks(self) -> int:
        return self.num_blocks - len(self._free)


class TwoTiers(IndexTier):
    """RAM behind a VRAM of at least one block. `play` is given what `prefix` says."""

    def __init__(
        self, policy: str, num_slots: int, num_vram_blocks: int, *, block_tokens: int, idle_after_s: float = 30.0
    ) -> None:
        super().__init__(policy, num_slots, idle_after_s=idle_after_s)
        self.pool = BlockPool(num_vram_blocks)
        self.residency = Residency(self._clock)
        marks = Watermarks(
            threshold=_THRESHOLD,
            target=_TARGET,
            batch_blocks=num_vram_blocks,
            idle_after_s=idle_after_s,
            ahead_blocks=2 * _STEP_TOKENS // block_tokens,
        )
        self.planner = OffloadPlanner(marks, num_vram_blocks, self.residency, self.index, self._clock)

    def prefix(self, blocks: Sequence[int]) -> int:
        """Leading blocks that VRAM holds."""
        return len(self.pool.held(self.keys_of(blocks)))

    def put(self, blocks: Sequence[int]) -> None:
        """Nothing: `play` has done it."""

    def play(self, request: TracedRequest, in_vram: int) -> Moved:
        index, planner = self.index, self.planner
        self._clock.now_s = request.arrival_s
        keys = self.keys_of(request.blocks)
        index.prompt(keys, request.input_tokens)
        # vLLM refuses a prompt larger than VRAM. Here its head is in VRAM, and its tail goes to RAM at once.
        grown = [*keys, *self.keys_of(request.output_blocks)]
        inside, outside = grown[: self.pool.num_blocks], grown[self.pool.num_blocks :]
        block_ids = self.pool.held(keys[:in_vram])
        self.pool.hold(block_ids)
        copies = list(index.ready_slots(keys[:in_vram]).values())
        index.touch(copies)
        planner.in_vram_too(copies)
        stored = self._make_safe(len(inside) - len(block_ids))
        loaded = index.match(keys[in_vram:])
        index.pin(loaded)
        for block_id, before in self.pool.take(len(inside) - len(block_ids)):
            if before is not None:
                self.residency.block_uncached(block_id, before)
            key = inside[len(block_ids)]
            block_ids.append(block_id)
            self.residency.block_cached(block_id, key, in_ram=bool(index.match([key])))
        stored += self._store(index.absent(outside))
        index.unpin(loaded)
        planner.in_vram_too([slot for slot in loaded if self.residency.holds(index.key_of(slot))])
        index.touch(index.match(grown))
        index.answered(grown, request.output_tokens)
        self.residency.used(reversed(block_ids))
        self.pool.let_go(block_ids, inside)
        return Moved(len(loaded), stored + self._make_safe(0))

    def _make_safe(self, wanted: int) -> int:
        """Stores what is due before VRAM takes `wanted` blocks; returns how many were stored."""
        stored = 0
        line = Line(wanted, wanted) if wanted else NOBODY
        while True:
            decision = self.planner.plan(self.pool, line)
            if decision.reservation is not None:
                stored += self._complete(decision, decision.reservation)
            elif not decision.not_worth:
                return stored

    def _complete(self, decision: StoreDecision, reservation: Reservation) -> int:
        self.index.publish(reservation.slots)
        for candidate in decision.candidates:
            self.residency.copied(candidate.key)
        self.planner.ended(len(decision.candidates))
        return len(decision.candidates)
