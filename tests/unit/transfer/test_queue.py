"""The order queue: what is copied next, and that every order is answered once with the right outcome."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvortex.messages import CopyOrder, Direction, JobId, Outcome
from kvortex.transfer.queue import REMEMBERED_JOBS, OrderQueue, Piece
from tests.fakes.clock import FakeClock
from tests.unit.transfer.builders import LOAD, STORE, order

BLOCK = 100


def queue_of(clock: FakeClock | None = None, num_blocks: int = 64, num_slots: int = 64) -> OrderQueue:
    return OrderQueue(num_blocks, num_slots, BLOCK, FakeClock() if clock is None else clock)


def take(queue: OrderQueue, num_blocks: int = 1) -> Piece:
    piece = queue.take(num_blocks * BLOCK, timeout_s=0)
    assert piece is not None
    return piece


def pairs(*blocks: int) -> list[tuple[int, int]]:
    return [(block, block) for block in blocks]


def test_loads_are_handed_out_before_stores_and_each_kind_in_the_order_it_came() -> None:
    queue = queue_of()
    queue.add([order(1, STORE, pairs(1)), order(2, LOAD, pairs(2)), order(3, STORE, pairs(3))])
    queue.add([order(4, LOAD, pairs(4))])
    assert [take(queue).job_id for _ in range(4)] == [2, 4, 1, 3]


def test_a_load_overtakes_a_store_between_two_of_its_pieces() -> None:
    queue = queue_of()
    queue.add([order(1, STORE, pairs(1, 2, 3))])
    first = take(queue)
    queue.add([order(2, LOAD, pairs(5, 6))])
    assert [first.job_id, *(take(queue).job_id for _ in range(4))] == [1, 2, 2, 1, 1]


def test_pieces_cover_an_order_once_and_in_order_and_keep_within_their_bytes() -> None:
    queue = queue_of()
    ids = [(block, 63 - block) for block in range(10)]
    queue.add([order(1, STORE, ids)])
    pieces = [take(queue, 4) for _ in range(3)]
    assert [len(piece.slots) for piece in pieces] == [4, 4, 2]
    assert np.concatenate([p.gpu_blocks for p in pieces]).tolist() == [block for block, _ in ids]
    assert np.concatenate([p.slots for p in pieces]).tolist() == [slot for _, slot in ids]
    assert queue.take(BLOCK, timeout_s=0) is None


def test_a_block_larger_than_a_piece_is_a_piece_of_its_own() -> None:
    queue = queue_of()
    queue.add([order(1, LOAD, pairs(1, 2))])
    first = queue.take(BLOCK // 3, timeout_s=0)
    assert first is not None
    assert first.gpu_blocks.tolist() == [1]


def test_an_order_is_done_when_its_last_running_piece_has_ended_whichever_that_is() -> None:
    clock = FakeClock()
    queue = queue_of(clock)
    queue.add([order(1, LOAD, pairs(1, 2))])
    first, second = take(queue), take(queue)
    queue.finish(second)
    assert queue.answers() == []
    clock.advance(1.5)
    queue.finish(first)
    (answer,) = queue.answers()
    assert (answer.outcome, answer.num_bytes, answer.seconds, answer.detail) == (
        Outcome.DONE,
        2 * BLOCK,
        1.5,
        "",
    )
    assert queue.answers() == []


def test_an_empty_order_is_done_at_once() -> None:
    queue = queue_of()
    queue.add([order(1, STORE, [])])
    (answer,) = queue.answers()
    assert (answer.outcome, answer.num_bytes) == (Outcome.DONE, 0)


@pytest.mark.parametrize(
    ("direction", "blocks", "slots", "detail"),
    [
        (STORE, [1, 64], [0, 1], "GPU block 64 is outside 0..63"),
        (LOAD, [-1, 2], [0, 1], "GPU block -1 is outside 0..63"),
        (STORE, [1, 2], [0, 32], "slot 32 is outside 0..31"),
        (LOAD, [1, 2], [0, -5], "slot -5 is outside 0..31"),
        (LOAD, [1, 2], [0], "do not pair"),
        (STORE, [[1], [2]], [[0], [1]], "do not pair"),
        (STORE, [0.5], [0], "not integers"),
        (STORE, [1, 2], [7, 7], "slot is written twice"),
        (LOAD, [7, 7], [1, 2], "GPU block is written twice"),
    ],
)
def test_indices_that_cannot_be_copied_fail_their_order_and_say_which(
    direction: Direction, blocks: list[int], slots: list[int], detail: str
) -> None:
    queue = queue_of(num_slots=32)
    bad = CopyOrder(JobId(1), direction, np.array(blocks), np.array(slots), 60.0)
    queue.add([bad, order(2, direction, pairs(1))])
    (answer,) = queue.answers()
    assert (answer.job_id, answer.outcome, answer.num_bytes) == (1, Outcome.FAILED, 0)
    assert detail in answer.detail
    assert take(queue).job_id == 2


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_what_is_only_read_may_be_read_twice(direction: Direction) -> None:
    queue = queue_of()
    queue.add([order(1, direction, [(5, 1), (5, 2)] if direction is STORE else [(1, 5), (2, 5)])])
    assert len(take(queue, 2).slots) == 2


def test_a_waiting_order_is_timed_out_at_its_deadline_and_never_begun() -> None:
    clock = FakeClock()
    queue = queue_of(clock)
    queue.add([order(1, LOAD, pairs(1), deadline_s=5), order(2, LOAD, pairs(2), deadline_s=6)])
    clock.advance(4.9)
    assert queue.answers() == []
    clock.advance(0.2)
    (answer,) = queue.answers()
    assert (answer.job_id, answer.outcome, answer.num_bytes) == (1, Outcome.TIMED_OUT, 0)
    assert "5 s passed" in answer.detail
    assert take(queue).job_id == 2


def test_a_late_order_is_not_begun_even_when_nobody_polls() -> None:
    clock = FakeClock()
    queue = queue_of(clock)
    queue.add([order(1, LOAD, pairs(1), deadline_s=5), order(2, STORE, pairs(2))])
    clock.advance(5)
    assert take(queue).job_id == 2
    assert [answer.outcome for answer in queue.answers()] == [Outcome.TIMED_OUT]


def test_a_late_order_is_answered_only_when_its_running_pieces_have_ended() -> None:
    clock = FakeClock()
    queue = queue_of(clock)
    queue.add([order(1, STORE, pairs(1, 2, 3, 4), deadline_s=5)])
    running = [take(queue), take(queue)]
    clock.advance(6)
    assert queue.answers() == []
    assert queue.take(BLOCK, timeout_s=0) is None, "what had not begun is dropped"
    queue.finish(running[0])
    assert queue.answers() == []
    queue.finish(running[1])
    (answer,) = queue.answers()
    assert (answer.outcome, answer.num_bytes) == (Outcome.TIMED_OUT, 2 * BLOCK)


def test_an_order_whose_last_byte_came_after_the_deadline_is_timed_out_whether_polled_or_not() -> None:
    for polled in (False, True):
        clock = FakeClock()
        queue = queue_of(clock)
        queue.add([order(1, LOAD, pairs(1), deadline_s=5)])
        piece = take(queue)
        clock.advance(5)
        if polled:
            assert queue.answers() == []
        queue.finish(piece)
        assert [answer.outcome for answer in queue.answers()] == [Outcome.TIMED_OUT]


def test_a_failed_piece_drops_the_rest_and_the_first_reason_is_given() -> None:
    clock = FakeClock()
    queue = queue_of(clock)
    queue.add([order(1, LOAD, pairs(1, 2, 3, 4), deadline_s=5), order(2, LOAD, pairs(9))])
    first, second, third = take(queue), take(queue), take(queue)
    queue.finish(first, "the first reason")
    assert queue.answers() == []
    assert take(queue).job_id == 2
    queue.finish(second, "the second reason")
    clock.advance(6)
    queue.finish(third)
    (answer,) = queue.answers()
    assert (answer.outcome, answer.detail, answer.num_bytes) == (Outcome.FAILED, "the first reason", BLOCK)


def test_a_failed_order_is_answered_as_soon_as_its_last_running_piece_has_ended_well() -> None:
    queue = queue_of()
    queue.add([order(1, LOAD, pairs(1, 2, 3))])
    first, second = take(queue), take(queue)
    queue.finish(first, "bad")
    queue.finish(second)
    (answer,) = queue.answers()
    assert (answer.outcome, answer.detail, answer.num_bytes) == (Outcome.FAILED, "bad", BLOCK)


def test_a_job_submitted_again_is_our_bug_at_any_time_and_takes_nothing() -> None:
    queue = queue_of()
    queue.add([order(1, LOAD, pairs(1)), order(2, STORE, pairs(2))])
    again = [order(3, LOAD, pairs(3)), order(1, LOAD, pairs(4))]
    with pytest.raises(AssertionError, match="submitted before"):
        queue.add(again)
    piece = take(queue)
    with pytest.raises(AssertionError, match="submitted before"):
        queue.add(again)
    queue.finish(piece)
    with pytest.raises(AssertionError, match="submitted before"):
        queue.add(again)
    queue.answers()
    with pytest.raises(AssertionError, match="submitted before"):
        queue.add(again)
    with pytest.raises(AssertionError, match="twice"):
        queue.add([order(4, LOAD, pairs(4)), order(4, LOAD, pairs(4))])
    assert take(queue).job_id == 2
    assert queue.take(BLOCK, timeout_s=0) is None


@pytest.mark.parametrize("deadline_s", [float("inf"), float("nan")])
def test_an_order_without_a_deadline_is_our_bug(deadline_s: float) -> None:
    queue = queue_of()
    with pytest.raises(AssertionError, match="deadline"):
        queue.add([order(1, LOAD, pairs(1), deadline_s=deadline_s)])


def test_close_drops_everything_wakes_who_waits_and_tolerates_what_still_ran() -> None:
    queue = queue_of()
    queue.add([order(1, LOAD, pairs(1)), order(2, LOAD, pairs(2)), order(3, STORE, [])])
    running = [take(queue), take(queue)]
    woken: list[Piece | None] = []
    waiter = threading.Thread(target=lambda: woken.append(queue.take(BLOCK)))
    waiter.start()
    queue.close()
    queue.close()
    waiter.join(30)
    assert woken == [None]
    assert queue.answers() == []
    queue.finish(running[0])
    queue.finish(running[1], "bad")
    assert queue.answers() == []
    with pytest.raises(AssertionError, match="after close"):
        queue.add([order(4, LOAD, pairs(1))])


def test_take_waits_no_longer_than_told() -> None:
    queue = queue_of()
    assert queue.take(BLOCK, timeout_s=0.001) is None


def test_nothing_grows_with_the_number_of_orders() -> None:
    queue = queue_of()
    for job_id in range(20_000):
        queue.add([order(job_id, STORE if job_id % 3 else LOAD, pairs(job_id % 64), deadline_s=60)])
        queue.finish(take(queue), None if job_id % 5 else "bad")
        assert len(queue.answers()) == 1
    sizes = {
        name: len(value)
        for name, value in vars(queue).items()
        if isinstance(value, (dict, set, list)) or hasattr(value, "maxlen")
    }
    assert set(sizes) >= {"_jobs", "_answers", "_answered", "_answered_ids"}, "the names this test looks at"
    assert sizes.pop("_answered") == REMEMBERED_JOBS
    assert sizes.pop("_answered_ids") == REMEMBERED_JOBS
    assert not any(queue._waiting.values())
    assert sizes == {"_jobs": 0, "_waiting": 2, "_answers": 0}


class AnsweredOnce(RuleBasedStateMachine):
    """Any mix of orders, pieces, failures, deadlines and polls: one answer each, none while a piece runs."""

    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.queue = queue_of(self.clock)
        self.num_blocks: dict[int, int] = {}
        self.num_running: dict[int, int] = {}
        self.num_copied: dict[int, int] = {}
        self.failed: set[int] = set()
        self.answered: dict[int, Outcome] = {}

    @rule(
        direction=st.sampled_from(Direction),
        num_blocks=st.integers(0, 6),
        deadline_s=st.sampled_from([0.0, 3.0, 50.0]),
        bad=st.integers(0, 9).map(lambda n: n == 0),
    )
    def submit(self, direction: Direction, num_blocks: int, deadline_s: float, bad: bool) -> None:
        job_id = len(self.num_blocks)
        blocks = [*range(num_blocks), *([99] if bad else [])]
        self.num_blocks[job_id] = len(blocks)
        self.num_running[job_id] = self.num_copied[job_id] = 0
        if bad:
            self.failed.add(job_id)
        self.queue.add([order(job_id, direction, pairs(*blocks), deadline_s)])

    @rule(target=running, num_blocks=st.integers(1, 4))
    def begin(self, num_blocks: int) -> object:
        piece = self.queue.take(num_blocks * BLOCK, timeout_s=0)
        if piece is None:
            return multiple()
        assert piece.job_id not in self.answered
        assert piece.job_id not in self.failed
        self.num_running[piece.job_id] += 1
        return piece

    @rule(piece=consumes(running), fails=st.integers(0, 3).map(lambda n: n == 0))
    def end(self, piece: Piece, fails: bool) -> None:
        self.num_running[piece.job_id] -= 1
        if fails:
            self.failed.add(piece.job_id)
            self.queue.finish(piece, "bad")
        else:
            self.num_copied[piece.job_id] += len(piece.slots)
            self.queue.finish(piece)

    @rule(seconds=st.sampled_from([1.0, 2.5, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def poll(self) -> None:
        for answer in self.queue.answers():
            job_id = int(answer.job_id)
            assert job_id not in self.answered, f"job {job_id} answered twice"
            assert self.num_running[job_id] == 0, f"job {job_id} answered while a piece runs"
            assert answer.num_bytes == self.num_copied[job_id] * BLOCK
            complete = self.num_copied[job_id] == self.num_blocks[job_id]
            assert answer.outcome is not Outcome.DONE or complete
            assert answer.outcome is not Outcome.FAILED or job_id in self.failed
            assert (answer.detail == "") == (answer.outcome is Outcome.DONE)
            self.answered[job_id] = answer.outcome

    @invariant()
    def no_order_is_lost(self) -> None:
        unanswered = set(self.num_blocks) - set(self.answered)
        for job_id, job in self.queue._jobs.items():
            assert job.num_running == self.num_running[job_id]
            assert job.num_running > 0 or job.given_up is None, f"job {job_id} has ended and is not answered"
        kept = set(self.queue._jobs) | {answer.job_id for answer in self.queue._answers}
        assert kept == unanswered

    def teardown(self) -> None:
        self.clock.advance(1000)
        self.poll()
        waiting_for = [job for job in self.num_blocks if job not in self.answered]
        assert all(self.num_running[job] > 0 for job in waiting_for), waiting_for


TestAnsweredOnce = AnsweredOnce.TestCase
TestAnsweredOnce.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
