"""The copy engine of a machine without a GPU: a pool of threads that copy from RAM to RAM."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvortex.messages import CopyOrder, Direction, IntArray, JobId, JobResult, LinkFacts, Outcome
from kvortex.transfer.base import Fence, KVLayout, StepLoads, Stopwatch
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

_REMEMBER = 0.98
"""What a copy counts after the next one: half after 35."""

_STORE_WEIGHT = 0.02
"""What a store counts, to the meter of loads."""

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


class HostStepLoads:
    """`StepLoads` of a device whose kernels run in the caller, who copies before the first of them.

    Args:
        copy: copies the blocks of an order.
        copied: is given the orders when they are copied.
    """

    def __init__(
        self,
        copy: Callable[[CopyOrder], None],
        orders: Sequence[CopyOrder],
        copied: Callable[[Sequence[CopyOrder]], None],
    ) -> None:
        self._copy = copy
        self._orders = orders
        self._copied = copied
        self._waits = True

    def hold_kernels(self, regions: Sequence[int]) -> None:  # noqa: ARG002 - a block is copied whole
        if not self._waits:
            return
        for order in self._orders:
            assert order.direction is Direction.LOAD, order
            if len(order.slots):
                self._copy(order)
        self._waits = False
        self._copied(self._orders)

    def end(self) -> bool:
        in_time = not self._waits
        self.hold_kernels(())
        return in_time


class HostStopwatch:
    """A kernel has ended when its call returns, so the host's clock is the device's."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: float | None = None

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._start

    def seconds(self) -> float | None:
        return self._seconds


class LoadMeter:
    """How fast loads go, all threads together: bytes a second of the time in which any copy of their direction runs.

    Stores go over the same memory. They tell what loads cost until there are some, and again where slow ones were so
    long ago that the scheduler side has long stopped ordering any.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._lines = {direction: _Line() for direction in Direction}

    def begin(self, direction: Direction) -> None:
        with self._lock:
            now = self._clock()
            self._lines[direction].begin(now)

    def end(self, direction: Direction, num_bytes: int) -> None:
        """A copy that was begun has ended, after so many bytes; none where it failed."""
        with self._lock:
            now = self._clock()
            for line in self._lines.values():
                line.forget()
            self._lines[direction].end(now, num_bytes)

    @property
    def bytes_per_s(self) -> float | None:
        with self._lock:
            loads, stores = self._lines[Direction.LOAD], self._lines[Direction.STORE]
            seconds = loads.seconds + _STORE_WEIGHT * stores.seconds
            return (loads.num_bytes + _STORE_WEIGHT * stores.num_bytes) / seconds if seconds > 0 else None


class _Line:
    """Of one direction: bytes, and the seconds in which a copy ran."""

    def __init__(self) -> None:
        self.num_bytes = 0.0
        self.seconds = 0.0
        self._num_running = 0
        self._since = 0.0

    def begin(self, now: float) -> None:
        if self._num_running == 0:
            self._since = now
        self._num_running += 1

    def end(self, now: float, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.seconds += now - self._since
        self._since = now
        self._num_running -= 1

    def forget(self) -> None:
        self.num_bytes *= _REMEMBER
        self.seconds *= _REMEMBER


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
        self._meter = LoadMeter()
        # The mover holds the layout's and the slab's memory: only the threads and this field have it.
        self._mover: BlockMover | None = HostMover(layout, slab) if mover is None else mover
        self._block_bytes = layout.block_bytes
        self._step_answers: list[JobResult] = []
        arguments = (self._queue, self._mover, piece_bytes, layout.block_bytes, self._meter)
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

    def load_for_step(self, orders: Sequence[CopyOrder], *, after: Fence) -> StepLoads:
        """The caller copies where its kernels would wait."""
        assert after.is_reached(), "a fence of another engine"
        assert self._mover is not None, f"{len(orders)} orders after close"
        return HostStepLoads(self._load_now, orders, self._answer_step_loads)

    def _load_now(self, order: CopyOrder) -> None:
        assert self._mover is not None, f"job {order.job_id} after close"
        self._meter.begin(order.direction)
        self._mover.copy_piece(order.direction, order.gpu_blocks, order.slots)
        self._meter.end(order.direction, len(order.slots) * self._block_bytes)

    def _answer_step_loads(self, orders: Sequence[CopyOrder]) -> None:
        for order in orders:
            num_bytes = len(order.slots) * self._block_bytes
            self._step_answers.append(JobResult(order.job_id, order.direction, Outcome.DONE, 0.0, num_bytes))

    @property
    def link(self) -> LinkFacts | None:
        """What was loaded a second of late."""
        rate = self._meter.bytes_per_s
        return None if rate is None else LinkFacts(rate, by_layer=False)

    def stopwatch(self) -> Stopwatch:
        return HostStopwatch()

    def poll(self) -> list[JobResult]:
        """The answers since the last call; never waits for a copy."""
        step_answers, self._step_answers = self._step_answers, []
        return step_answers + self._queue.answers()

    def promise(self, window_s: float, never: Collection[JobId] = ()) -> list[JobId]:  # noqa: ARG002 - no device keeps it
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
        self._mover = None
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _copy_pieces(queue: OrderQueue, mover: BlockMover, piece_bytes: int, block_bytes: int, meter: LoadMeter) -> None:
    """A pool thread's life: until the queue is closed."""
    while (piece := queue.take(piece_bytes)) is not None:
        fault: str | None = None
        meter.begin(piece.direction)
        try:
            mover.copy_piece(piece.direction, piece.gpu_blocks, piece.slots)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this order's answer and no other's
            fault = f"{type(error).__name__}: {error}"
        meter.end(piece.direction, 0 if fault else len(piece.slots) * block_bytes)
        queue.finish(piece, fault)
