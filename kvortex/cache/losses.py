"""A bounded memory of blocks that were held once and lost, for telling why a prompt was computed."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import Enum
from typing import Final

from kvortex.keys import BlockKey

MAX_PLACES: Final = 1 << 20
_MIN_PLACES: Final = 1 << 12
_HELD: Final = 2  # set in every entry, so that none is 0, an empty place
_GROUP_SPREAD: Final = 0x9E3779B1


class Loss(Enum):
    """How a block was lost."""

    EVICTED = 0
    """RAM gave it up for others."""
    NOT_STORED = 1
    """VRAM took its place before RAM had a copy."""


class LossRecord:
    """Which keys were lost, and how; a key's place is overwritten by a later one that falls on it.

    8 bytes a place, nothing to rebuild, a call a key costs the same however many are remembered. Keys are told apart
    by part of their hash: good for counting, and never to be used to find a block.
    """

    def __init__(self, num_blocks: int) -> None:
        """Remembers about twice `num_blocks` losses, at least thousands and at most MAX_PLACES."""
        places = 1 << (max(1, 2 * num_blocks) - 1).bit_length()
        self._mask = min(MAX_PLACES, max(_MIN_PLACES, places)) - 1
        self.reset()

    @property
    def num_places(self) -> int:
        return self._mask + 1

    def reset(self) -> None:
        """Forgets all. Costs the table, at most 8 MiB."""
        self._table = array("Q", bytes(8 * (self._mask + 1)))

    def evicted(self, keys: Iterable[BlockKey]) -> None:
        """RAM gave these blocks up."""
        for key in keys:
            self._table[self._place(key)] = _entry(key, Loss.EVICTED)

    def not_stored(self, key: BlockKey) -> None:
        """VRAM lost a block of which RAM has no copy; one that RAM had, and gave up first, stays `EVICTED`."""
        if self.of(key) is None:
            self._table[self._place(key)] = _entry(key, Loss.NOT_STORED)

    def found_again(self, key: BlockKey) -> None:
        """The block is complete once more."""
        if self.of(key) is not None:
            self._table[self._place(key)] = 0

    def of(self, key: BlockKey) -> Loss | None:
        """How the block was lost last; None if it was not, or that was forgotten."""
        difference = self._table[self._place(key)] ^ _entry(key, Loss.EVICTED)
        return Loss(difference) if difference <= 1 else None

    def _place(self, key: BlockKey) -> int:
        return (int.from_bytes(key[:4], "big") ^ (key[-1] * _GROUP_SPREAD)) & self._mask


def _entry(key: BlockKey, loss: Loss) -> int:
    """56 bits of the hash that `_place` does not use, 6 of the KV group, one that is set, one for the loss."""
    return int.from_bytes(key[4:11], "big") << 8 | (key[-1] & 0x3F) << 2 | _HELD | loss.value
