"""The orders a copy engine has taken and not answered yet, cut into pieces: loads first, then stores.

    add -> waiting (loads | stores) -> take: a piece is running -> finish -> ... -> an answer -> answers
                 +-- deadline passed or a piece failed: what has not begun is dropped --+

Every engine has one. It decides what is copied next and what each order is answered, and touches no bytes.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from kvortex.messages import CopyOrder, Direction, IntArray, JobId, JobResult, Outcome

REMEMBERED_JOBS = 4096
"""How many answered job ids are kept to recognise one that is submitted again."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some whole blocks of one order, copied in one go.

    Attributes:
        gpu_blocks: int64 [n], n >= 1, within the layout.
        slots: int64 [n], within the slab; `slots[i]` pairs with `gpu_blocks[i]`.
    """

    job_id: JobId
    direction: Direction
    gpu_blocks: IntArray
    slots: IntArray


@dataclass(slots=True, eq=False)
class _Job:
    """An order that is not answered: some of it is running, or has not begun."""

    order: CopyOrder
    submitted_s: float
    num_begun: int = 0
    num_copied: int = 0
    num_running: int = 0
    given_up: Outcome | None = None
    detail: str = ""
    is_promised: bool = False

    @property
    def num_blocks(self) -> int:
        return len(self.order.gpu_blocks)

    def is_late(self, now_s: float) -> bool:
        return not self.is_promised and now_s >= self.submitted_s + self.order.deadline_s


class OrderQueue:
    """Hands out pieces and keeps each order's answer. Every method may be called from any thread.

    It is as bounded as what is ordered: an order under way has a GPU block of its own, and a deadline.

    Args:
        num_blocks: GPU blocks of the layout.
        num_slots: slots of the slab.
        block_bytes: bytes of one block.
        clock: seconds, monotonic.
    """

    def __init__(
        self, num_blocks: int, num_slots: int, block_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert block_bytes > 0, f"blocks of {block_bytes} bytes"
        self._num_blocks = num_blocks
        self._num_slots = num_slots
        self._block_bytes = block_bytes
        self._clock = clock
        self._changed = threading.Condition()
        self._jobs: dict[JobId, _Job] = {}
        # Of the jobs, those with blocks not begun, in the order they came.
        self._waiting: dict[Direction, OrderedDict[JobId, _Job]] = {
            Direction.LOAD: OrderedDict(),
            Direction.STORE: OrderedDict(),
        }
        self._answers: list[JobResult] = []
        self._answered: deque[JobId] = deque()
        self._answered_ids: set[JobId] = set()
        self._closed = False

    def add(self, orders: Sequence[CopyOrder]) -> None:
        """Takes orders behind those of the same direction. One that cannot be copied is answered FAILED."""
        with self._changed:
            assert not self._closed, f"{len(orders)} orders after close"
            job_ids = [order.job_id for order in orders]
            known = [i for i in job_ids if i in self._jobs or i in self._answered_ids]
            assert not known, f"jobs {known} were submitted before"
            assert len(set(job_ids)) == len(job_ids), f"a job is twice in {job_ids}"
            for order in orders:
                assert math.isfinite(order.deadline_s), f"job {order.job_id}: deadline {order.deadline_s} s"
            now_s = self._clock()
            for order in orders:
                job = self._jobs[order.job_id] = _Job(order, now_s)
                fault = _order_fault(order, self._num_blocks, self._num_slots)
                if fault is not None:
                    self._give_up(job, Outcome.FAILED, fault)
                elif job.num_blocks == 0:
                    self._answer(job, Outcome.DONE)
                else:
                    self._waiting[order.direction][order.job_id] = job
            self._changed.notify_all()

    def take(self, max_bytes: int, timeout_s: float | None = None) -> Piece | None:
        """Begins the next piece: of the oldest load, or of the oldest store where no load waits.

        Args:
            max_bytes: bound on the piece; a larger single block is a piece of its own.
            timeout_s: how long to wait for one; 0 does not wait, None waits until there is one or the queue
                is closed.

        Returns:
            A piece that must be given to `finish`; None when there is none in time or the queue is closed.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while (piece := self._begin_piece(max_bytes)) is None and not self._closed:
                left_s = None if end_s is None else end_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return None
                self._changed.wait(left_s)
            return piece

    def finish(self, piece: Piece, fault: str | None = None) -> None:
        """A piece's copy has ended, with `fault` where it failed; its bytes are not touched any more."""
        with self._changed:
            job = self._jobs.get(piece.job_id)
            if job is None:  # closed meanwhile
                assert self._closed, f"a piece of job {piece.job_id}, which has been answered"
                return
            assert job.num_running > 0, f"job {piece.job_id} has no piece running"
            job.num_running -= 1
            if fault is not None:
                self._give_up(job, Outcome.FAILED, fault)
                return
            job.num_copied += len(piece.gpu_blocks)
            if job.is_late(self._clock()):
                self._time_out(job)
            elif job.given_up is not None:
                self._give_up(job, job.given_up, job.detail)
            elif job.num_copied == job.num_blocks:
                self._answer(job, Outcome.DONE)

    def fail(self, piece: Piece, fault: str) -> None:
        """A piece was refused, and part of it may be running: nothing more of its job begins, nor is it promised."""
        with self._changed:
            if (job := self._jobs.get(piece.job_id)) is not None:
                self._give_up(job, Outcome.FAILED, fault)

    def fault_of(self, job_ids: Collection[JobId]) -> str:
        """Why one of these is given up, whether answered by now or not; "" when none is."""
        with self._changed:
            given_up = [job.detail for i, job in self._jobs.items() if i in job_ids and job.given_up is not None]
            failed = [a.detail for a in self._answers if a.job_id in job_ids and a.outcome is not Outcome.DONE]
            return next(iter(given_up + failed), "")

    def promise(self, max_blocks: int, never: Collection[JobId] = ()) -> list[JobId]:
        """Loads of which nothing is left behind the next `max_blocks` to be copied; not late from now on.

        Args:
            never: loads that are not promised, and keep their deadline.
        """
        promised = []
        with self._changed:
            for job in self._jobs.values():
                if job.order.direction is not Direction.LOAD:
                    continue
                max_blocks -= job.num_blocks - job.num_copied
                if max_blocks < 0:
                    break
                if job.given_up is None and not job.is_promised and job.order.job_id not in never:
                    job.is_promised = True
                    promised.append(job.order.job_id)
        return promised

    def has_waiting(self, job_ids: Collection[JobId]) -> bool:
        """Whether any of these has blocks that have not begun."""
        with self._changed:
            return any(job_id in waiting for waiting in self._waiting.values() for job_id in job_ids)

    def answers(self) -> list[JobResult]:
        """What has ended since the last call, deadlines that passed meanwhile included."""
        with self._changed:
            now_s = self._clock()
            for job in [job for job in self._jobs.values() if job.is_late(now_s)]:
                self._time_out(job)
            answers, self._answers = self._answers, []
            return answers

    def close(self) -> None:
        """Drops every order and every answer; `take` returns None from now on. May be called again."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._answers.clear()
            for waiting in self._waiting.values():
                waiting.clear()
            self._changed.notify_all()

    def _begin_piece(self, max_bytes: int) -> Piece | None:
        now_s = self._clock()
        for waiting in (self._waiting[Direction.LOAD], self._waiting[Direction.STORE]):
            while waiting:
                job = next(iter(waiting.values()))
                if job.is_late(now_s):
                    self._time_out(job)
                    continue
                begin = job.num_begun
                end = min(job.num_blocks, begin + max(1, max_bytes // self._block_bytes))
                job.num_begun = end
                job.num_running += 1
                if end == job.num_blocks:
                    del waiting[job.order.job_id]
                order = job.order
                return Piece(order.job_id, order.direction, order.gpu_blocks[begin:end], order.slots[begin:end])
        return None

    def _time_out(self, job: _Job) -> None:
        detail = f"{job.order.deadline_s:g} s passed before all {job.num_blocks} blocks were copied"
        self._give_up(job, Outcome.TIMED_OUT, detail)

    def _give_up(self, job: _Job, outcome: Outcome, detail: str) -> None:
        """Drops what has not begun. The answer waits for what is running and gives the first reason."""
        self._waiting[job.order.direction].pop(job.order.job_id, None)
        if job.given_up is None:
            job.given_up, job.detail = outcome, detail
        if job.num_running == 0:
            self._answer(job, job.given_up)

    def _answer(self, job: _Job, outcome: Outcome) -> None:
        order = job.order
        del self._jobs[order.job_id]
        self._answered.append(order.job_id)
        self._answered_ids.add(order.job_id)
        if len(self._answered) > REMEMBERED_JOBS:
            self._answered_ids.remove(self._answered.popleft())
        self._answers.append(
            JobResult(
                job_id=order.job_id,
                direction=order.direction,
                outcome=outcome,
                seconds=self._clock() - job.submitted_s,
                num_bytes=job.num_copied * self._block_bytes,
                detail=job.detail,
            )
        )


def _order_fault(order: CopyOrder, num_blocks: int, num_slots: int) -> str | None:
    """Why the order's indices cannot be copied, or None."""
    if order.gpu_blocks.ndim != 1 or order.gpu_blocks.shape != order.slots.shape:
        return f"GPU blocks {order.gpu_blocks.shape} and slots {order.slots.shape} do not pair"
    if len(order.slots) == 0:
        return None
    written = "slot" if order.direction is Direction.STORE else "GPU block"
    for what, ids, bound in (("GPU block", order.gpu_blocks, num_blocks), ("slot", order.slots, num_slots)):
        if ids.dtype.kind not in "iu":
            return f"{what} ids are {ids.dtype}, not integers"
        if ids.min() < 0 or ids.max() >= bound:
            wrong = int(ids[(ids < 0) | (ids >= bound)][0])
            return f"{what} {wrong} is outside 0..{bound - 1}"
        if what == written and len(np.unique(ids)) < len(ids):
            return f"a {what} is written twice"
    return None
