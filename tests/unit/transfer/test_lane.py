"""A lane's promises, over a stream that runs only when told: order, bounds, deadlines, faults, pinning, the end."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from kvortex.messages import CopyOrder, IntArray, JobResult, Outcome
from kvortex.transfer import lane as lane_module
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


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> object:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvortex-")]


def test_an_order_waits_for_its_fence_once_and_only_as_much_as_fits_is_enqueued() -> None:
    bench = Bench(ahead=2)
    bench.add(blocks(1, 0, 5))
    assert bench.stream.enqueued == [("fence", bench.fence), ("copy", [0]), ("copy", [1])]
    assert bench.lane.collect() == []
    bench.end()


def test_what_is_more_than_fits_is_enqueued_without_anyone_looking() -> None:
    bench = Bench(ahead=2)
    bench.add(blocks(1, 0, 6), blocks(2, 10, 2))
    bench.stream.run()
    wait_until(lambda: bench.stream.copied == [0, 1, 2, 3, 4, 5, 10, 11])
    answers = bench.collect(2)
    assert [(a.job_id, a.outcome, a.num_bytes) for a in answers] == [
        (1, Outcome.DONE, 6 * BLOCK),
        (2, Outcome.DONE, 2 * BLOCK),
    ]
    bench.end()


def test_an_order_is_answered_when_its_last_copy_has_ended_and_not_before() -> None:
    bench = Bench(ahead=10)
    bench.add(blocks(1, 0, 2), blocks(2, 5, 1))
    bench.stream.run(2)
    assert bench.lane.collect() == []
    bench.stream.run(1)
    assert [answer.job_id for answer in bench.lane.collect()] == [1]
    bench.stream.run(2)
    assert [answer.job_id for answer in bench.lane.collect()] == [2]
    bench.end()


def test_whoever_adds_an_order_is_not_kept_by_copies_that_end_as_fast_as_they_are_enqueued() -> None:
    bench = Bench(ahead=10, inline_pieces=4)
    bench.stream.run()
    bench.add(blocks(1, 0, 500))
    assert [answer.job_id for answer in bench.collect(1)] == [1]
    assert bench.stream.copied == list(range(500))
    by_this_thread = bench.stream.enqueued_by.count(threading.current_thread().name)
    assert by_this_thread <= 4 * (1 + bench.num_collects)
    assert by_this_thread < 500
    bench.end()


def test_a_lane_that_is_not_inline_leaves_enqueueing_to_its_thread() -> None:
    bench = Bench(ahead=3, inline_pieces=0)
    bench.add(blocks(1, 0, 5))
    wait_until(lambda: bench.stream.copied == [0, 1, 2])
    bench.stream.run()
    assert [answer.job_id for answer in bench.collect(1)] == [1]
    assert bench.stream.threads == {"kvortex-test"}
    bench.end()


KINDS = ["store", "prefetch"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_time_is_enqueued_by_the_lanes_thread(kind: str) -> None:
    bench = Bench(ahead=3)
    bench.add(with_time(kind, 1, 0, 5))
    wait_until(lambda: bench.stream.copied == [0, 1, 2])
    bench.stream.run()
    assert [answer.job_id for answer in bench.collect(1)] == [1]
    assert set(bench.stream.enqueued_by) == {"kvortex-test"}
    bench.end()


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_time_begins_when_the_step_is_launched(kind: str) -> None:
    bench = Bench(ahead=3)
    bench.launching = True
    bench.add(with_time(kind, 1, 0, 5))
    threading.Event().wait(0.05)
    assert bench.stream.copied == []
    bench.launching = False
    bench.lane.collect()
    wait_until(lambda: bench.stream.copied == [0, 1, 2])
    bench.launching = True
    bench.stream.run(4)
    threading.Event().wait(0.05)
    assert bench.stream.copied == [0, 1, 2]
    bench.launching = False
    bench.stream.run()
    assert [answer.job_id for answer in bench.collect(1)] == [1]
    bench.end()


def test_a_load_that_a_request_waits_for_takes_prefetches_before_it_along() -> None:
    bench = Bench(ahead=10)
    bench.launching = True
    bench.add(with_time("prefetch", 1, 0, 2))
    assert bench.stream.copied == []
    bench.add(blocks(2, 10, 2))
    wait_until(lambda: bench.stream.copied == [0, 1, 10, 11])
    bench.stream.run()
    assert [answer.job_id for answer in bench.collect(2)] == [1, 2]
    bench.add(with_time("prefetch", 3, 20, 2))
    assert bench.lane.collect() == []
    assert 20 not in bench.stream.copied, "nobody waits for anything any more"
    bench.end()


def test_the_lanes_thread_looks_what_may_begin_after_its_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(inline_pieces=0, patience_s=7.0)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        bench.launching = len(slept) == 1  # whoever called the thread goes on with a step

    monkeypatch.setattr(lane_module.time, "sleep", sleep)
    bench.add(with_time("store", 1, 0, 1))
    wait_until(lambda: slept == [7.0])
    threading.Event().wait(0.05)
    assert bench.stream.copied == []
    bench.lane.collect()
    wait_until(lambda: bench.stream.copied == [0])
    bench.lane.collect()
    threading.Event().wait(0.05)
    assert slept == [7.0, 7.0], "nothing is left to enqueue"
    bench.add(blocks(2, 10, 5))
    bench.stream.run()
    assert sorted(answer.job_id for answer in bench.collect(2)) == [1, 2]
    assert slept == [7.0, 7.0], "a request waits"
    monkeypatch.undo()
    bench.end()


@pytest.mark.parametrize("inline_pieces", [0, 1000])
def test_a_lane_that_must_wait_begins_nothing_and_ends_what_it_began(inline_pieces: int) -> None:
    bench = Bench(ahead=2, inline_pieces=inline_pieces)
    bench.add(blocks(1, 0, 2))
    wait_until(lambda: bench.stream.copied == [0, 1])
    bench.others_turn = True
    bench.add(blocks(2, 10, 3))
    bench.stream.run(3)
    assert [answer.job_id for answer in bench.collect(1)] == [1]
    threading.Event().wait(0.05)
    assert bench.stream.copied == [0, 1]
    bench.others_turn = False
    bench.stream.run()
    assert [answer.job_id for answer in bench.collect(1)] == [2]
    assert bench.stream.copied == [0, 1, 10, 11, 12]
    bench.end()


def test_what_is_not_enqueued_by_its_deadline_is_dropped_and_what_is_keeps_its_answer() -> None:
    bench = Bench(ahead=2)
    bench.add(blocks(1, 0, 2, deadline_s=5), blocks(2, 10, 2, deadline_s=5))
    bench.clock.advance(5)
    (dropped,) = bench.lane.collect()
    assert (dropped.job_id, dropped.outcome, dropped.num_bytes) == (2, Outcome.TIMED_OUT, 0)
    assert bench.lane.collect() == [], "two copies of order 1 are on the stream"
    bench.stream.run()
    (late,) = bench.collect(1)
    assert (late.job_id, late.outcome, late.num_bytes) == (1, Outcome.TIMED_OUT, 2 * BLOCK)
    assert bench.stream.copied == [0, 1]
    bench.end()


def test_a_refused_copy_fails_its_order_with_the_drivers_words_and_no_other() -> None:
    bench = Bench(ahead=100)
    bench.stream.faults[2] = "CUDA_ERROR_INVALID_VALUE (1) from cuMemcpyBatchAsync"
    bench.add(blocks(1, 0, 5), blocks(2, 10, 1))
    assert bench.lane.collect() == [], "copies of both are still under way"
    bench.stream.run()
    failed, done = bench.collect(2)
    assert (failed.job_id, failed.outcome) == (1, Outcome.FAILED)
    assert failed.detail == "CUDA_ERROR_INVALID_VALUE (1) from cuMemcpyBatchAsync"
    assert (done.job_id, done.outcome) == (2, Outcome.DONE)
    assert bench.stream.copied == [0, 1, 2, 10], "what follows the refused copy is not tried"
    bench.end()


def test_a_failed_order_is_not_answered_while_its_earlier_copies_run() -> None:
    bench = Bench(ahead=100)
    bench.stream.faults[1] = "refused"
    bench.add(blocks(1, 0, 2))
    bench.stream.run(2)  # the fence and block 0; of block 1 something may be under way
    assert bench.lane.collect() == []
    bench.stream.run(1)
    assert [answer.outcome for answer in bench.collect(1)] == [Outcome.FAILED]
    bench.end()


def test_a_device_that_has_failed_answers_everything_with_its_error() -> None:
    bench = Bench(ahead=2)
    bench.add(blocks(1, 0, 1), blocks(2, 10, 5))
    bench.stream.is_dead = True
    answers = bench.collect(2)
    assert {answer.outcome for answer in answers} == {Outcome.FAILED}
    assert {answer.detail for answer in answers} == {"CUDA_ERROR_ILLEGAL_ADDRESS"}
    bench.end()


def test_a_device_that_failed_before_an_order_came_answers_it_too() -> None:
    bench = Bench(ahead=10)
    bench.stream.is_dead = True
    bench.add(blocks(1, 0, 3))
    (answer,) = bench.collect(1)
    assert (answer.outcome, answer.detail) == (Outcome.FAILED, "CUDA_ERROR_ILLEGAL_ADDRESS")
    bench.end()


def test_an_order_on_slots_that_are_being_pinned_waits_and_those_behind_it_too() -> None:
    slab = FakePinning(2, is_pinning=True)
    bench = Bench(ahead=100, slab=slab)
    bench.add(blocks(1, 0, 3), blocks(2, 0, 1))
    assert bench.stream.copied == [0, 1]
    bench.lane.collect()
    assert bench.stream.copied == [0, 1]
    slab.pinned_slots = 3
    bench.lane.collect()
    assert bench.stream.copied == [0, 1, 2, 0]
    assert all(what in ("fence", "copy") for what, _ in bench.stream.enqueued)
    bench.end()


def test_a_deadline_that_passes_while_slots_are_pinned_is_an_answer_without_a_copy() -> None:
    bench = Bench(ahead=100, slab=FakePinning(0, is_pinning=True))
    bench.add(blocks(1, 0, 3, deadline_s=5), blocks(2, 10, 1, deadline_s=50))
    bench.clock.advance(5)
    (answer,) = bench.collect(1)
    assert (answer.job_id, answer.outcome, answer.num_bytes) == (1, Outcome.TIMED_OUT, 0)
    assert "5 s" in answer.detail
    assert bench.stream.copied == []
    bench.end()


def test_slots_that_will_never_be_pinned_are_copied_by_the_lanes_thread_alone_and_in_order() -> None:
    bench = Bench(ahead=100, slab=FakePinning(2, is_pinning=False))
    bench.add(blocks(1, 0, 4), blocks(2, 1, 1))
    assert bench.stream.copied == [0, 1], "adding does not wait for a copy that blocks"
    assert bench.lane.collect() == []
    bench.stream.unpinned_gate.set()
    bench.stream.run()
    assert [(a.job_id, a.outcome) for a in bench.collect(2)] == [(1, Outcome.DONE), (2, Outcome.DONE)]
    assert [entry for entry in bench.stream.enqueued if entry[0] != "fence"] == [
        ("copy", [0]),
        ("copy", [1]),
        ("copy unpinned", [2]),
        ("copy unpinned", [3]),
        ("copy", [1]),
    ]
    bench.end()


def test_nothing_passes_a_piece_that_the_lanes_thread_is_still_enqueueing() -> None:
    bench = Bench(ahead=100, slab=FakePinning(2, is_pinning=False))
    bench.add(blocks(1, 5, 1))
    assert bench.stream.unpinned_begun.wait(60)
    bench.add(blocks(2, 0, 1))
    assert bench.lane.collect() == []
    assert bench.stream.copied == []
    bench.stream.unpinned_gate.set()
    bench.stream.run()
    assert [answer.job_id for answer in bench.collect(2)] == [1, 2]
    assert bench.stream.copied == [5, 0]
    bench.end()


def test_close_drops_what_waits_and_is_not_done_before_the_stream_is() -> None:
    bench = Bench(ahead=2)
    bench.add(blocks(1, 0, 10))
    assert bench.lane.close(end_s=0.0) is False
    assert bench.lane.collect() == []
    bench.stream.run()
    assert bench.lane.close(time.monotonic() + 60) is True
    assert bench.stream.copied == [0, 1]
    assert bench.lane.collect() == []


def test_close_waits_for_a_stream_that_its_thread_does_not_watch() -> None:
    bench = Bench(ahead=10)
    bench.add(blocks(1, 0, 1))
    assert bench.lane.close(time.monotonic() + 0.1) is False
    bench.end()


def test_close_waits_for_a_copy_that_blocks_the_lanes_thread() -> None:
    bench = Bench(slab=FakePinning(0))
    bench.add(blocks(1, 0, 2))
    assert bench.lane.close(end_s=0.0) is False
    bench.end()
    assert bench.stream.copied in ([], [0])


def test_a_wrong_or_empty_order_is_answered_at_once() -> None:
    bench = Bench()
    bench.add(order(1, STORE, [(5000, 0)]), order(2, STORE, []))
    answers = bench.collect(2)
    assert [(a.job_id, a.outcome) for a in answers] == [(1, Outcome.FAILED), (2, Outcome.DONE)]
    assert bench.stream.enqueued == []
    bench.end()


@pytest.mark.parametrize("inline_pieces", [0, 1, 1000])
def test_many_orders_over_a_stream_that_runs_by_itself_are_each_answered_once(inline_pieces: int) -> None:
    bench = Bench(ahead=7, piece=3, inline_pieces=inline_pieces)
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.0005):
            bench.stream.run(3)

    thread = threading.Thread(target=run)
    thread.start()
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 9, 120)
    answers: list[JobResult] = []
    for job_id, count in enumerate(sizes.tolist()):
        bench.add(blocks(job_id, 8 * job_id, count))
        answers += bench.lane.collect()
    answers += bench.collect(len(sizes) - len(answers))
    assert [answer.job_id for answer in answers] == list(range(len(sizes)))
    assert all(answer.outcome is Outcome.DONE for answer in answers)
    assert bench.stream.copied == [8 * job + i for job, count in enumerate(sizes.tolist()) for i in range(count)]
    stop.set()
    thread.join()
    bench.end()


def same(blocks: list[int]) -> list[tuple[int, int]]:
    """Each block in the slot of its own number."""
    return [(block, block) for block in blocks]


def test_loads_that_end_within_the_window_are_promised_once_in_order():
    """The bench's link moves a block a second."""
    bench = Bench()
    bench.add(order(1, LOAD, same([1, 2, 3])), order(2, LOAD, same([4, 5])), order(3, LOAD, same([6])))
    assert bench.lane.promise(2.9) == []
    assert bench.lane.promise(5.0) == [1, 2]
    assert bench.lane.promise(5.0) == []
    assert bench.lane.promise(6.0) == [3]
    bench.end()


