"""A lane over a stream that runs only when told."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from kvortex.messages import CopyOrder, IntArray, JobResult
from kvortex.transfer.lane import Lane, LaneBounds
from kvortex.transfer.queue import OrderQueue, Piece
from tests.fakes.clock import FakeClock
from tests.unit.transfer.builders import LOAD, STORE, order, wait_until

BLOCK = 100


class FakeFence:
    def is_reached(self) -> bool:
        return False


class FakeStream:
    """A `StreamMover`: enqueued pieces run one at a time, by `run`."""

    def __init__(self) -> None:
        self.enqueued: list[tuple[str, object]] = []
        self.enqueued_by: list[str] = []
        self.num_run = 0
        self.faults: dict[int, str | Exception] = {}
        self.is_dead = False
        self.unpinned_gate, self.unpinned_begun = threading.Event(), threading.Event()
        self.threads: set[str] = set()
        self._changed = threading.Condition()

    def enter_thread(self) -> None:
        self.threads.add(threading.current_thread().name)

    def wait_for(self, fence: FakeFence) -> None:
        self.enqueued.append(("fence", fence))

    def enqueue(self, piece: Piece, *, pinned: bool) -> None:
        if not pinned:
            self.unpinned_begun.set()
            assert self.unpinned_gate.wait(60)
        blocks = piece.gpu_blocks.tolist()
        self.enqueued.append(("copy" if pinned else "copy unpinned", blocks))
        self.enqueued_by.append(threading.current_thread().name)
        for block in blocks:
            if (fault := self.faults.get(block)) is not None:
                raise fault if isinstance(fault, Exception) else RuntimeError(fault)

    def mark(self) -> FakeEnd:
        if self.is_dead:
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        return FakeEnd(self, len(self.enqueued))

    def run(self, num_entries: int = 1_000_000) -> None:
        with self._changed:
            self.num_run = min(self.num_run + num_entries, len(self.enqueued) if num_entries < 1_000_000 else 1_000_000)
            self._changed.notify_all()

    def wait_run(self, num_entries: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_run >= num_entries, 60)

    @property
    def copied(self) -> list[int]:
        return [block for what, blocks in self.enqueued if what != "fence" for block in blocks]  # type: ignore[attr-defined]


class FakeEnd:
    def __init__(self, stream: FakeStream, num_entries: int) -> None:
        self._stream, self._num_entries = stream, num_entries

    def is_reached(self) -> bool:
        if self._stream.is_dead:
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        return self._stream.num_run >= self._num_entries

    def wait(self) -> None:
        self._stream.wait_run(self._num_entries)


class FakePinning:
    def __init__(self, pinned_slots: int = 1000, *, is_pinning: bool = False) -> None:
        self.pinned_slots, self.is_pinning = pinned_slots, is_pinning
        self.refusal = ""

    def is_pinned(self, slots: IntArray) -> bool:
        return int(slots.max()) < self.pinned_slots


class Bench:
    """A lane of single-block pieces, two of them ahead, unless told otherwise."""

    def __init__(
        self,
        *,
        ahead: int = 2,
        piece: int = 1,
        inline_pieces: int = 1000,
        patience_s: float = 0.0,
        slab: FakePinning | None = None,
    ) -> None:
        self.others_turn = self.launching = False
        self.clock = FakeClock()
        self.stream = FakeStream()
        self.slab = slab or FakePinning()
        queue = OrderQueue(1000, 1000, BLOCK, self.clock)
        bounds = LaneBounds(piece * BLOCK, ahead * BLOCK, inline_pieces, bytes_per_s=BLOCK, patience_s=patience_s)
        self.lane = Lane(
            "test",
            queue,
            self.stream,
            self.slab,
            bounds,
            BLOCK,
            self.clock,
            must_wait=lambda: self.others_turn,
            is_launching=lambda: self.launching,
        )
        self.fence = FakeFence()
        self.num_collects = 0

    def add(self, *orders: CopyOrder) -> None:
        self.lane.add(orders, self.fence)

    def collect(self, num_answers: int) -> list[JobResult]:
        answers: list[JobResult] = []

        def have_come() -> bool:
            self.num_collects += 1
            answers.extend(self.lane.collect())
            return len(answers) >= num_answers

        wait_until(have_come)
        return answers

    def end(self) -> None:
        self.stream.unpinned_gate.set()
        self.stream.run()
        assert self.lane.close(time.monotonic() + 60)


def blocks(job_id: int, first: int, count: int, deadline_s: float = 60.0) -> CopyOrder:
    """Those of a load that a request waits for."""
    return order(job_id, LOAD, [(first + i, first + i) for i in range(count)], deadline_s)


def with_time(kind: str, job_id: int, first: int, count: int) -> CopyOrder:
    """A copy that no request waits for."""
    awaited = blocks(job_id, first, count)
    return replace(awaited, direction=STORE) if kind == "store" else replace(awaited, is_prefetch=True)


def same(blocks: list[int]) -> list[tuple[int, int]]:
    """Each block in the slot of its own number."""
    return [(block, block) for block in blocks]
