"""What one direction's stream is given for a piece: batches of copies with pauses between them, or a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from kvortex.messages import Direction
from kvortex.transfer.addresses import Addresses, AddressTable
from kvortex.transfer.base import Fence
from kvortex.transfer.cuda_driver import CudaDriver
from kvortex.transfer.cuda_stream import ComputeWatch, CudaFence, StreamEnd
from kvortex.transfer.lane import MAX_PIECES
from kvortex.transfer.queue import Piece

if TYPE_CHECKING:
    from kvortex.transfer.gather import GatherKernel

_BATCH_COPIES: Final = 128
"""Between two pauses: small copies take up to two microseconds each, whatever their bytes."""

_QUIET_FACTOR: Final = 4
"""Batches are this much longer while no model runs: 99 % of the link in place of 96 %."""


class CudaStreamMover:
    """Enqueues one direction's pieces on its stream.

    Args:
        table: all rows.
        batch_bytes: copied between two pauses while a model runs.
        kernels: load the rows that `copied` leaves out.
        copied: the rows that the copy engine moves where `kernels` move the others; None where they move all.
    """

    def __init__(
        self,
        driver: CudaDriver,
        stream: torch.cuda.Stream,
        direction: Direction,
        table: AddressTable,
        batch_bytes: int,
        watch: ComputeWatch,
        kernels: Sequence[GatherKernel] = (),
        copied: AddressTable | None = None,
        max_blocks: int = 0,
    ) -> None:
        self._driver = driver
        self._stream = stream
        self._direction = direction
        self._whole_table = table
        self._table = copied if kernels else table
        self._batch_bytes = batch_bytes
        self._watch = watch
        self._kernels = kernels
        self._num_pieces = 0
        if kernels:
            # An entry for each piece that can be under way: what is enqueued still reads its own. Even, so
            # that both rows of an entry begin at a multiple of 16 bytes.
            shape = (MAX_PIECES + 1, 2, max_blocks + max_blocks % 2)
            self._host_ids = torch.zeros(shape, dtype=torch.int64, pin_memory=True)
            self._device_ids = torch.zeros(shape, dtype=torch.int64, device=stream.device)

    @property
    def num_copied_rows(self) -> int:
        """Copies that a block is for the copy engine."""
        return 0 if self._table is None else self._table.num_rows

    def enter_thread(self) -> None:
        self._driver.enter_thread()

    def wait_for(self, fence: Fence) -> None:
        assert isinstance(fence, CudaFence), f"a fence of another engine: {fence}"
        fence.hold(self._stream)

    def enqueue(self, piece: Piece, *, pinned: bool) -> None:
        table = self._table if pinned else self._whole_table
        if table is not None:
            self._enqueue_copies(table, piece)
        if pinned and self._kernels:
            self._enqueue_kernels(piece)

    def mark(self) -> StreamEnd:
        return StreamEnd(self._stream)

    def _enqueue_copies(self, table: AddressTable, piece: Piece) -> None:
        stream = self._stream.cuda_stream
        factor = _QUIET_FACTOR if self._watch.is_quiet else 1
        copies = table.copies(piece.gpu_blocks, piece.slots)
        for device, host, num_bytes in copies.batches(factor * self._batch_bytes, factor * _BATCH_COPIES):
            self._driver.pause(stream)
            if self._direction is Direction.LOAD:
                self._driver.copy(device, host, num_bytes, stream)
            else:
                self._driver.copy(host, device, num_bytes, stream)

    def _enqueue_kernels(self, piece: Piece) -> None:
        entry = self._num_pieces % len(self._host_ids)
        self._num_pieces += 1
        num_blocks = len(piece.gpu_blocks)
        host, device = self._host_ids[entry], self._device_ids[entry]
        numbers = host.numpy()
        numbers[0, :num_blocks], numbers[1, :num_blocks] = piece.gpu_blocks, piece.slots
        size = _numbers(host.numel() * host.element_size())
        self._driver.copy(_numbers(device.data_ptr()), _numbers(host.data_ptr()), size, self._stream.cuda_stream)
        for kernel in self._kernels:
            kernel.load(device, num_blocks, self._stream)


def _numbers(number: int) -> Addresses:
    return np.array([number], np.uint64)
