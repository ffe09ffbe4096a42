"""Loads that a step's own kernels read: row by row in the order of the layers, each row's kernels behind its copies.

    begin -> hold_kernels(layer 0): rows 0, 1 enqueued, kernels wait for row 0 -> hold_kernels(layer 1) ... -> end

What a row costs is paid between the launches of the model's kernels, so `begin` computes the addresses of all rows.

Nothing here pauses between batches, as other loads do for the model's own copies: the model copies its input before the
step, and the next step's comes behind this step's kernels, which wait for all of this.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from kvortex.messages import CopyOrder, Direction, IntArray, JobResult, Outcome
from kvortex.transfer.addresses import AddressTable, Copies, address_of, rows_of
from kvortex.transfer.base import KVLayout
from kvortex.transfer.cuda_driver import CudaDriver, DriverError
from kvortex.transfer.cuda_stream import CudaFence, StreamEnd
from kvortex.transfer.pinned import PinnedSlab

logger = logging.getLogger(__name__)

_COPIES_AHEAD: Final = 1024
"""Enqueued beyond what the kernels wait for. The driver lets nothing be launched when it has too many."""

_NUMBER_BYTES: Final = 8
"""Of an address or a size, as the driver reads them."""

_POLL_S: Final = 0.001


class StepLoader:
    """Keeps the step loads under way, of one stream.

    Args:
        slab: stays open until `close` has returned True.
    """

    def __init__(
        self,
        driver: CudaDriver,
        stream: torch.cuda.Stream,
        layout: KVLayout,
        slab: PinnedSlab,
        clock: Callable[[], float],
    ) -> None:
        self._rows = _StepRows(driver, stream, layout, slab)
        self._stream = stream
        self._block_bytes = layout.block_bytes
        self._clock = clock
        self._under_way: deque[CudaStepLoads] = deque()
        self.is_by_layer = self._rows.num_rows > 1 and bool(layout.regions_of)

    @property
    def is_busy(self) -> bool:
        """Whether copies are under way or about to be. Any thread."""
        return any(not loads.has_ended for loads in tuple(self._under_way))

    def begin(self, orders: Sequence[CopyOrder], after: CudaFence, compute: torch.cuda.Stream) -> CudaStepLoads:
        """Takes the loads of the step whose kernels `compute` is given next."""
        loads = CudaStepLoads(self._rows, self._stream, compute, orders, self._clock())
        after.hold(self._stream)
        self._under_way.append(loads)
        return loads

    def collect(self) -> list[JobResult]:
        """The answers since the last call; never waits for a copy."""
        answers: list[JobResult] = []
        while self._under_way and self._under_way[0].has_ended:
            answers += self._under_way.popleft().answers(self._clock(), self._block_bytes)
        return answers

    def close(self, end_s: float) -> bool:
        """Waits for what is under way until `end_s` of time.monotonic. True if it ended."""
        while self.is_busy and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        return not self.is_busy


class _StepRows:
    """Enqueues rows of lists of blocks; a row is the bytes of one layer, or of what lies together with it."""

    def __init__(self, driver: CudaDriver, stream: torch.cuda.Stream, layout: KVLayout, slab: PinnedSlab) -> None:
        rows = rows_of(layout)
        self.num_rows = len(rows)
        self._driver = driver
        self._stream = stream
        self._handle = int(stream.cuda_stream)
        self._regions = layout.regions
        self._host = slab.tensor
        self._table = AddressTable(
            rows, slab.address, slab.slot_bytes, max_copy_bytes=slab.seam_bytes, seam_bytes=slab.seam_bytes
        )
        self._offsets = np.cumsum((0, *layout.fragment_bytes[:-1])).tolist()
        begins = [row.slot_offset for row in rows]
        self.row_of_region = [int(np.searchsorted(begins, offset, side="right")) - 1 for offset in self._offsets]
        self._spare_ends: list[StreamEnd] = []

    def plan(self, gpu_blocks: IntArray, slots: IntArray) -> _RowPlan:
        copies, begins = self._table.copies_by_row(gpu_blocks, slots)
        device, host, sizes = map(address_of, copies)
        return _RowPlan(gpu_blocks, slots, copies, (device, host, sizes), begins)

    def enqueue(self, row: int, plan: _RowPlan) -> None:
        """Raises RuntimeError when the device has failed."""
        device, host, sizes = plan.addresses
        begin, end = plan.begins[row], plan.begins[row + 1]
        try:
            while begin < end:
                at, count = begin * _NUMBER_BYTES, min(end - begin, _COPIES_AHEAD)
                self._driver.copy_at(device + at, host + at, sizes + at, count, self._handle)
                begin += count
        except DriverError as error:
            logger.warning("a load that a step waits for is copied block by block: %s", error)
            self._copy_by_torch(row, plan.gpu_blocks, plan.slots)

    def mark(self) -> StreamEnd:
        """The end of all that has been enqueued."""
        if not self._spare_ends:
            return StreamEnd(self._stream)
        end = self._spare_ends.pop()
        end.move(self._stream)
        return end

    def take_back(self, ends: Iterable[StreamEnd]) -> None:
        """Nobody asks these ends any more; to make an event costs more than to record it."""
        self._spare_ends += ends

    def _copy_by_torch(self, row: int, gpu_blocks: IntArray, slots: IntArray) -> None:
        with torch.cuda.stream(self._stream):
            for region, offset, of_row in zip(self._regions, self._offsets, self.row_of_region, strict=True):
                if of_row != row:
                    continue
                for block, slot in zip(gpu_blocks.tolist(), slots.tolist(), strict=True):
                    region[block].copy_(self._host[slot, offset : offset + region.shape[1]])


class _RowPlan(NamedTuple):
    """What `_StepRows` enqueues of one list of blocks."""

    gpu_blocks: IntArray
    slots: IntArray
    copies: Copies
    """Never read here, but what `addresses` are of must live."""
    addresses: tuple[int, int, int]
    """Of the arrays of `copies`."""
    begins: list[int]
    """Of each row's copies, and the number of all of them."""


