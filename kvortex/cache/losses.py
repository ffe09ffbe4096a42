"""A bounded memory of blocks that were held once and lost, for telling why a prompt was computed."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from enum import Enum
from typing import Final

import numpy as np

from kvortex.keys import BlockKey

MAX_PLACES: Final = 1 << 20
_MIN_PLACES: Final = 1 << 12
_HELD: Final = 2  # set in every entry, so that none is 0, an empty place
_GROUP_SPREAD: Final = 0x9E3779B1
_HASH_BITS: Final = 0xFFFF_FFFF_FFFF_FF00
_PLACE_AND_HASH: Final = struct.Struct(">IQ")


class Loss(Enum):
    """How a block was lost."""

    EVICTED = 0
    """RAM gave it up for others."""
    NOT_STORED = 1
    """VRAM took its place before RAM had a copy."""


class LossRecord:
    """Which keys were lost, and how; a key's place is overwritten by a later one that falls on it.

    8 bytes a place, nothing to rebuild, a call a key costs the same however many are remembered. Keys are told apart
    by part of their hash: good for counting, and never to be used to find a block. Any loss may be forgotten early.
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
        self._table = array("Q", bytes(8 * self.num_places))

    def evicted(self, keys: Sequence[BlockKey]) -> None:
        """RAM gave these blocks up. Keys of one length."""
        if not keys:
            return
        raw = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)
        group = raw[:, -1].astype(np.uint64)
        places = raw[:, :4].copy().view(">u4").ravel().astype(np.uint64) ^ (group * np.uint64(_GROUP_SPREAD))
        hashes = raw[:, 4:12].copy().view(">u8").ravel().astype(np.uint64) & np.uint64(_HASH_BITS)
        entries = hashes | np.uint64(_HELD | Loss.EVICTED.value)
        np.frombuffer(self._table, np.uint64)[places & np.uint64(self._mask)] = entries

    def not_stored(self, key: BlockKey) -> None:
        """VRAM lost a block of which RAM has no copy; one that RAM had, and gave up first, stays `EVICTED`."""
        place, evicted = self._find(key)
        if self._table[place] != evicted:
            self._table[place] = evicted | Loss.NOT_STORED.value

    def found_again(self, key: BlockKey) -> None:
        """The block is complete once more."""
        place, evicted = self._find(key)
        if self._table[place] ^ evicted <= 1:
            self._table[place] = 0

    def of(self, key: BlockKey) -> Loss | None:
        """How the block was lost last; None if it was not, or that was forgotten."""
        place, evicted = self._find(key)
        difference = self._table[place] ^ evicted
        return Loss(difference) if difference <= 1 else None

    def _find(self, key: BlockKey) -> tuple[int, int]:
        """A key's place, which tells KV groups of one hash apart, and its entry when evicted: 56 bits of hash, 1, 0."""
        first, second = _PLACE_AND_HASH.unpack_from(key)
        return (first ^ key[-1] * _GROUP_SPREAD) & self._mask, second & _HASH_BITS | _HELD
