"""Copy engines and movers that misbehave on purpose.

Movers stand in for `HostMover` inside a real `CpuCopyEngine` and see single pieces; `HeldEngine` is a whole
engine that is worked by hand.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

import torch

from kvortex.messages import CopyOrder, Direction, IntArray, JobId, JobResult, LinkFacts, Outcome
from kvortex.transfer.base import Fence, KVLayout, StepLoads, Stopwatch
from kvortex.transfer.cpu import BlockMover, CpuCopyEngine, HostMover, HostStopwatch, ReachedFence
from kvortex.transfer.slab import HostSlab


class HeldEngine:
    """A `CopyEngine` that copies and answers an order only when told to; bytes are moved inside `release`."""

    def __init__(self, layout: KVLayout, slab: HostSlab) -> None:
        self._mover = HostMover(layout, slab)
        self._block_bytes = layout.block_bytes
        self._held: dict[JobId, CopyOrder] = {}
        self._answers: list[JobResult] = []
        self._last_answer: dict[JobId, JobResult] = {}
        self.orders: list[CopyOrder] = []
        """Every order ever submitted, in order."""
        self.closed = False
        self.promise_next: list[JobId] = []
        self.held_for: list[list[JobId]] = []
        """Each call of `hold_kernels`."""
        self.known_link: LinkFacts | None = None

    @property
    def held(self) -> list[JobId]:
        """Jobs that are neither answered nor dropped, in the order they came."""
        return list(self._held)

    def fence(self) -> Fence:
        return ReachedFence()

    def submit(self, orders: Sequence[CopyOrder], *, after: Fence | None = None) -> None:
        assert not self.closed, "submit after close"
        for order in orders:
            known = order.job_id in self._held or order.job_id in self._last_answer
            assert not known, f"job {order.job_id} was submitted before"
            self._held[order.job_id] = order
            self.orders.append(order)

    def poll(self) -> list[JobResult]:
        answers, self._answers = self._answers, []
        return answers

    def load_for_step(self, orders: Sequence[CopyOrder], *, after: Fence) -> StepLoads:
        """Held like others, until kernels would wait for them."""
        self.submit(orders, after=after)
        return HeldStepLoads(self, [order.job_id for order in orders])

    @property
    def link(self) -> LinkFacts | None:
        """Nothing: so loads come before their request's step, where the test can hold them."""
        return self.known_link

    def stopwatch(self) -> Stopwatch:
        return HostStopwatch()

    def promise(self, window_s: float, never: Collection[JobId] = ()) -> list[JobId]:
        """What `promise_next` was told to promise, once."""
        promised, self.promise_next = self.promise_next, []
        return [job_id for job_id in promised if job_id in self._held and job_id not in never]

    def hold_kernels(self, job_ids: Sequence[JobId]) -> None:
        """As late as a device may be: the promised bytes come now, just before the kernels."""
        self.held_for.append(list(job_ids))
        for job_id in job_ids:
            if job_id in self._held:
                self.release(job_id)

    def close(self, timeout_s: float) -> bool:
        self.closed = True
        self._held.clear()
        self._answers.clear()
        return True

    def release(self, job_id: JobId | int) -> None:
        """Copies the order's bytes now and answers DONE."""
        order = self._held.pop(JobId(job_id))
        if len(order.slots):
            self._mover.copy_piece(order.direction, order.gpu_blocks, order.slots)
        self._answer(order, Outcome.DONE, len(order.slots) * self._block_bytes)

    def release_all(self) -> None:
        for job_id in self.held:
            self.release(job_id)

    def fail(self, job_id: JobId | int, detail: str = "told to fail") -> None:
        """Copies nothing and answers FAILED."""
        self._answer(self._held.pop(JobId(job_id)), Outcome.FAILED, 0, detail)

    def time_out(self, job_id: JobId | int) -> None:
        """Copies nothing and answers TIMED_OUT."""
        self._answer(self._held.pop(JobId(job_id)), Outcome.TIMED_OUT, 0, "told to be late")

    def drop(self, job_id: JobId | int) -> None:
        """Copies nothing and never answers: a completion that got lost."""
        del self._held[JobId(job_id)]

    def answer_again(self, job_id: JobId | int) -> None:
        """Gives a job's answer once more: a completion that is delivered twice."""
        self._answers.append(self._last_answer[JobId(job_id)])

    def _answer(self, order: CopyOrder, outcome: Outcome, num_bytes: int, detail: str = "") -> None:
        answer = JobResult(order.job_id, order.direction, outcome, 0.0, num_bytes, detail)
        self._last_answer[order.job_id] = answer
        self._answers.append(answer)


