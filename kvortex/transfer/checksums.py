"""A checksum for each slot: taken when a block has been stored, compared before it is loaded.

XXH3 with 64 bits: of changes by accident one in 1.8e19 goes unnoticed. It does not withstand somebody who writes bytes
to match it; but whoever can write into this process's memory need not. Imports xxhash: import this module only where
blocks are verified.
"""

from __future__ import annotations

import numpy as np
import xxhash

from kvortex.messages import BoolArray, Direction, IntArray
from kvortex.transfer.slab import HostSlab


class ChecksumError(Exception):
    """Blocks in RAM are not what was stored."""


class SlotChecksums:
    """The checksums of a slab, 10 bytes a slot.

    A `BlockMover` that moves nothing: a STORE takes the checksums of its slots, a LOAD compares them, both without the
    interpreter lock where a block has more than 64 KiB.

    While a slot is written, nobody may have it compared.

    Args:
        block_bytes: of a slot, those that a block fills.
    """

    def __init__(self, slab: HostSlab, block_bytes: int) -> None:
        assert 0 < block_bytes <= slab.slot_bytes, (block_bytes, slab.slot_bytes)
        self._rows = slab.tensor.numpy()[:, :block_bytes]
        self._sums = np.zeros(slab.num_slots, np.uint64)
        self._is_known = np.zeros(slab.num_slots, np.bool_)
        self._is_corrupt = np.zeros(slab.num_slots, np.bool_)

    def copy_piece(self, direction: Direction, gpu_blocks: IntArray, slots: IntArray) -> None:  # noqa: ARG002 - of `BlockMover`
        """Takes (STORE) or compares (LOAD) the checksums of these slots.

        Raises:
            ChecksumError: some differ; all of the slots were compared.
        """
        if direction is Direction.STORE:
            self._sums[slots] = self._computed(slots)
            self._is_known[slots] = True
            return
        wrong = slots[self._computed(slots) != self._sums[slots]]
        if len(wrong):
            self._is_corrupt[wrong] = True
            raise ChecksumError(
                f"{len(wrong)} of {len(slots)} blocks in RAM are not what was stored, in slots {wrong[:8].tolist()}"
            )

    def forget(self, slots: IntArray) -> None:
        """Other bytes are about to be stored in these slots; indices outside the slab are passed over."""
        inside = slots[(slots >= 0) & (slots < len(self._sums))]
        self._is_known[inside] = False
        self._is_corrupt[inside] = False

    def known(self, slots: IntArray) -> BoolArray:
        """Which of these slots have a checksum to compare; an index outside the slab has its nearest slot's."""
        return self._is_known.take(slots, mode="clip")

    def corrupt(self, slots: IntArray) -> tuple[int, ...]:
        """Those of these slots whose bytes were found changed since they were stored; others are passed over."""
        inside = slots[(slots >= 0) & (slots < len(self._sums))]
        return tuple(inside[self._is_corrupt[inside]].tolist())

    def _computed(self, slots: IntArray) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        rows, digest = self._rows, xxhash.xxh3_64_intdigest
        return np.fromiter((digest(rows[slot]) for slot in slots.tolist()), np.uint64, len(slots))
