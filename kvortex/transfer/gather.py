"""Loads of small fragments by a kernel: a few thread blocks read pinned host memory, 16 bytes at a time.

The copy engine takes about two microseconds a fragment to the GPU, whatever its size, and that is the time of a
hundred KiB. Imports triton: import this module only where a GPU is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl

from kvortex.transfer.addresses import Row

UNIT_BYTES: Final = 16
"""Everything the kernel touches is a multiple of this, addresses included."""

_TILE_WORDS: Final = 4096
"""8-byte words in flight in one thread block: 32 KiB, so that four blocks cover a PCIe link's delay."""

_MIN_COLUMNS: Final = 256
_NUM_WARPS: Final = 16


@triton.jit(do_not_specialize=["num_fragments"])  # type: ignore[untyped-decorator]
def _gather(  # type: ignore[no-untyped-def]
    host,
    device,
    gpu_blocks,
    slots,
    host_offsets,
    device_offsets,
    device_strides,
    num_fragments,
    num_rows,
    slot_units,
    fragment_units,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copies fragments `i`: row `i % num_rows` of the pair of block and slot `i // num_rows`. Offsets in units."""
    host_words = host.to(tl.pointer_type(tl.int64))
    device_words = device.to(tl.pointer_type(tl.int64))
    fragment_words = fragment_units * 2
    for tile in range(tl.program_id(0), tl.cdiv(num_fragments, ROWS), tl.num_programs(0)):
        fragment = tile * ROWS + tl.arange(0, ROWS)
        exists = fragment < num_fragments
        pair = fragment // num_rows
        row = fragment % num_rows
        slot = tl.load(slots + pair, mask=exists, other=0)
        block = tl.load(gpu_blocks + pair, mask=exists, other=0)
        source = slot * slot_units + tl.load(host_offsets + row)
        target = block * tl.load(device_strides + row) + tl.load(device_offsets + row)
        for begin in range(0, fragment_words, COLUMNS):
            word = begin + tl.arange(0, COLUMNS)
            inside = exists[:, None] & (word < fragment_words)[None, :]
            words = tl.load(host_words + (source * 2)[:, None] + word[None, :], mask=inside, cache_modifier=".cg")
            tl.store(device_words + (target * 2)[:, None] + word[None, :], words, mask=inside)


def is_aligned(rows: Sequence[Row], host_address: int, slot_bytes: int) -> bool:
    """Whether the kernel can copy these rows."""
    numbers = [host_address, slot_bytes]
    for row in rows:
        numbers += [row.address, row.stride, row.num_bytes, row.slot_offset]
    return all(number % UNIT_BYTES == 0 for number in numbers)


class GatherKernel:
    """Loads the fragments of rows that are all of one size.

    Args:
        rows: the device side, in `device`'s memory; see `is_aligned`.
        device: any uint8 tensor on the GPU at a multiple of 16 bytes; the base that rows are addressed from.
        host: uint8 [num_slots, slot_bytes], the slab.
        num_ctas: thread blocks; each takes a multiprocessor's time from the model while it runs.
    """

    def __init__(self, rows: Sequence[Row], device: torch.Tensor, host: torch.Tensor, num_ctas: int) -> None:
        base, slot_bytes = int(device.data_ptr()), int(host.shape[1])
        assert is_aligned(rows, int(host.data_ptr()), slot_bytes), (rows, slot_bytes)
        assert base % UNIT_BYTES == 0, base
        assert len({row.num_bytes for row in rows}) == 1, rows
        assert num_ctas > 0, num_ctas
        self._device, self._host, self._num_ctas = device, host, num_ctas
        self._num_rows = len(rows)
        self._slot_units = slot_bytes // UNIT_BYTES
        self._fragment_units = rows[0].num_bytes // UNIT_BYTES
        self._host_offsets = _units([row.slot_offset for row in rows], device)
        self._device_offsets = _units([row.address - base for row in rows], device)
        self._device_strides = _units([row.stride for row in rows], device)
        words = 1 << max(0, 2 * self._fragment_units - 1).bit_length()
        self._columns = min(_TILE_WORDS, max(_MIN_COLUMNS, words))

    def load(self, ids: torch.Tensor, num_blocks: int, stream: torch.cuda.Stream) -> None:
        """Enqueues the load of `num_blocks` blocks.

        Args:
            ids: int64 [2, n] on the GPU, n >= num_blocks and even: GPU blocks, and the slots they pair with.
        """
        kernel: Any = _gather
        with torch.cuda.stream(stream):
            kernel[(self._num_ctas,)](
                self._host,
                self._device,
                ids[0],
                ids[1],
                self._host_offsets,
                self._device_offsets,
                self._device_strides,
                num_blocks * self._num_rows,
                self._num_rows,
                self._slot_units,
                self._fragment_units,
                ROWS=_TILE_WORDS // self._columns,
                COLUMNS=self._columns,
                num_warps=_NUM_WARPS,
            )


def _units(numbers: Sequence[int], device: torch.Tensor) -> torch.Tensor:
    return torch.tensor([number // UNIT_BYTES for number in numbers], dtype=torch.int64, device=device.device)
