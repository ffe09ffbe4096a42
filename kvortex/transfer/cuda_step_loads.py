"""Loads that a step's own kernels read: row by row in the order of the layers, each row's kernels behind its copies.

    begin -> hold_kernels(layer 0): rows 0, 1 enqueued, kernels wait for row 0 -> hold_kernels(layer 1) ... -> end

Nothing here pauses between batches, as other loads do for the model's own copies: the model copies its input before the
step, and the next step's comes behind this step's kernels, which wait for all of this.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from kvortex.messages import CopyOrder, Direction, IntArray, JobResult, Outcome
from kvortex.transfer.addresses import AddressTable, Row, rows_of
from kvortex.transfer.base import KVLayout
from kvortex.transfer.cuda_driver import CudaDriver, DriverError
from kvortex.transfer.cuda_stream import CudaFence, StreamEnd
from kvortex.transfer.pinned import PinnedSlab

logger = logging.getLogger(__name__)

_COPIES_AHEAD: Final = 1024
"""Enqueued beyond what the kernels wait for. The driver lets nothing be launched when it has too many."""

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
    """Enqueues one row of a list of blocks: the bytes of one layer, or of what lies together with it."""

    def __init__(self, driver: CudaDriver, stream: torch.cuda.Stream, layout: KVLayout, slab: PinnedSlab) -> None:
        rows = rows_of(layout)
        self._driver = driver
        self._stream = stream
        self._regions = layout.regions
        self._host = slab.tensor
        self._tables = [_table(row, slab) for row in rows]
        self._offsets = np.cumsum((0, *layout.fragment_bytes[:-1])).tolist()
        begins = [row.slot_offset for row in rows]
        self.row_of_region = [int(np.searchsorted(begins, offset, side="right")) - 1 for offset in self._offsets]

    @property
    def num_rows(self) -> int:
        return len(self._tables)

    def enqueue(self, row: int, gpu_blocks: IntArray, slots: IntArray) -> None:
        """Raises RuntimeError when the device has failed."""
        try:
            copies = self._tables[row].copies(gpu_blocks, slots)
            for device, host, num_bytes in copies.batches(1 << 62, _COPIES_AHEAD):
                self._driver.copy(device, host, num_bytes, self._stream.cuda_stream)
        except DriverError as error:
            logger.warning("a load that a step waits for is copied block by block: %s", error)
            self._copy_by_torch(row, gpu_blocks, slots)

    def _copy_by_torch(self, row: int, gpu_blocks: IntArray, slots: IntArray) -> None:
        with torch.cuda.stream(self._stream):
            for region, offset, of_row in zip(self._regions, self._offsets, self.row_of_region, strict=True):
                if of_row != row:
                    continue
                for block, slot in zip(gpu_blocks.tolist(), slots.tolist(), strict=True):
                    region[block].copy_(self._host[slot, offset : offset + region.shape[1]])


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
        self._gpu_blocks: IntArray = np.concatenate([none, *(order.gpu_blocks for order in orders)])
        self._slots: IntArray = np.concatenate([none, *(order.slots for order in orders)])
        self._ends: list[StreamEnd] = []
        """Of the rows enqueued so far."""
        self._num_held = 0
        self._ended = False

    @property
    def has_ended(self) -> bool:
        """Whether no byte is touched any more. A device that has failed touches none."""
        if not self._ended:
            return False
        try:
            return self._ends[-1].is_reached()
        except RuntimeError:
            return True  # the model's next kernel meets the same failure

    def hold_kernels(self, regions: Sequence[int]) -> None:
        last = max((self._rows.row_of_region[region] for region in regions), default=-1)
        self._enqueue_through(last)
        # One stream, rows in order: behind the last of them is behind all of them.
        if last >= self._num_held:
            self._ends[last].hold(self._compute)
            self._num_held = last + 1

    def end(self) -> bool:
        in_time = self._num_held == self._rows.num_rows
        self.hold_kernels(range(len(self._rows.row_of_region)))
        self._ended = True
        return in_time

    def answers(self, now_s: float, block_bytes: int) -> list[JobResult]:
        """One for each order, once `has_ended`."""
        seconds = now_s - self._begun_s
        return [
            JobResult(order.job_id, order.direction, Outcome.DONE, seconds, len(order.slots) * block_bytes)
            for order in self._orders
        ]

    def _enqueue_through(self, row: int) -> None:
        """All rows up to this one, and of the next ones as many as may be ahead."""
        while len(self._ends) < self._rows.num_rows:
            ahead = len(self._ends) - row
            if ahead > 1 and ahead * len(self._slots) > _COPIES_AHEAD:
                return
            if len(self._slots):
                self._rows.enqueue(len(self._ends), self._gpu_blocks, self._slots)
            self._ends.append(StreamEnd(self._stream))


def _table(row: Row, slab: PinnedSlab) -> AddressTable:
    return AddressTable(
        [row], slab.address, slab.slot_bytes, max_copy_bytes=slab.seam_bytes, seam_bytes=slab.seam_bytes
    )
