"""The copy engine of a machine with a GPU: a stream a direction that runs without the host, one for steps' own loads.

    submit        -> a lane a direction -> its stream:  wait for the fence | batch, pause, batch, pause, ... | end
    load_for_step -> a stream of its own:               wait for the fence | a layer's bytes | the next one's | ...

Each direction is one stream. More of them gain nothing in bandwidth, and four keep the copy engine so busy that
the model's own copies wait to the end; so does one stream without the pauses.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final

import torch

from kvortex.messages import CopyOrder, Direction, JobId, JobResult, LinkFacts
from kvortex.transfer.addresses import AddressTable, Row, rows_of
from kvortex.transfer.base import Fence, KVLayout, StepLoads, Stopwatch
from kvortex.transfer.cuda_driver import CudaDriver
from kvortex.transfer.cuda_mover import CudaStreamMover
from kvortex.transfer.cuda_step_loads import StepLoader
from kvortex.transfer.cuda_stream import ComputeWatch, CudaFence, CudaStopwatch, borrowed_stream
from kvortex.transfer.lane import Lane, LaneBounds
from kvortex.transfer.numa import nearest_node
from kvortex.transfer.pinned import PinnedSlab
from kvortex.transfer.queue import OrderQueue
from kvortex.transfer.tuning import TransferTuning, tune

if TYPE_CHECKING:
    from kvortex.transfer.gather import GatherKernel

logger = logging.getLogger(__name__)

_PIECE_S: Final = {Direction.LOAD: 1.2e-3, Direction.STORE: 4.8e-3}
_AHEAD_S: Final = {Direction.LOAD: 9.6e-3, Direction.STORE: 19.2e-3}
"""Of the link: more than another thread may keep the interpreter for, and of stores about what a step takes to be
launched. Nothing waits behind a store but stores."""

_LEAST_AHEAD: Final = 4
_MOST_AHEAD: Final = {Direction.LOAD: 8, Direction.STORE: 16}
"""Pieces. They are smaller where they are many copies."""

_MAX_COPIES: Final = 1024
"""In a piece. The driver takes up to a microsecond each, and lets nothing be launched when it has too many."""

_MAX_INLINE_COPIES: Final = 256
_INLINE_PIECES: Final = 4
"""Of loads, enqueued by the model's thread in one call, about a millisecond of it and five of the link."""

_PATIENCE_S: Final = 2e-3
"""A step's kernels are submitted, its sampling is not. Longer or shorter, what has time is only less well placed."""

_MAX_BLOCKS: Final = 4096

_BESIDE_A_MODEL: Final = 0.9
"""Share of the link that a load surely gets while the model runs; a promise that comes late stalls a step."""


def _never() -> bool:
    return False


def open_cuda(
    layout: KVLayout, num_slots: int, num_streams: int, is_launching: Callable[[], bool]
) -> tuple[PinnedSlab, CudaCopyEngine]:
    """The host slab and the engine for KV that lies on a GPU. Close the engine first, then the slab.

    Args:
        is_launching: see `CudaCopyEngine`.

    Raises:
        UnfitError: no driver, or not that much host memory.
    """
    driver = CudaDriver(layout.regions[0].device.index)
    tuning = tune(driver, [row.num_bytes for row in rows_of(layout)])
    slab = PinnedSlab(num_slots, layout.block_bytes, driver, node=nearest_node(driver.gpu_uuid))
    return slab, CudaCopyEngine(layout, slab, num_streams, driver, tuning, is_launching=is_launching)