class CudaStepLoads:
    """The loads of one step; see `StepLoads`."""

    def __init__(
        self,
        rows: _StepRows,
        stream: torch.cuda.Stream,
        compute: torch.cuda.Stream,
        orders: Sequence[CopyOrder],
        begun_s: float,
    ) -> None:
        assert all(order.direction is Direction.LOAD for order in orders), orders
        self._rows = rows
        self._stream = stream
        self._compute = compute
        self._orders = orders
        self._begun_s = begun_s
        none = np.empty(0, np.int64)
        self._plan = rows.plan(
            np.concatenate([none, *(order.gpu_blocks for order in orders)]),
            np.concatenate([none, *(order.slots for order in orders)]),
        )
        self._num_enqueued = 0
        self._num_held = 0
        self._ends: dict[int, StreamEnd] = {}
        """By row: of those enqueued, but of none that kernels were made to wait for together with a later one."""
        self._last_end: StreamEnd | None = None
        """Of all rows, once `end` has been called."""

    @property
    def has_ended(self) -> bool:
        """Whether no byte is touched any more. A device that has failed touches none."""
        if self._last_end is None:
            return False
        try:
            return self._last_end.is_reached()
        except RuntimeError:
            return True  # the model's next kernel meets the same failure

    def hold_kernels(self, regions: Sequence[int]) -> None:
        self._hold(max((self._rows.row_of_region[region] for region in regions), default=-1))

    def end(self) -> bool:
        assert self._last_end is None, "ended twice"
        last = self._rows.num_rows - 1
        in_time = self._num_held == self._rows.num_rows
        self._hold(last)
        self._last_end = self._ends.pop(last)
        self._rows.take_back(self._ends.values())
        self._ends = {}
        return in_time

    def answers(self, now_s: float, block_bytes: int) -> list[JobResult]:
        """One for each order, once `has_ended`."""
        seconds = now_s - self._begun_s
        return [
            JobResult(order.job_id, order.direction, Outcome.DONE, seconds, len(order.slots) * block_bytes)
            for order in self._orders
        ]

    def _hold(self, row: int) -> None:
        self._enqueue_through(row)
        # One stream, rows in order: behind the last of them is behind all of them.
        if row >= self._num_held:
            self._ends[row].hold(self._compute)
            self._num_held = row + 1

    def _enqueue_through(self, row: int) -> None:
        """All rows up to this one, and of the next ones as many as may be ahead."""
        begins = self._plan.begins
        for next_row in range(self._num_enqueued, self._rows.num_rows):
            if next_row > row + 1 and begins[next_row + 1] - begins[row + 1] > _COPIES_AHEAD:
                return
            self._rows.enqueue(next_row, self._plan)
            if next_row >= row:  # kernels never wait for less than `row` again
                self._ends[next_row] = self._rows.mark()
            self._num_enqueued = next_row + 1
