"""Where the bytes of a block lie, as numbers: what a driver or a kernel is given to copy. Plain numpy.

KVLayout -> rows (device address, stride, bytes, offset in a slot) -> copies of an order -> batches, or row by row
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvortex.messages import IntArray
from kvortex.transfer.base import KVLayout

Addresses = npt.NDArray[np.uint64]
"""Addresses, or numbers of bytes, as the driver reads them: contiguous uint64 [n]."""

_NOTHING: Final = ctypes.c_char * 0


def address_of(numbers: Addresses) -> int:
    """Of the first of them. numpy's own ways take four times as long."""
    return ctypes.addressof(_NOTHING.from_buffer(numbers.data))


class Row(NamedTuple):
    """Block `b`'s bytes `slot_offset .. slot_offset + num_bytes` are at `address + b * stride` on the device."""

    address: int
    stride: int
    num_bytes: int
    slot_offset: int


def rows_of(layout: KVLayout) -> tuple[Row, ...]:
    """A row for each region, regions that touch each other on the device as one: fewer and larger copies."""
    rows: list[Row] = []
    offset = 0
    for region, num_bytes in zip(layout.regions, layout.fragment_bytes, strict=True):
        row = Row(int(region.data_ptr()), int(region.stride(0)), num_bytes, offset)
        offset += num_bytes
        last = rows[-1] if rows else None
        if last is not None and last.stride == row.stride and last.address + last.num_bytes == row.address:
            rows[-1] = last._replace(num_bytes=last.num_bytes + num_bytes)
        else:
            rows.append(row)
    return tuple(rows)


class Copies(NamedTuple):
    """Contiguous copies, the i-th of `num_bytes[i]` bytes between `device[i]` and `host[i]`."""

    device: Addresses
    host: Addresses
    num_bytes: Addresses

    def batches(self, batch_bytes: int, batch_copies: int) -> Iterator[Copies]:
        """All of them in order, so many bytes and copies at a time; a larger copy is a batch of its own."""
        ends = np.cumsum(self.num_bytes)
        if 0 < len(ends) <= batch_copies and int(ends[-1]) <= batch_bytes:
            yield self
            return
        begin, done = 0, 0
        while begin < len(ends):
            fitting = int(ends.searchsorted(np.uint64(done + batch_bytes), side="right"))
            end = max(begin + 1, min(begin + batch_copies, fitting))
            part = slice(begin, end)
            yield Copies(self.device[part], self.host[part], self.num_bytes[part])
            begin, done = end, int(ends[end - 1])


class RowCopies(NamedTuple):
    """Copies of whole blocks, row after row: those of row `r` are numbers `begins[r]` to `begins[r + 1] - 1`."""

    copies: Copies
    begins: list[int]
    """One more than rows."""


