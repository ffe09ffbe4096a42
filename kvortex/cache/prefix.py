"""How much of a prompt RAM can give: the longest prefix that every KV group can restore.

    full attention     needs every block from the local hit to the hit's end
    sliding window     needs the blocks that the window before the hit's end touches

Lengths are tokens. A hit ends on a block edge of every group (`alignment`), and before the prompt's last token, which
must be computed for there to be a next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from kvortex.cache.index import BlockIndex
from kvortex.keys import BlockKey


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One KV cache group: layers that share a block table.

    Attributes:
        group_id: vLLM's number of the group.
        block_size: tokens a block.
        window: sliding window in tokens, or None for full attention.
    """

    group_id: int
    block_size: int
    window: int | None = None

    def first_needed_block(self, num_tokens: int) -> int:
        """The first block that the token after `num_tokens` still reads."""
        if self.window is None:
            return 0
        return max(0, num_tokens - self.window + 1) // self.block_size


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What RAM adds to a local hit.

    Attributes:
        local_tokens: tokens that VRAM holds already.
        ram_tokens: tokens beyond these that RAM restores; 0 is a miss.
        slots: for each group, block index in the prompt -> host slot, of every block that must be loaded.
    """

    local_tokens: int
    ram_tokens: int
    slots: Mapping[int, Mapping[int, int]]

    @property
    def all_slots(self) -> list[int]:
        return [slot for group in self.slots.values() for slot in group.values()]


class PrefixMatcher:
    """Matches prompts against the RAM index. Reads only; costs the prompt's blocks."""

    def __init__(self, groups: Sequence[GroupShape], index: BlockIndex, *, drop_last_block: bool) -> None:
        """`drop_last_block`: speculative decoding with hidden states (EAGLE) recomputes the last matched block."""
        assert groups, "a model without KV groups has nothing to match"
        self._full = [g for g in groups if g.window is None]
        self._sliding = [g for g in groups if g.window is not None]
        self._index = index
        self._drop_last_block = drop_last_block
        self.alignment = math.lcm(*(g.block_size for g in groups))

    def match(
        self, keys_of: Callable[[GroupShape], Sequence[BlockKey]], num_tokens: int, local_tokens: int
    ) -> PrefixHit:
        """The longest restorable prefix of a prompt of `num_tokens`, `local_tokens` of which VRAM has.

        Args:
            keys_of: a group's keys, one for each complete block of the prompt.
        """
        miss = PrefixHit(local_tokens, 0, {})
        if local_tokens % self.alignment:
            return miss
        end = (num_tokens - 1) // self.alignment * self.alignment
        if end <= local_tokens:
            return miss
        slots: dict[int, dict[int, int]] = {}
        for group in self._full:
            start = local_tokens // group.block_size
            found = self._index.match(keys_of(group)[start : end // group.block_size])
            slots[group.group_id] = dict(enumerate(found, start))
            end = min(end, (start + len(found)) * group.block_size)
        end = end // self.alignment * self.alignment
        if self._drop_last_block:
            end -= self.alignment
        present = {g.group_id: self._index.ready_slots(keys_of(g)[: end // g.block_size]) for g in self._sliding}
        while end > local_tokens and not all(
            self._window_restorable(g, present[g.group_id], local_tokens, end) for g in self._sliding
        ):
            end -= self.alignment
        if end <= local_tokens:
            return miss
        for group in self._full:
            found_here, count = slots[group.group_id], (end - local_tokens) // group.block_size
            if len(found_here) > count:
                slots[group.group_id] = dict(islice(found_here.items(), count))
        for group in self._sliding:
            held = present[group.group_id]
            slots[group.group_id] = {i: held[i] for i in self._needed(group, local_tokens, end)}
        return PrefixHit(local_tokens, end - local_tokens, slots)

    def _window_restorable(self, group: GroupShape, held: Mapping[int, int], local_tokens: int, end: int) -> bool:
        return all(i in held for i in self._needed(group, local_tokens, end))

    @staticmethod
    def _needed(group: GroupShape, local_tokens: int, end: int) -> range:
        first = max(group.first_needed_block(end), local_tokens // group.block_size)
        return range(first, end // group.block_size)
