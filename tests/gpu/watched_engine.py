"""A copy engine under watch: every loaded block is compared, on its device, with what was stored under its slot.

Sums instead of bytes, taken by the model's own stream: behind the kernels that wrote a block, before those that
write it again. Nothing waits for them until the end, so the copies race as they do without a watcher.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch

from kvortex.messages import CopyOrder, Direction, IntArray, JobId, JobResult, LinkFacts, Outcome
from kvortex.transfer.base import CopyEngine, Fence, KVLayout, StepLoads, Stopwatch
from kvortex.transfer.slab import HostSlab
from kvortex.vllm_plugin.worker import WorkerSide


class WatchedEngine:
    """A `CopyEngine` around a real one.

    Args:
        zeros: the negative control: what a store has copied is made zero before anyone can load it.
    """

    def __init__(self, inner: CopyEngine, layout: KVLayout, slab: HostSlab, *, zeros: bool = False) -> None:
        self._inner = inner
        self._regions = layout.regions
        self._slab = slab
        self._zeros = zeros
        self._device = layout.regions[0].device
        self._orders: dict[JobId, CopyOrder] = {}
        self._step_orders: dict[JobId, CopyOrder] = {}
        self._sums = torch.zeros(slab.num_slots, dtype=torch.int64, device=self._device)
        self._wrong = torch.zeros((), dtype=torch.int64, device=self._device)
        generator = torch.Generator().manual_seed(0)
        # Odd and different: two words that change places change the sum.
        self._weights = [
            (torch.randint(1, 1 << 30, (region.shape[1] // 4,), generator=generator) * 2 + 1).to(self._device)
            for region in self._regions
        ]
        self.loses_loads = False
        """The negative control of a watch for stalls: no load is answered from now on."""
        self.num_loaded = 0
        self.num_stored = 0

    @property
    def num_wrong(self) -> int:
        """Loaded blocks that were not, byte for byte, what was stored in their slot; waits for the device."""
        return int(self._wrong)

    def fence(self) -> Fence:
        return self._inner.fence()

    def submit(self, orders: Sequence[CopyOrder], *, after: Fence | None = None) -> None:
        self._inner.submit(orders, after=after)
        for order in orders:
            self._orders[order.job_id] = order
            if order.direction is Direction.STORE:
                self._sums[self._index(order.slots)] = self._sums_of(order.gpu_blocks)

    def load_for_step(self, orders: Sequence[CopyOrder], *, after: Fence) -> StepLoads:
        self._step_orders.update((order.job_id, order) for order in orders)
        return WatchedStepLoads(self._inner.load_for_step(orders, after=after), lambda: self._compare(orders))

    def _compare(self, orders: Sequence[CopyOrder]) -> None:
        for order in orders:
            self.num_loaded += len(order.slots)
            self._wrong += (self._sums_of(order.gpu_blocks) != self._sums[self._index(order.slots)]).sum()

    @property
    def link(self) -> LinkFacts | None:
        return self._inner.link

    def stopwatch(self) -> Stopwatch:
        return self._inner.stopwatch()

    def poll(self) -> list[JobResult]:
        results = self._inner.poll()
        if self.loses_loads:
            results = [result for result in results if result.direction is Direction.STORE]
        for result in results:
            if self._step_orders.pop(result.job_id, None) is not None:
                continue  # compared when its step ended
            order = self._orders.pop(result.job_id)
            if result.outcome is not Outcome.DONE:
                continue
            if order.direction is Direction.STORE:
                self.num_stored += len(order.slots)
                if self._zeros:
                    self._slab.tensor[torch.from_numpy(order.slots)] = 0
            else:
                self._compare([order])
        return results

    def promise(self, window_s: float, never: Collection[JobId] = ()) -> list[JobId]:
        return [] if self.loses_loads else self._inner.promise(window_s, never)

    def hold_kernels(self, job_ids: Sequence[JobId]) -> None:
        self._inner.hold_kernels(job_ids)

    def close(self, timeout_s: float) -> bool:
        return self._inner.close(timeout_s)

    def num_unequal(self, blocks: IntArray, slots: IntArray) -> int:
        """How many of these GPU blocks do not hold the bytes of the slot beside them. Nothing may be under way."""
        held = self._slab.tensor[torch.from_numpy(slots)]
        unequal = torch.zeros(len(slots), dtype=torch.bool)
        index, at = self._index(blocks), 0
        for region in self._regions:
            end = at + region.shape[1]
            unequal |= (region[index].cpu() != held[:, at:end]).any(1)
            at = end
        return int(unequal.sum())

    def _index(self, numbers: IntArray) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self._device)

    def _sums_of(self, blocks: IntArray) -> torch.Tensor:
        index = self._index(blocks)
        total = torch.zeros(len(blocks), dtype=torch.int64, device=self._device)
        for region, weights in zip(self._regions, self._weights, strict=True):
            words = region[index][:, : 4 * len(weights)].contiguous().view(torch.int32)
            total += (words.to(torch.int64) * weights).sum(1)
        return total


class WatchedStepLoads:
    """Compared behind the step's kernels, and before those of the next one, which may write the blocks."""

    def __init__(self, inner: StepLoads, compare: Callable[[], None]) -> None:
        self._inner = inner
        self._compare = compare

    def hold_kernels(self, regions: Sequence[int]) -> None:
        self._inner.hold_kernels(regions)

    def end(self) -> bool:
        in_time = self._inner.end()
        self._compare()
        return in_time


@contextmanager
def watched(*, zeros: bool = False) -> Iterator[list[WatchedEngine]]:
    """Every copy engine opened meanwhile is watched; the list gets it."""
    opened: list[WatchedEngine] = []
    open_engine = WorkerSide._open_engine

    def open_watched(side: WorkerSide, layout: KVLayout) -> tuple[HostSlab, WatchedEngine]:
        slab, inner = open_engine(side, layout)
        opened.append(WatchedEngine(inner, layout, slab, zeros=zeros))
        return slab, opened[-1]

    with patch.object(WorkerSide, "_open_engine", open_watched):
        yield opened
