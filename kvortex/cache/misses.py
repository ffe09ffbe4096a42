"""Why prompt tokens had to be computed: each gets one reason, and the reasons sum to all that were.

    |-- hit --|-- not worth --|-- held or lost blocks --|-- never seen --|-- last block --|
              ^ end of the hit                          ^ first difference                ^ prompt's end

A key covers all tokens before its block, so a block that was seen says that all before it were: one whose loss was
forgotten shares the fate of the next that is known. Behind the first block never seen no other was seen either.
What cannot be told: a block that was seen so long ago that its loss was forgotten, or before the last reset, counts
as never seen; so does one that another LoRA adapter or another namespace holds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvortex.cache.index import BlockIndex, KeyState
from kvortex.cache.losses import Loss, LossRecord
from kvortex.cache.prefix import GroupShape
from kvortex.keys import BlockKey

FORGOTTEN_IN_A_ROW: Final = 16
"""Blocks without a trace, after which no more is looked for: what follows is new."""

KeysOf = Callable[[GroupShape], Sequence[BlockKey]]


class Miss(Enum):
    """Why a prompt token was computed."""

    NEW_PROMPT = "new_prompt"
    """Its prompt begins with a block never seen: one-off traffic, or prompts that differ from their first block."""
    SALT = "salt"
    """The same, and the request has a cache salt: only prompts with the same salt can share blocks."""
    NEW_TAIL = "new_tail"
    """Never seen, behind blocks that were: a conversation's new part."""
    EVICTED = "evicted"
    """In a block that RAM held and gave up."""
    NOT_STORED = "not_stored"
    """In a block that VRAM lost before RAM had a copy, or whose copy was under way."""
    LAST_BLOCK = "last_block"
    """Behind the last whole block before the prompt's last token, which is always computed."""
    UNUSABLE = "unusable"
    """In a block that is held, but not what comes before it, or not by every KV group."""
    LOAD_FAILED = "load_failed"
    """A load was ordered, and failed or was refused."""
    QUICKER_COMPUTED = "quicker_computed"
    """RAM held it, and computing was expected to be faster than loading."""
    NOT_ASKED = "not_asked"
    """The request did not want cached blocks: it needs the logits of its whole prompt."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Of one prompt.

    Attributes:
        missed: its tokens behind the hit, by reason.
        seen_tokens: tokens in its leading blocks that are held, or known to be lost: what an endless cache would give.
    """

    missed: Counter[Miss] = field(default_factory=Counter)
    seen_tokens: int = 0

    def settled(self, computed: int, *, load_failed: int = 0, otherwise: Miss = Miss.UNUSABLE) -> Counter[Miss]:
        """The reasons of `computed + load_failed` tokens; all `otherwise` where these are not the ones explained."""
        missed = Counter(self.missed) if self.missed.total() == computed else Counter({otherwise: computed})
        missed[Miss.LOAD_FAILED] += load_failed
        return missed


class MissExplainer:
    """Tells why; reads only. Costs a look-up for each block from the hit's end to a few behind the first never seen."""

    def __init__(
        self, groups: Sequence[GroupShape], index: BlockIndex, losses: LossRecord, in_vram: Callable[[BlockKey], bool]
    ) -> None:
        self._alignment = math.lcm(*(group.block_size for group in groups))
        # Every block of a full-attention group is kept while there is room; a sliding window needs a few only.
        self._first, *self._others = sorted(groups, key=lambda group: group.window is not None)
        self._index = index
        self._losses = losses
        self._in_vram = in_vram

    def explain(
        self, keys_of: KeysOf, num_tokens: int, hit_tokens: int, *, salted: bool = False, declined_tokens: int = 0
    ) -> Explanation:
        """Why a prompt of `num_tokens` is computed from `hit_tokens` on. To be asked before its blocks are allocated.

        Args:
            keys_of: a group's keys, one for each complete block of the prompt.
            declined_tokens: behind the hit, held by RAM and not loaded by choice.
        """
        size = self._first.block_size
        keys = keys_of(self._first)
        end = min((num_tokens - 1) // self._alignment * self._alignment, len(keys) * size)
        missed: Counter[Miss] = Counter()
        seen = hit_tokens
        if declined_tokens:
            missed[Miss.QUICKER_COMPUTED] = declined_tokens
            seen += declined_tokens
        # Up to `seen`, every token has its reason.
        for block in range(seen // size, end // size):
            miss = self._fate(keys[block], keys_of, block * size)
            if miss is not None:
                missed[miss] += (block + 1) * size - seen
                seen = (block + 1) * size
            elif block * size - seen >= FORGOTTEN_IN_A_ROW * size:
                break
        position = seen
        if position < end:
            new = Miss.NEW_TAIL if seen else Miss.SALT if salted else Miss.NEW_PROMPT
            missed[new] += end - position
            position = end
        if position < num_tokens:
            missed[Miss.LAST_BLOCK] += num_tokens - position
        return Explanation(missed, seen)

    def _fate(self, key: BlockKey, keys_of: KeysOf, position: int) -> Miss | None:
        """None: never seen."""
        state = self._index.state_of(key)
        if state is KeyState.READY or self._in_vram(key):
            return self._fate_elsewhere(keys_of, position)
        if state is KeyState.WRITING:
            return Miss.NOT_STORED
        return _OF_LOSS[self._losses.of(key)]

    def _fate_elsewhere(self, keys_of: KeysOf, position: int) -> Miss:
        """The first group holds the block: another may have lost its own."""
        for group in self._others:
            keys, block = keys_of(group), position // group.block_size
            if block >= len(keys) or self._index.state_of(keys[block]) is KeyState.READY or self._in_vram(keys[block]):
                continue
            lost = _OF_LOSS[self._losses.of(keys[block])]
            if lost is not None:
                return lost
        return Miss.UNUSABLE


_OF_LOSS = {None: None, Loss.EVICTED: Miss.EVICTED, Loss.NOT_STORED: Miss.NOT_STORED}