def test_stores_are_never_promised():
    bench = Bench()
    bench.add(order(1, STORE, same([1])))
    assert bench.lane.promise(100.0) == []
    bench.end()


def test_a_promised_load_has_no_deadline_any_more():
    bench = Bench()
    bench.add(order(1, LOAD, same([1, 2, 3]), deadline_s=10.0), order(2, LOAD, same([4, 5, 6]), deadline_s=10.0))
    assert bench.lane.promise(3.0) == [1]
    bench.clock.advance(60.0)
    bench.stream.run()
    answers = {answer.job_id: answer.outcome for answer in bench.collect(2)}
    assert answers == {1: Outcome.DONE, 2: Outcome.TIMED_OUT}
    bench.end()


def test_the_end_of_a_promised_load_is_behind_all_of_its_pieces_even_those_that_did_not_fit_before():
    bench = Bench(ahead=2)
    bench.add(order(1, LOAD, same([1, 2, 3, 4, 5])), order(2, LOAD, same([6, 7])))
    assert bench.stream.copied == [1, 2]
    assert bench.lane.promise(5.0) == [1]
    end = bench.lane.end_of({1})
    assert bench.stream.copied == [1, 2, 3, 4, 5], "and nothing of the other load"
    assert end is not None
    assert not end.is_reached()
    bench.stream.run(len(bench.stream.enqueued))
    assert end.is_reached()
    bench.end()