class HeldStepLoads:
    """As late as a device may be: the bytes come just before the first kernels that wait for them."""

    def __init__(self, engine: HeldEngine, job_ids: Sequence[JobId]) -> None:
        self._engine = engine
        self._job_ids = list(job_ids)
        self.regions: set[int] = set()
        self.ended = False

    def hold_kernels(self, regions: Sequence[int]) -> None:
        self.regions.update(regions)
        for job_id in self._job_ids:
            self._engine.release(job_id)
        self._job_ids.clear()

    def end(self) -> bool:
        self.ended = True
        in_time = not self._job_ids
        self.hold_kernels(())
        return in_time


class GatedMover:
    """Lets a piece pass only when told; `begun` lists the pieces that were begun, held ones included.

    Args:
        held_blocks: hold only pieces that have one of these GPU blocks; None holds every piece.
    """

    def __init__(self, inner: BlockMover, held_blocks: Sequence[int] | None = None) -> None:
        self._inner = inner
        self._held_blocks = None if held_blocks is None else set(held_blocks)
        self._changed = threading.Condition()
        self._num_passes = 0
        self._open = False
        self.begun: list[tuple[Direction, list[int], list[int]]] = []

    def copy_piece(self, direction: Direction, gpu_blocks: IntArray, slots: IntArray) -> None:
        with self._changed:
            self.begun.append((direction, gpu_blocks.tolist(), slots.tolist()))
            self._changed.notify_all()
            if self._held_blocks is None or self._held_blocks & set(gpu_blocks.tolist()):
                passes = self._changed.wait_for(lambda: self._open or self._num_passes > 0, 60)
                assert passes, "never let through"
                self._num_passes -= 1
        self._inner.copy_piece(direction, gpu_blocks, slots)

    def wait_begun(self, num_pieces: int) -> None:
        """Returns when that many pieces have been begun in all."""
        with self._changed:
            begun = self._changed.wait_for(lambda: len(self.begun) >= num_pieces, 60)
            assert begun, f"{len(self.begun)} of {num_pieces} pieces begun"

    def let_through(self, num_pieces: int) -> None:
        with self._changed:
            self._num_passes += num_pieces
            self._changed.notify_all()

    def open(self) -> None:
        """Holds nothing from now on."""
        with self._changed:
            self._open = True
            self._changed.notify_all()


class FailingMover:
    """Raises for a piece that has one of these GPU blocks, after moving the piece."""

    def __init__(self, inner: BlockMover, bad_blocks: Sequence[int], error: Exception) -> None:
        self._inner = inner
        self._bad_blocks = set(bad_blocks)
        self._error = error

    def copy_piece(self, direction: Direction, gpu_blocks: IntArray, slots: IntArray) -> None:
        self._inner.copy_piece(direction, gpu_blocks, slots)
        if self._bad_blocks & set(gpu_blocks.tolist()):
            raise self._error


class SkippingMover:
    """Says that it moved every piece, and moves none that has one of these GPU blocks."""

    def __init__(self, inner: BlockMover, skipped_blocks: Sequence[int]) -> None:
        self._inner = inner
        self._skipped_blocks = set(skipped_blocks)

    def copy_piece(self, direction: Direction, gpu_blocks: IntArray, slots: IntArray) -> None:
        if not self._skipped_blocks & set(gpu_blocks.tolist()):
            self._inner.copy_piece(direction, gpu_blocks, slots)


class ZeroLoadMover:
    """Stores as it should; a load fills the GPU blocks with zeros, while `zeros` is set."""

    def __init__(self, layout: KVLayout, slab: HostSlab, *, zeros: bool = True) -> None:
        self._inner = HostMover(layout, slab)
        self._regions = layout.regions
        self.zeros = zeros

    def copy_piece(self, direction: Direction, gpu_blocks: IntArray, slots: IntArray) -> None:
        if direction is Direction.STORE or not self.zeros:
            self._inner.copy_piece(direction, gpu_blocks, slots)
            return
        for region in self._regions:
            region[torch.from_numpy(gpu_blocks)] = 0


class ZeroLoadEngine(CpuCopyEngine):
    """The negative control: answers DONE like the real engine, and loads zeros.

    A test of correct bytes that passes with this engine tests nothing.
    """

    def __init__(self, layout: KVLayout, slab: HostSlab, num_threads: int) -> None:
        super().__init__(layout, slab, num_threads, mover=ZeroLoadMover(layout, slab))
