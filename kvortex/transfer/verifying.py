"""A copy engine around another one, that verifies what lies in RAM: `kv_cache.verify`.

    STORE  copied -> its checksums are taken -> answered
    LOAD   its checksums are compared -> copied -> answered
                        +-- one differs: answered FAILED, and nothing was copied

Threads of its own work on the checksums, a piece of some MiB at a time, loads first. An order goes from one to the
other inside `poll`, in the worker's thread, where the copy engine wants to be called: so it takes a step more.

A block is covered while it lies in RAM, from its checksum's taking to its comparing. The copies are not, nor the moment
between each and its checksum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from kvortex.messages import BoolArray, CopyOrder, Direction, JobId, JobResult, LinkFacts, Outcome
from kvortex.transfer.base import CopyEngine, Fence, KVLayout, StepLoads, Stopwatch
from kvortex.transfer.checksums import SlotChecksums
from kvortex.transfer.cpu import CpuCopyEngine
from kvortex.transfer.slab import HostSlab


@dataclass(slots=True)
class _UnderWay:
    """An order that is not answered.

    Attributes:
        after: where its copy waits on the device.
        copied: of a STORE, the copy's answer, once it has come.
    """

    order: CopyOrder
    after: Fence
    submitted_s: float
    copied: JobResult | None = None


class VerifyingEngine:
    """A `CopyEngine` that answers a LOAD with FAILED where the bytes in RAM are not those that were stored.

    A load with its step must not fail, so it takes none. An order's deadline is for both parts of it: what has no
    checksum in time was not stored.

    Args:
        copies: the engine that copies; this one's from now on.
        layout, slab: that engine's.
        num_threads: for checksums.
        share: of the blocks stored that get a checksum, 0 to 1, for what `link` tells.
        clock: seconds, monotonic; what deadlines are measured by.
    """

    def __init__(
        self,
        copies: CopyEngine,
        layout: KVLayout,
        slab: HostSlab,
        num_threads: int,
        *,
        share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._copies = copies
        self._share = share
        self._clock = clock
        self._checksums = SlotChecksums(slab, layout.block_bytes)
        self._checks = CpuCopyEngine(layout, slab, num_threads, mover=self._checksums, clock=clock)
        self._under_way: dict[JobId, _UnderWay] = {}

    def fence(self) -> Fence:
        return self._copies.fence()

    def submit(self, orders: Sequence[CopyOrder], *, after: Fence | None = None) -> None:
        """Takes orders; loads of blocks with a checksum are compared first."""
        fence = self.fence() if after is None else after
        now_s = self._clock()
        checks: list[CopyOrder] = []
        copies: list[CopyOrder] = []
        for order in orders:
            self._under_way[order.job_id] = _UnderWay(order, fence, now_s)
            if order.direction is Direction.STORE:
                self._checksums.forget(order.slots)
                copies.append(order)
            elif (known := self._checksums.known(order.slots)).any():
                checks.append(_part(order, known))
            else:
                copies.append(order)
        if checks:
            self._checks.submit(checks)
        if copies:
            self._copies.submit(copies, after=fence)

    def load_for_step(self, orders: Sequence[CopyOrder], *, after: Fence) -> StepLoads:
        """None: by the time their checksums are compared, the step's kernels may have read the blocks."""
        assert not orders, f"{len(orders)} loads with their step, which must not fail, where loads are verified"
        return self._copies.load_for_step(orders, after=after)

    @property
    def link(self) -> LinkFacts | None:
        """The copy engine's, as slow as comparing before each copy makes it."""
        link, checks = self._copies.link, self._checks.link
        if link is None or checks is None:
            return None if link is None else replace(link, by_layer=False)
        return LinkFacts(1 / (1 / link.bytes_per_s + self._share / checks.bytes_per_s), by_layer=False)

    def stopwatch(self) -> Stopwatch:
        return self._copies.stopwatch()

    def poll(self) -> list[JobResult]:
        """The answers since the last call; begins the second half of what is through the first. Never blocks."""
        answers: list[JobResult] = []
        for checked in self._checks.poll():
            way = self._under_way[checked.job_id]
            if checked.direction is Direction.LOAD and checked.outcome is Outcome.DONE:
                self._go_on(way, answers)
            else:
                corrupt = self._checksums.corrupt(way.order.slots) if checked.outcome is Outcome.FAILED else ()
                answers.append(replace(self._answer(way, checked), corrupt_slots=corrupt))
        for copied in self._copies.poll():
            way_or_none = self._under_way.get(copied.job_id)
            if way_or_none is None:
                answers.append(copied)  # answered before: the scheduler side counts it
            elif copied.direction is Direction.STORE and copied.outcome is Outcome.DONE:
                assert way_or_none.copied is None, f"the copy engine has answered job {copied.job_id} twice"
                way_or_none.copied = copied
                self._go_on(way_or_none, answers)
            else:
                answers.append(self._answer(way_or_none, copied))
        return answers

    def promise(self, window_s: float, never: Collection[JobId] = ()) -> list[JobId]:
        """Of the loads that are being copied: their checksums were right."""
        return self._copies.promise(window_s, never)

    def hold_kernels(self, job_ids: Sequence[JobId]) -> None:
        self._copies.hold_kernels(job_ids)

    def close(self, timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        checks_ended = self._checks.close(timeout_s)
        copies_ended = self._copies.close(max(0.0, end_s - time.monotonic()))
        return checks_ended and copies_ended

    def _go_on(self, way: _UnderWay, answers: list[JobResult]) -> None:
        """The order's second half, with what is left of its deadline."""
        order = way.order
        left_s = order.deadline_s - (self._clock() - way.submitted_s)
        if left_s <= 0:
            detail = f"{order.deadline_s:g} s passed between its copy and its checksums"
            late = JobResult(order.job_id, order.direction, Outcome.TIMED_OUT, 0.0, 0, detail)
            answers.append(self._answer(way, late))
        elif order.direction is Direction.LOAD:
            self._copies.submit([replace(order, deadline_s=left_s)], after=way.after)
        elif len((part := _part(order, order.sampled)).slots):
            self._checks.submit([replace(part, deadline_s=left_s)])
        else:
            assert way.copied is not None
            answers.append(self._answer(way, way.copied))

    def _answer(self, way: _UnderWay, last: JobResult) -> JobResult:
        """What the order is answered, by the answer to the last of it."""
        del self._under_way[way.order.job_id]
        done = way.copied if way.copied is not None and last.outcome is Outcome.DONE else last
        return replace(done, seconds=self._clock() - way.submitted_s)


def _part(order: CopyOrder, chosen: BoolArray | None) -> CopyOrder:
    """The order of these blocks alone."""
    if chosen is None:
        return order
    return replace(order, gpu_blocks=order.gpu_blocks[chosen], slots=order.slots[chosen], sampled=None)