def test_a_promised_load_that_has_ended_holds_nobody():
    bench = Bench(ahead=10)
    bench.add(order(1, LOAD, same([1, 2])))
    assert bench.lane.promise(5.0) == [1]
    bench.stream.run()
    assert bench.lane.end_of({1}) is None
    bench.end()


def test_nothing_is_promised_where_memory_could_not_be_pinned():
    bench = Bench()
    bench.slab.refusal = "no more"
    bench.add(order(1, LOAD, same([1])))
    assert bench.lane.promise(100.0) == []
    bench.end()


def test_a_load_whose_copy_was_refused_is_not_promised_while_its_other_copies_run() -> None:
    bench = Bench(ahead=10)
    bench.stream.faults[3] = "CUDA_ERROR_OUT_OF_MEMORY"
    bench.add(order(1, LOAD, same([1, 2, 3])), order(2, LOAD, same([4])))
    assert bench.lane.collect() == [], "the refused copy's stream has not got there"
    assert bench.lane.promise(1000.0) == [2]
    bench.stream.run()
    assert [(a.job_id, a.outcome) for a in bench.collect(2)] == [(1, Outcome.FAILED), (2, Outcome.DONE)]
    bench.end()


@pytest.mark.parametrize("runs", [False, True])
def test_kernels_do_not_follow_a_promised_load_whose_copy_was_refused(runs: bool) -> None:
    bench = Bench(ahead=2)
    bench.stream.faults[4] = "CUDA_ERROR_OUT_OF_MEMORY"
    bench.add(order(1, LOAD, same([1, 2, 3, 4])))
    assert bench.lane.promise(1000.0) == [1]
    if runs:
        bench.stream.run()
    with pytest.raises(RuntimeError, match="a promised load failed: CUDA_ERROR_OUT_OF_MEMORY"):
        bench.lane.end_of({1})
    bench.end()


