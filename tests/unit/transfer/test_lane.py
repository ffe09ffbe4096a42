"""What a lane does, over a stream that runs only when told: order, bounds, deadlines, faults, pinning, the end."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from kvortex.messages import JobResult, Outcome
from kvortex.transfer import lane as lane_module
from tests.unit.transfer.builders import LOAD, STORE, order, wait_until
from tests.unit.transfer.lane_bench import BLOCK, Bench, FakePinning, blocks, same, with_time

pytestmark = pytest.mark.usefixtures("no_lane_is_left")


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