class AddressTable:
    """Turns pairs of GPU block and slot into copies.

    Args:
        rows: the device side.
        host_address: of slot 0.
        slot_bytes: from one slot to the next.
        max_copy_bytes: a longer contiguous run is cut.
        seam_bytes: no copy crosses a multiple of this many bytes from slot 0: memory that was pinned in
            pieces is refused by the driver where a copy spans two of them.
    """

    def __init__(
        self, rows: Sequence[Row], host_address: int, slot_bytes: int, *, max_copy_bytes: int, seam_bytes: int
    ) -> None:
        assert rows, "no rows"
        self.num_rows = len(rows)
        assert 0 < max_copy_bytes <= seam_bytes, (max_copy_bytes, seam_bytes)
        self._addresses = np.array([row.address for row in rows], np.uint64)
        self._strides = np.array([row.stride for row in rows], np.uint64)
        self._offsets = np.array([row.slot_offset for row in rows], np.uint64)
        self._sizes = np.array([row.num_bytes for row in rows], np.uint64)
        self._host_address = np.uint64(host_address)
        self._slot_bytes = np.uint64(slot_bytes)
        self._max_copy_bytes = np.uint64(max_copy_bytes)
        self._seam_bytes = np.uint64(seam_bytes)
        # With several rows two blocks never touch on both sides: between them lies the block's next row.
        self._may_touch = len(rows) == 1 and rows[0].stride == rows[0].num_bytes == slot_bytes
        self._may_be_long = bool((self._sizes > self._max_copy_bytes).any()) or self._may_touch

    def copies(self, gpu_blocks: IntArray, slots: IntArray) -> Copies:
        """Copies of whole blocks, `gpu_blocks[i]` with `slots[i]`, block after block."""
        device, host, sizes = numbers = np.empty((3, len(slots), self.num_rows), np.uint64)
        np.multiply(gpu_blocks.astype(np.uint64)[:, None], self._strides, out=device)
        device += self._addresses
        np.add(self._slot_addresses(slots)[:, None], self._offsets, out=host)
        sizes[:] = self._sizes
        return self._cut(Copies(*numbers.reshape(3, -1)), slots)

    def copies_by_row(self, gpu_blocks: IntArray, slots: IntArray) -> RowCopies:
        """The same copies, in each row block after block."""
        device, host, sizes = numbers = np.empty((3, self.num_rows, len(slots)), np.uint64)
        np.multiply(self._strides[:, None], gpu_blocks.astype(np.uint64), out=device)
        device += self._addresses[:, None]
        np.add(self._offsets[:, None], self._slot_addresses(slots), out=host)
        sizes[:] = self._sizes[:, None]
        copies = self._cut(Copies(*numbers.reshape(3, -1)), slots)
        return RowCopies(copies, self._begins(copies, len(slots)))

    def _begins(self, copies: Copies, num_blocks: int) -> list[int]:
        """Of the rows. No copy is of two rows: none was joined where there are several."""
        if self.num_rows == 1:
            return [0, len(copies.host)]
        if len(copies.host) == self.num_rows * num_blocks:  # nothing was cut
            return [row * num_blocks for row in range(self.num_rows + 1)]
        row_ends = np.cumsum(self._sizes) * np.uint64(num_blocks)
        return [0, *(np.cumsum(copies.num_bytes).searchsorted(row_ends) + 1).tolist()]

    def _slot_addresses(self, slots: IntArray) -> Addresses:
        return self._host_address + slots.astype(np.uint64) * self._slot_bytes

    def _cut(self, copies: Copies, slots: IntArray) -> Copies:
        """Copies that were whole fragments of these slots, as the driver takes them."""
        if not len(slots):
            return copies
        if self._may_touch:
            copies = _joined(copies)
        if self._may_be_long:
            copies = _cut(copies, self._max_copy_bytes)
        # Far fewer slots than copies; a run of several slots may hold a seam that none of them holds.
        return self._cut_at_seams(copies) if self._may_touch or self._hold_a_seam(slots) else copies

    def _hold_a_seam(self, slots: IntArray) -> bool:
        """Whether a seam lies within one of these slots."""
        begin = slots.astype(np.uint64) * self._slot_bytes
        last = begin + (self._slot_bytes - np.uint64(1))
        return bool((begin // self._seam_bytes != last // self._seam_bytes).any())

    def _cut_at_seams(self, copies: Copies) -> Copies:
        begin = copies.host - self._host_address
        seam = (begin // self._seam_bytes + np.uint64(1)) * self._seam_bytes
        # At most one seam lies in a copy, since none is longer than the distance between two.
        crossing = np.flatnonzero(begin + copies.num_bytes > seam)
        if not len(crossing):
            return copies
        first = (seam - begin)[crossing]
        counts = np.ones(len(begin), np.int64)
        counts[crossing] = 2
        of = np.repeat(np.arange(len(begin)), counts)
        device, host, sizes = (numbers[of] for numbers in copies)
        second = crossing + np.arange(1, len(crossing) + 1)
        device[second] += first
        host[second] += first
        sizes[second] -= first
        sizes[second - 1] = first
        return Copies(device, host, sizes)


def _joined(copies: Copies) -> Copies:
    """Neighbours that touch on both sides as one."""
    ends = slice(None, -1)
    touches = (copies.device[ends] + copies.num_bytes[ends] == copies.device[1:]) & (
        copies.host[ends] + copies.num_bytes[ends] == copies.host[1:]
    )
    begins = np.concatenate(([0], np.flatnonzero(~touches) + 1))
    return Copies(copies.device[begins], copies.host[begins], np.add.reduceat(copies.num_bytes, begins))


def _cut(copies: Copies, max_bytes: np.uint64) -> Copies:
    """Each copy as pieces of at most `max_bytes`."""
    counts = ((copies.num_bytes + max_bytes - np.uint64(1)) // max_bytes).astype(np.int64)
    if len(counts) == counts.sum():
        return copies
    of = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = nth.astype(np.uint64) * max_bytes
    sizes = np.minimum(max_bytes, copies.num_bytes[of] - begin)
    return Copies(copies.device[of] + begin, copies.host[of] + begin, sizes)