@pytest.mark.parametrize("inline_pieces", [0, 1000])
def test_whatever_enqueueing_raises_is_the_orders_answer_and_the_lane_goes_on(inline_pieces: int) -> None:
    """A kernel's compiler raises what it likes: OSError of a full disk, its own errors."""
    bench = Bench(inline_pieces=inline_pieces)
    bench.stream.faults[1] = OSError(28, "No space left on device")
    bench.add(order(1, LOAD, same([1])), order(2, LOAD, same([2])))
    bench.stream.run()
    failed, done = bench.collect(2)
    assert (failed.job_id, failed.outcome, done.job_id, done.outcome) == (1, Outcome.FAILED, 2, Outcome.DONE)
    assert failed.detail == "OSError: [Errno 28] No space left on device"
    bench.end()


def test_what_is_not_to_be_promised_keeps_its_deadline() -> None:
    bench = Bench()
    bench.add(order(1, LOAD, same([1, 2, 3]), deadline_s=10.0), order(2, LOAD, same([4]), deadline_s=10.0))
    assert bench.lane.promise(100.0, {1}) == [2]
    bench.clock.advance(60.0)
    bench.stream.run()
    answers = {answer.job_id: answer.outcome for answer in bench.collect(2)}
    assert answers == {1: Outcome.TIMED_OUT, 2: Outcome.DONE}
    bench.end()