class CudaCopyEngine:
    """A `CopyEngine` for KV that lies on a GPU.

    Args:
        layout: the device side.
        slab: the host side; stays open until `close` has returned True.
        num_streams: 1 has both directions share a stream, so that one waits for the other; from 2 on each has
            its own, and no more are used.
        driver: of the layout's GPU.
        tuning: of that GPU.
        is_launching: whether the model's thread is at a step's kernels; who makes it false polls soon after.
        clock: seconds, monotonic; what deadlines are measured by.
    """

    def __init__(
        self,
        layout: KVLayout,
        slab: PinnedSlab,
        num_streams: int,
        driver: CudaDriver,
        tuning: TransferTuning,
        *,
        is_launching: Callable[[], bool] = _never,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert num_streams > 0, f"{num_streams} streams"
        assert slab.slot_bytes >= layout.block_bytes, (slab.slot_bytes, layout.block_bytes)
        self._device = layout.regions[0].device
        assert self._device.index == driver.index, (self._device, driver.index)
        self._layout: KVLayout | None = layout
        self._driver = driver
        self._watch = ComputeWatch()
        self._handles = [driver.create_stream() for _ in range(min(num_streams, 2) + 1)]
        *streams, step_stream = [borrowed_stream(handle, self._device) for handle in self._handles]
        rows = rows_of(layout)
        self._step_loader: StepLoader | None = StepLoader(driver, step_stream, layout, slab, clock)
        self._load_bandwidth = tuning.load_bandwidth
        loads = self._load_mover(rows, layout, slab, streams[0], tuning)
        batch_bytes = min(tuning.store_batch_bytes, slab.seam_bytes)
        table = _table(rows, slab, batch_bytes)
        stores = CudaStreamMover(driver, streams[-1], Direction.STORE, table, batch_bytes, self._watch)
        self._lanes = {
            direction: Lane(
                direction.value,
                OrderQueue(layout.num_blocks, slab.num_slots, layout.block_bytes, clock),
                mover,
                slab,
                _bounds(direction, bandwidth, layout.block_bytes, mover.num_copied_rows),
                layout.block_bytes,
                clock,
                must_wait,
                is_launching,
            )
            for direction, mover, bandwidth, must_wait in (
                (Direction.LOAD, loads, tuning.load_bandwidth, self._is_loading_for_step),
                (Direction.STORE, stores, tuning.store_bandwidth, _never),
            )
        }

    def _load_mover(
        self,
        rows: Sequence[Row],
        layout: KVLayout,
        slab: PinnedSlab,
        stream: torch.cuda.Stream,
        tuning: TransferTuning,
    ) -> CudaStreamMover:
        batch_bytes = min(tuning.load_batch_bytes, slab.seam_bytes)
        kernels = _kernels(rows, layout, slab, tuning) if self._driver.reads_host_pointers else {}
        copied = [row for row in rows if row.num_bytes not in kernels]
        return CudaStreamMover(
            self._driver,
            stream,
            Direction.LOAD,
            _table(rows, slab, batch_bytes),
            batch_bytes,
            self._watch,
            list(kernels.values()),
            _table(copied, slab, batch_bytes) if copied else None,
            _MAX_BLOCKS,
        )

    def fence(self) -> Fence:
        """Marks the current stream of the calling thread, which is where the model runs."""
        return CudaFence(torch.cuda.current_stream(self._device))

    def submit(self, orders: Sequence[CopyOrder], *, after: Fence | None = None) -> None:
        """Takes orders, in this order, and enqueues what may be enqueued now."""
        assert self._layout is not None, f"{len(orders)} orders after close"
        self._look()
        fence = self.fence() if after is None else after
        for direction, lane in self._lanes.items():
            of_lane = [order for order in orders if order.direction is direction]
            if of_lane:
                lane.add(of_lane, fence)

    def load_for_step(self, orders: Sequence[CopyOrder], *, after: Fence) -> StepLoads:
        """Enqueues them row by row, as `hold_kernels` asks for them; other loads begin nothing meanwhile."""
        assert self._layout is not None, f"{len(orders)} orders after close"
        assert isinstance(after, CudaFence), f"a fence of another engine: {after}"
        assert self._step_loader is not None
        return self._step_loader.begin(orders, after, torch.cuda.current_stream(self._device))

    @property
    def link(self) -> LinkFacts | None:
        by_layer = self._step_loader is not None and self._step_loader.is_by_layer
        return LinkFacts(self._load_bandwidth, by_layer)

    def stopwatch(self) -> Stopwatch:
        return CudaStopwatch(torch.cuda.current_stream(self._device))

    def poll(self) -> list[JobResult]:
        """The answers since the last call; never waits for a copy."""
        self._look()
        answers = [] if self._step_loader is None else self._step_loader.collect()
        for lane in self._lanes.values():
            answers += lane.collect()
        return answers

    def promise(self, window_s: float, never: Collection[JobId] = ()) -> list[JobId]:
        """Loads that will have ended within `window_s`; the estimate is that of a link beside a running model."""
        return self._lanes[Direction.LOAD].promise(window_s, never) if self._lanes else []

    def hold_kernels(self, job_ids: Sequence[JobId]) -> None:
        """The calling thread's current stream waits for these promised loads."""
        end = self._lanes[Direction.LOAD].end_of(frozenset(job_ids))
        if end is not None:
            end.hold(torch.cuda.current_stream(self._device))

    def close(self, timeout_s: float) -> bool:
        """Drops every order and answer and waits for what is on the GPU.

        Returns:
            True when no byte moves any more. False when copies were still under way after `timeout_s`; call
            again to wait for them.
        """
        if self._layout is None:
            return True
        end_s = time.monotonic() + timeout_s
        have_ended = [lane.close(end_s) for lane in self._lanes.values()]
        have_ended.append(self._step_loader is None or self._step_loader.close(end_s))
        if not all(have_ended):
            return False
        self._lanes = {}
        self._step_loader = None
        for handle in self._handles:
            self._driver.destroy_stream(handle)
        self._layout = None
        return True

    def _is_loading_for_step(self) -> bool:
        return self._step_loader is not None and self._step_loader.is_busy

    def _look(self) -> None:
        if self._layout is not None:
            self._watch.look(torch.cuda.current_stream(self._device))


def _table(rows: Sequence[Row], slab: PinnedSlab, max_copy_bytes: int) -> AddressTable:
    return AddressTable(rows, slab.address, slab.slot_bytes, max_copy_bytes=max_copy_bytes, seam_bytes=slab.seam_bytes)


def _bounds(direction: Direction, bandwidth: float, block_bytes: int, num_copied_rows: int) -> LaneBounds:
    wanted = round(bandwidth * _PIECE_S[direction]) // block_bytes
    blocks = max(1, min(wanted, _MAX_COPIES // max(1, num_copied_rows), _MAX_BLOCKS))
    ahead = round(bandwidth * _AHEAD_S[direction] / (blocks * block_bytes))
    inline = blocks * num_copied_rows <= _MAX_INLINE_COPIES
    return LaneBounds(
        piece_bytes=blocks * block_bytes,
        ahead_bytes=max(_LEAST_AHEAD, min(ahead, _MOST_AHEAD[direction])) * blocks * block_bytes,
        inline_pieces=_INLINE_PIECES if inline else 0,
        bytes_per_s=_BESIDE_A_MODEL * bandwidth,
        patience_s=_PATIENCE_S,
    )


def _kernels(
    rows: Sequence[Row], layout: KVLayout, slab: PinnedSlab, tuning: TransferTuning
) -> dict[int, GatherKernel]:
    """A kernel for each fragment size that it loads faster than the copy engine."""
    chosen = {row.num_bytes: ctas for row in rows if (ctas := tuning.kernel_ctas.get(row.num_bytes, 0)) > 0}
    if not chosen:
        return {}
    try:
        from kvortex.transfer.gather import UNIT_BYTES, GatherKernel, is_aligned
    except ImportError as error:
        logger.warning("fragments of %s bytes are loaded by the slower copy engine: %s", list(chosen), error)
        return {}
    base = layout.regions[0]
    kernels: dict[int, GatherKernel] = {}
    for num_bytes, num_ctas in chosen.items():
        of_size = [row for row in rows if row.num_bytes == num_bytes]
        if is_aligned(of_size, slab.address, slab.slot_bytes) and base.data_ptr() % UNIT_BYTES == 0:
            kernels[num_bytes] = GatherKernel(of_size, base, slab.tensor, num_ctas)
    return kernels
