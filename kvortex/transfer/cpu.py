"""The copy engine of a machine without a GPU: a pool of threads that copy from RAM to RAM."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvortex.messages import CopyOrder, Direction, IntArray, JobId, JobResult
from kvortex.transfer.base import Fence, KVLayout
from kvortex.transfer.queue import OrderQueue
from kvortex.transfer.slab import HostSlab

PIECE_BYTES = 8 << 20
"""Bytes a thread copies between two looks at the queue: about a millisecond, which is how long a load may
wait behind a store. Smaller pieces copy few blocks a call, and with fragments of some KiB the calls then
cost more than the bytes."""

_STAGING_BYTES = 1 << 20
"""Bound on the rows gathered in one call, so that they are scattered out of the CPU's cache."""

_DIRECT_BYTES = 256 << 10
"""From this row size on, one call a row costs less than passing through the staging rows."""

Rows = npt.NDArray[np.uint8]


class BlockMover(Protocol):
    """What moves the bytes of one piece."""

    def copy_piece(self, direction: Direction, gpu_blocks: IntArray, slots: IntArray) -> None:
        """Copies `gpu_blocks[i]` to `slots[i]` (STORE) or back (LOAD); complete when it returns.

        Called from any thread of the pool, from several at once. Whatever it raises fails the order.
        """
        ...


class HostMover:
    """Moves blocks within host RAM by numpy's row indexing, which copies without the interpreter lock.

    torch's index operations were measured too: slower by a third or more, and each would bring its own
    OpenMP threads into every thread of the pool.
    """

    def __init__(self, layout: KVLayout, slab: HostSlab) -> None:
        assert slab.slot_bytes >= layout.block_bytes, (slab.slot_bytes, layout.block_bytes)
        host = slab.tensor.numpy()
        self._columns: list[tuple[Rows, Rows]] = []
        begin = 0
        for region, num_bytes in zip(layout.regions, layout.fragment_bytes, strict=True):
            self._columns.append((region.numpy(), host[:, begin : begin + num_bytes]))
            begin += num_bytes

    def copy_piece(self, direction: Direction, gpu_blocks: IntArray, slots: IntArray) -> None:
        for device, host in self._columns:
            if direction is Direction.STORE:
                _copy_rows(host, slots, device, gpu_blocks)
            else:
                _copy_rows(device, gpu_blocks, host, slots)


def _copy_rows(to: Rows, to_ids: IntArray, source: Rows, source_ids: IntArray) -> None:
    """`to[to_ids[i]] = source[source_ids[i]]` for all i."""
    row_bytes = source.shape[1]
    if row_bytes >= _DIRECT_BYTES or len(to_ids) == 1:
        for to_id, source_id in zip(to_ids.tolist(), source_ids.tolist(), strict=True):
            to[to_id] = source[source_id]
        return
    num_rows = max(1, _STAGING_BYTES // max(1, row_bytes))
    for begin in range(0, len(to_ids), num_rows):
        rows = slice(begin, begin + num_rows)
        to[to_ids[rows]] = source[source_ids[rows]]


class ReachedFence:
    """The fence of a device whose kernels have run when their call returns."""

    def is_reached(self) -> bool:
        return True


class CpuCopyEngine:
    """A `CopyEngine` for KV that lies in host RAM.

    On the CPU a kernel has ended when its call returns, so all that was submitted before an order has run
    when the order is submitted (from the thread that runs the model): a store reads finished bytes and a
    load writes under no reader, without waiting for anything.

    Two orders under way at once must not write what the other one copies: their pieces may run side by side.

    Args:
        layout: the device side, in host RAM.
        slab: the host side; stays open until `close` has returned True.
        num_threads: copies that run at once, at least 1.
        piece_bytes: bound on what is copied in one go, see `PIECE_BYTES`; a larger block is copied alone.
        mover: moves the bytes in place of `HostMover`.
        clock: seconds, monotonic; what deadlines are measured by.
    """

    def __init__(
        self,
        layout: KVLayout,
        slab: HostSlab,
        num_threads: int,
        *,
        piece_bytes: int = PIECE_BYTES,
        mover: BlockMover | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert num_threads > 0, f"{num_threads} threads"
        assert piece_bytes > 0, f"pieces of {piece_bytes} bytes"
        self._queue = OrderQueue(layout.num_blocks, slab.num_slots, layout.block_bytes, clock)
        # Only the threads hold the mover, and with it the layout's and the slab's memory.
        arguments = (self._queue, HostMover(layout, slab) if mover is None else mover, piece_bytes)
        self._threads = [
            threading.Thread(target=_copy_pieces, args=arguments, name=f"kvortex-copy-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def fence(self) -> Fence:
        """A fence that is reached already."""
        return ReachedFence()

    def submit(self, orders: Sequence[CopyOrder], *, after: Fence | None = None) -> None:
        """Takes orders, in this order; copying may begin before it returns."""
        assert after is None or after.is_reached(), "a fence of another engine"
        self._queue.add(orders)

    def poll(self) -> list[JobResult]:
        """The answers since the last call; never waits for a copy."""
        return self._queue.answers()

    def promise(self, window_s: float) -> list[JobId]:  # noqa: ARG002 - there is no device that could keep it
        """Nothing: kernels of the CPU run in the caller, where nothing but the host could hold them."""
        return []

    def hold_kernels(self, job_ids: Sequence[JobId]) -> None:
        """Nothing has been promised."""
        assert not job_ids, f"loads {job_ids} were not promised"

    def close(self, timeout_s: float) -> bool:
        """Drops every order and answer and ends the threads, each after the piece it is copying.

        Returns:
            True when no thread is left. False when one was still copying after `timeout_s`: it ends after
            that piece; call again to wait for it.
        """
        self._queue.close()
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _copy_pieces(queue: OrderQueue, mover: BlockMover, piece_bytes: int) -> None:
    """A pool thread's life: until the queue is closed."""
    while (piece := queue.take(piece_bytes)) is not None:
        try:
            mover.copy_piece(piece.direction, piece.gpu_blocks, piece.slots)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this order's answer and no other's
            queue.finish(piece, f"{type(error).__name__}: {error}")
        else:
            queue.finish(piece)
