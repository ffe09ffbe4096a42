"""A device whose compute stream and copies run when the test says, and whose memory holds tags, not numbers.

What position `p` of a sequence leaves in a layer's KV is a tag of all tokens up to `p`: so a kernel that reads a block
knows whether that is the block of its own prefix. A copy moves tags, layer by layer, at any moment that the orders'
fences allow; kernels run at any moment after they were submitted. Both are as early or as late as the test likes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvortex.messages import CopyOrder, Direction, JobId, JobResult, LinkFacts, Outcome
from kvortex.transfer.base import Fence, StepLoads, Stopwatch

Tags = npt.NDArray[np.int64]
LAYERS = 2
POISON = -7
"""What memory holds that nothing was written to."""


@dataclass(frozen=True)
class StreamPoint:
    """A `Fence`: so many entries of the compute stream."""

    device: TagDevice
    position: int

    def is_reached(self) -> bool:
        return self.device.done >= self.position


@dataclass
class _Copy:
    """Attributes:
    after: the stream position behind which bytes may move.
    layers_left: not copied yet.
    promised: vLLM was told that it will end well.
    """

    order: CopyOrder
    after: int
    layers_left: list[int]
    promised: bool = False
    for_step: bool = False


class TagDevice:
    """One rank's `CopyEngine`, with the memory and the compute stream that it works on."""

    def __init__(self, num_blocks: int, num_slots: int, block_size: int) -> None:
        self.vram: Tags = np.full((LAYERS, num_blocks, block_size), POISON, dtype=np.int64)
        self.ram: Tags = np.full((LAYERS, num_slots, block_size), POISON, dtype=np.int64)
        self.link_facts: LinkFacts | None = LinkFacts(1e9, by_layer=True)
        self.done = 0
        self.promise_next = 0
        self._stream: list[Callable[[], None]] = []
        self._base = 0
        self._copies: dict[JobId, _Copy] = {}
        self._lost: dict[JobId, _Copy] = {}
        self._answers: list[JobResult] = []
        self.answered: list[JobResult] = []
        """The last few answers, to be given again."""
        self.known: set[JobId] = set()

    # ---- the compute stream

    @property
    def submitted(self) -> int:
        return self._base + len(self._stream)

    def launch(self, kernel: Callable[[], None]) -> None:
        self._stream.append(kernel)

    def run(self, up_to: int | None = None) -> None:
        """Runs the stream up to a position, all of it by default."""
        end = self.submitted if up_to is None else min(up_to, self.submitted)
        while self.done < end:
            kernel = self._stream.pop(0)
            self._base += 1
            kernel()
            self.done += 1

    # ---- copies, as the test works them

    @property
    def held(self) -> list[JobId]:
        """Orders that can be ended now: not answered, and not lost."""
        return list(self._copies)

    @property
    def lost(self) -> list[JobId]:
        return list(self._lost)

    def direction(self, job_id: JobId) -> Direction:
        return self._copies[job_id].order.direction

    def may_fail(self, job_id: JobId) -> bool:
        copy = self._copies[job_id]
        return not copy.promised and not copy.for_step

    def copy_layer(self, job_id: JobId, layer: int) -> None:
        """Moves one layer's bytes of an order, as soon as its fence allows."""
        copy = self._copies[job_id]
        if layer not in copy.layers_left:
            return
        self.run(copy.after)
        copy.layers_left.remove(layer)
        order = copy.order
        if order.direction is Direction.STORE:
            self.ram[layer, order.slots] = self.vram[layer, order.gpu_blocks]
        else:
            self.vram[layer, order.gpu_blocks] = self.ram[layer, order.slots]

    def release(self, job_id: JobId) -> None:
        """The order's bytes are all there, its answer is DONE."""
        for layer in list(self._copies[job_id].layers_left):
            self.copy_layer(job_id, layer)
        order = self._copies.pop(job_id).order
        self._answer(order, Outcome.DONE, len(order.slots))

    def fail(self, job_id: JobId, outcome: Outcome) -> None:
        """Ends an order with some of its layers copied."""
        assert self.may_fail(job_id), job_id
        order = self._copies.pop(job_id).order
        self._answer(order, outcome, 0, "told to fail")

    def lose(self, job_id: JobId) -> None:
        """A store's answer never comes, and its bytes come whenever `find` is called."""
        copy = self._copies.pop(job_id)
        assert copy.order.direction is Direction.STORE, "nobody gives a load up but its engine"
        self._lost[job_id] = copy

    def find(self, job_id: JobId) -> None:
        """What was lost comes in after all: bytes and answer."""
        copy = self._lost.pop(job_id)
        self.run(copy.after)  # however late, it is behind the kernels that it was ordered behind
        order = copy.order
        self.ram[:, order.slots] = self.vram[:, order.gpu_blocks]
        self._answer(order, Outcome.DONE, len(order.slots))

    def answer_again(self, index: int) -> None:
        if self.answered:
            self._answers.append(self.answered[index % len(self.answered)])

    def _answer(self, order: CopyOrder, outcome: Outcome, num_bytes: int, detail: str = "") -> None:
        result = JobResult(order.job_id, order.direction, outcome, 0.001, num_bytes, detail)
        self._answers.append(result)
        self.answered = [*self.answered[-7:], result]

    # ---- `CopyEngine`

    def fence(self) -> Fence:
        return StreamPoint(self, self.submitted)

    def submit(self, orders: Sequence[CopyOrder], *, after: Fence | None = None) -> None:
        self._take(orders, after)

    def _take(self, orders: Sequence[CopyOrder], after: Fence | None) -> None:
        point = self.fence() if after is None else after
        assert isinstance(point, StreamPoint)
        for order in orders:
            assert order.job_id not in self.known, f"job {order.job_id} was submitted before"
            assert len(set(order.slots.tolist())) == len(order.slots) == len(order.gpu_blocks)
            self.known.add(order.job_id)
            self._copies[order.job_id] = _Copy(order, point.position, list(range(LAYERS)))

    def load_for_step(self, orders: Sequence[CopyOrder], *, after: Fence) -> StepLoads:
        self._take(orders, after)
        for order in orders:
            self._copies[order.job_id].for_step = True
        return _TagStepLoads(self, [order.job_id for order in orders])

    @property
    def link(self) -> LinkFacts | None:
        return self.link_facts

    def stopwatch(self) -> Stopwatch:
        return _SteadyStopwatch()

    def poll(self) -> list[JobResult]:
        answers, self._answers = self._answers, []
        return answers

    def promise(self, window_s: float, never: Collection[JobId] = ()) -> list[JobId]:
        """As many loads as `promise_next` says, the oldest first."""
        promised: list[JobId] = []
        for job_id, copy in self._copies.items():
            if len(promised) == self.promise_next:
                break
            if copy.order.direction is Direction.LOAD and self.may_fail(job_id) and job_id not in never:
                copy.promised = True
                promised.append(job_id)
        self.promise_next = 0
        return promised

    def hold_kernels(self, job_ids: Sequence[JobId]) -> None:
        wanted = list(job_ids)
        self.launch(lambda: self._wait_for(wanted, range(LAYERS)))

    def _wait_for(self, job_ids: Sequence[JobId], layers: Sequence[int]) -> None:
        for job_id in job_ids:
            if job_id in self._copies:
                for layer in layers:
                    self.copy_layer(job_id, layer)

    def close(self, timeout_s: float) -> bool:
        return True


class _SteadyStopwatch:
    """Every step takes as long: what is planned by its time must be the same each time that a run is played."""

    def stop(self) -> None:
        """Nothing runs."""

    def seconds(self) -> float | None:
        return 0.01


class _TagStepLoads:
    """The bytes come when the first kernel that waits for them runs, or before, as the test likes."""

    def __init__(self, device: TagDevice, job_ids: Sequence[JobId]) -> None:
        self._device = device
        self._job_ids = list(job_ids)
        self._held: set[int] = set()

    def hold_kernels(self, regions: Sequence[int]) -> None:
        wanted = list(regions)
        self._held.update(wanted)
        self._device.launch(lambda: self._device._wait_for(self._job_ids, wanted))

    def end(self) -> bool:
        in_time = self._held >= set(range(LAYERS))
        self.hold_kernels(range(LAYERS))
        return in_time
