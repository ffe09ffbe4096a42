"""Which complete blocks VRAM holds, which of them RAM holds too, and which should be copied next.

    resident   complete in VRAM, no copy in RAM      candidate for a store while it was not tried since its last use
    clean      complete in VRAM, copy in RAM         VRAM may take its place at once
    given up   resident, and RAM gave its copy up or declined it: not worth a copy before its next use; VRAM may take
               its place at once

Told by the view of vLLM's block pool and by the RAM index; asked by the planner. Every call costs the blocks it names,
never the blocks held. EngineCore process, scheduler thread.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Set
from itertools import islice
from typing import Final, NamedTuple

from kvortex.keys import BlockKey

EXAMINED_PER_CANDIDATE = 2
"""How many queue heads may be looked at for each block wanted; bounds a step that meets blocks in use."""

_LOOKS: Final = 10


class Candidate(NamedTuple):
    """A resident block that may be stored.

    Attributes:
        completion: counts the blocks that VRAM has completed: this one's number.
    """

    block_id: int
    key: BlockKey
    completion: int


class Residency:
    """The VRAM side of the cache as the scheduler side knows it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._key_of: dict[int, BlockKey] = {}
        self._blocks_of: dict[BlockKey, set[int]] = {}
        self._clean_keys: set[BlockKey] = set()
        self._clean_blocks = 0
        self._given_up_keys: set[BlockKey] = set()
        self._given_up_blocks = 0
        self.arrivals = 0
        """Blocks that became resident so far."""
        self.changes = 0
        """Blocks that VRAM has completed, or taken for something else, so far."""
        # When each block became complete: a prompt's heads before its tails.
        self._number_of: dict[int, int] = {}
        self._next_number = 0
        # When a request last let go of each block, and the keys whose copy was spared since.
        self._let_go_s: dict[int, float] = {}
        self._spared_keys: set[BlockKey] = set()
        # Resident blocks not yet given out for a store, the longest unused first, with the time of their last use.
        self._queue: OrderedDict[int, float] = OrderedDict()

    @property
    def completions(self) -> int:
        """Blocks that VRAM has completed so far."""
        return self._next_number

    @property
    def complete_blocks(self) -> int:
        return len(self._key_of)

    @property
    def clean_blocks(self) -> int:
        return self._clean_blocks

    @property
    def resident_blocks(self) -> int:
        return len(self._key_of) - self._clean_blocks

    @property
    def given_up_blocks(self) -> int:
        """Resident blocks that are not worth a copy."""
        return self._given_up_blocks

    @property
    def queued_blocks(self) -> int:
        """Resident blocks that a store could take now."""
        return len(self._queue)

    def holds(self, key: BlockKey) -> bool:
        """True while VRAM has a complete block of this key."""
        return key in self._blocks_of

    def is_clean(self, key: BlockKey) -> bool:
        """True while VRAM and RAM both hold the block of this key."""
        return key in self._clean_keys

    def is_given_up(self, key: BlockKey) -> bool:
        """True while VRAM holds the block of this key, and it is not worth a copy."""
        return key in self._given_up_keys

    def key_of(self, block_id: int) -> BlockKey | None:
        """The key of a complete block; None for one that is not."""
        return self._key_of.get(block_id)

    def is_due(self, block_id: int) -> bool:
        """True while a store of this block is wanted and was not ordered."""
        return block_id in self._queue

    def due_among(self, block_ids: Iterable[int]) -> list[int]:
        """Index in `block_ids` of those for which `is_due`."""
        due = self._queue
        return [i for i, block_id in enumerate(block_ids) if block_id in due]

    def at_stake(
        self, next_taken: Iterable[int], count: int, *, hit: Set[BlockKey], copied_from: Container[int]
    ) -> bool:
        """Whether one of the next `count` blocks that VRAM takes is due for a copy or being copied.

        Args:
            hit: complete blocks that are taken out of VRAM's order before.
            copied_from: the blocks that stores read.
        """
        key_of, due = self._key_of, self._queue
        for block_id in next_taken:
            if key_of.get(block_id) in hit:
                continue
            if not count:
                return False
            if block_id in due or block_id in copied_from:
                return True
            count -= 1
        return False

    @property
    def let_go_s(self) -> Mapping[int, float]:
        """When a request last let go of each complete block of which one has."""
        return self._let_go_s

    def stays(self, key: BlockKey, *, in_use: Callable[[int], bool], let_go_after_s: float) -> bool:
        """True for a clean block that VRAM will keep for a while, and whose copy was not spared since its last use."""
        if key not in self._clean_keys or key in self._spared_keys:
            return False
        let_go = self._let_go_s
        return any(in_use(block) or let_go.get(block, -math.inf) > let_go_after_s for block in self._blocks_of[key])

    def longest_unused(self, count: int) -> list[tuple[Candidate, float]]:
        """Up to `count` blocks at the queue's head, with the seconds since their last use; none where the queue never
        stands still. Any thread."""
        head: list[tuple[int, float]] = []
        for _ in range(_LOOKS):
            try:
                head = list(islice(self._queue.items(), count))
                break
            except RuntimeError:
                continue  # the scheduler's thread changed the queue meanwhile
        now = self._clock()
        named = [(b, self._key_of.get(b), self._number_of.get(b), now - used_at) for b, used_at in head]
        return [
            (Candidate(block_id, key, number), idle_s)
            for block_id, key, number, idle_s in named
            if key is not None and number is not None
        ]

    def block_cached(self, block_id: int, key: BlockKey, *, in_ram: bool) -> None:
        """VRAM block `block_id` is complete and found under `key`; `in_ram` if a copy is published already."""
        if block_id in self._key_of:
            return  # vLLM may file one block under more hashes; the first names it
        if key in self._given_up_keys:
            self._worth_a_copy(key)  # that it was computed again is a use
        self._key_of[block_id] = key
        self.changes += 1
        self._number_of[block_id] = self._next_number
        self._next_number += 1
        if (blocks := self._blocks_of.get(key)) is None:
            self._blocks_of[key] = {block_id}
        else:
            blocks.add(block_id)
        if in_ram:
            self._clean_keys.add(key)
        if key in self._clean_keys:
            self._clean_blocks += 1
        else:
            self.arrivals += 1
            self._queue[block_id] = self._clock()

    def block_uncached(self, block_id: int, key: BlockKey) -> bool:
        """VRAM no longer finds `block_id` under `key`: it is about to be written anew. False if named otherwise."""
        if self._key_of.get(block_id) != key:
            return False
        self.changes += 1
        del self._key_of[block_id], self._number_of[block_id]
        self._queue.pop(block_id, None)
        self._let_go_s.pop(block_id, None)
        if key in self._clean_keys:
            self._clean_blocks -= 1
        if key in self._given_up_keys:
            self._given_up_blocks -= 1
        blocks = self._blocks_of[key]
        if len(blocks) > 1:
            blocks.remove(block_id)
        else:
            del self._blocks_of[key]
            self._clean_keys.discard(key)
            self._given_up_keys.discard(key)
            self._spared_keys.discard(key)
        return True

    def copied(self, key: BlockKey) -> None:
        """RAM has published a copy of `key`: its VRAM blocks are clean."""
        blocks = self._blocks_of.get(key)
        if blocks is None or key in self._clean_keys:
            return
        self._worth_a_copy(key)
        self._clean_keys.add(key)
        self._clean_blocks += len(blocks)
        for block_id in blocks:
            self._queue.pop(block_id, None)

    def copies_lost(self, keys: Iterable[BlockKey]) -> None:
        """RAM has given up these keys. Their VRAM blocks are resident again, and stored again only after their next
        use: a RAM tier smaller than VRAM would otherwise copy the same blocks for ever."""
        for key in keys:
            if key in self._clean_keys:
                self._clean_keys.remove(key)
                self._clean_blocks -= len(self._blocks_of[key])
                self._give_up(key)

    def copies_spared(self, keys: Iterable[BlockKey]) -> None:
        """RAM has given up these copies of clean blocks because VRAM keeps them for a while: they are resident, and due
        before VRAM takes them. Once for each use of a block, or copies would go round in a circle."""
        now = self._clock()
        for key in keys:
            self._clean_keys.remove(key)
            self._clean_blocks -= len(self._blocks_of[key])
            self._spared_keys.add(key)
            for block_id in self._blocks_of[key]:
                self._queue[block_id] = now

    def declined(self, keys: Iterable[BlockKey]) -> None:
        """These resident blocks, taken off the queue, are worth less than what RAM holds: they are offered again only
        after their next use."""
        for key in keys:
            self._give_up(key)

    def _give_up(self, key: BlockKey) -> None:
        if key not in self._given_up_keys:
            self._given_up_keys.add(key)
            self._given_up_blocks += len(self._blocks_of[key])
            for block_id in self._blocks_of[key]:
                self._queue.pop(block_id, None)

    def _worth_a_copy(self, key: BlockKey) -> None:
        if key in self._given_up_keys:
            self._given_up_keys.remove(key)
            self._given_up_blocks -= len(self._blocks_of[key])

    def used(self, block_ids: Iterable[int]) -> None:
        """A request that used these blocks ended, the block used last named last: its resident ones move to the
        queue's end, and come back to it if they had left it."""
        now = self._clock()
        for block_id in block_ids:
            key = self._key_of.get(block_id)
            if key is None:
                continue
            self._let_go_s[block_id] = now
            self._spared_keys.discard(key)
            if key not in self._clean_keys:
                self._worth_a_copy(key)
                self._queue[block_id] = now
                self._queue.move_to_end(block_id)

    def take(self, count: int, *, in_use: Callable[[int], bool], idle_after_s: float) -> list[Candidate]:
        """Takes up to `count` blocks off the queue: cold ones idle for `idle_after_s` first, then other cold ones, then
        complete blocks of running requests; within each, the longest unused first. Looks at a bounded number of
        blocks; those in use that it passes over go to the queue's end, where their next use puts them anyway.

        Returns them with a prompt's heads before its tails.
        """
        if count <= 0:
            return []
        now = self._clock()
        idle: list[int] = []
        fresh: list[int] = []
        busy: list[int] = []
        for block_id, last_used in islice(self._queue.items(), EXAMINED_PER_CANDIDATE * count):
            if in_use(block_id):
                busy.append(block_id)
            elif now - last_used >= idle_after_s:
                idle.append(block_id)
            else:
                fresh.append(block_id)
        cold = (idle + fresh)[:count]
        running = busy[: count - len(cold)]
        for block_id in cold + running:
            del self._queue[block_id]
        for block_id in busy:
            if block_id in self._queue:
                self._queue[block_id] = now
                self._queue.move_to_end(block_id)
        # The end of a request queues its tail first. Blocks of one that runs lie as they came, or as an earlier request
        # left them.
        taken = sorted(running, key=self._number_of.__getitem__) + cold[::-1]
        return self._candidates(taken)

    def take_these(self, block_ids: Iterable[int]) -> list[Candidate]:
        """Takes these blocks off the queue, those of them that are in it, in the order given."""
        taken = [block_id for block_id in block_ids if block_id in self._queue]
        for block_id in taken:
            del self._queue[block_id]
        return self._candidates(taken)

    def _candidates(self, block_ids: Iterable[int]) -> list[Candidate]:
        return [Candidate(block, self._key_of[block], self._number_of[block]) for block in block_ids]

    def all_copies_lost(self) -> None:
        """RAM was emptied: every complete block is resident and due again. Costs the blocks of VRAM; for resets."""
        self._clean_keys.clear()
        self._clean_blocks = 0
        self._given_up_keys.clear()
        self._given_up_blocks = 0
        now = self._clock()
        for block_id in self._key_of:
            self._queue.setdefault(block_id, now)

    def clear(self) -> None:
        """vLLM forgot its prefix cache."""
        self._key_of.clear()
        self._number_of.clear()
        self._let_go_s.clear()
        self._spared_keys.clear()
        self._blocks_of.clear()
        self._clean_keys.clear()
        self._clean_blocks = 0
        self._given_up_keys.clear()
        self._given_up_blocks = 0
        self._queue.clear()

    def check(self) -> None:
        """Verifies every count by a scan; for tests and soaks."""
        clean = sum(1 for key in self._key_of.values() if key in self._clean_keys)
        assert clean == self._clean_blocks, (clean, self._clean_blocks)
        assert sum(len(blocks) for blocks in self._blocks_of.values()) == len(self._key_of)
        for block_id in self._queue:
            assert self._key_of[block_id] not in self._clean_keys | self._given_up_keys, block_id
        given_up = sum(1 for key in self._key_of.values() if key in self._given_up_keys)
        assert given_up == self._given_up_blocks, (given_up, self._given_up_blocks)
        assert self._given_up_keys <= self._blocks_of.keys() - self._clean_keys
        assert self._number_of.keys() == self._key_of.keys() >= self._let_go_s.keys()
        assert self._spared_keys <= self._blocks_of.keys()
