"""A copy engine under watch: every loaded block is compared, on its device, with what was stored under its slot.

Sums instead of bytes, taken by the model's own stream: behind the kernels that wrote a block, before those that
write it again. Nothing waits for them until the end, so the copies race as they do without a watcher.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
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
        # What copies made equal: GPU block -> its slot, and the number of the store that filled the slot last.
        self._copies: dict[int, tuple[int, int]] = {}
        self._num_stores: Counter[int] = Counter()

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
            self._note(order)
            if order.direction is Direction.STORE:
                self._sums[self._index(order.slots)] = self._sums_of(order.gpu_blocks)

    def load_for_step(self, orders: Sequence[CopyOrder], *, after: Fence) -> StepLoads:
        self._step_orders.update((order.job_id, order) for order in orders)
        for order in orders:
            self._note(order)
        return WatchedStepLoads(self._inner.load_for_step(orders, after=after), lambda: self._compare(orders))

    def _note(self, order: CopyOrder) -> None:
        for block, slot in zip(order.gpu_blocks.tolist(), order.slots.tolist(), strict=True):
            self._num_stores[slot] += order.direction is Direction.STORE
            self._copies[block] = (slot, self._num_stores[slot])

    def forget(self, blocks: Iterable[int]) -> None:
        """These GPU blocks are about to be written, by kernels or by a load that is not ordered yet."""
        for block in blocks:
            self._copies.pop(block, None)

    def is_copy(self, block: int, slot: int) -> bool:
        """Whether this GPU block has to hold the slot's bytes: it was loaded from it, or the slot was stored from it,
        and neither was written since. False for a block that was computed anew: from other batches, by other kernels,
        its last bits may be others. Told of new blocks by `forget`."""
        return self._copies.get(block) == (slot, self._num_stores[slot])

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
            of_step = self._step_orders.pop(result.job_id, None)
            order = of_step or self._orders.pop(result.job_id)
            if result.outcome is not Outcome.DONE:
                self.forget(order.gpu_blocks.tolist())
                continue
            if of_step is not None:
                continue  # compared when its step ended
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

    def num_unequal(self, pairs: Sequence[tuple[int, int]]) -> int:
        """How many of these GPU blocks do not hold the bytes of the slot beside them. Nothing may be under way."""
        blocks, slots = np.array(pairs, np.int64).reshape(-1, 2).T.copy()
        held = self._slab.tensor[torch.from_numpy(slots)]
        unequal = torch.zeros(len(pairs), dtype=torch.bool)
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
