"""The CPU engine's promises when a copy is slow, fails or never ends."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from kvortex.messages import Outcome
from kvortex.transfer.cpu import CpuCopyEngine, HostMover
from kvortex.transfer.slab import HostSlab
from tests.fakes.clock import FakeClock
from tests.fakes.copy_engines import FailingMover, GatedMover, HeldEngine
from tests.unit.transfer.builders import LOAD, STORE, order, packed, wait_answers

FRAGMENT = 64


class Bench:
    """An engine whose pieces are single blocks and pass a gate; block b holds b + 1, every slot holds 100."""

    def __init__(self, num_threads: int = 1) -> None:
        self.layout = packed(16, [FRAGMENT])
        self.layout.regions[0].copy_(torch.arange(1, 17, dtype=torch.uint8)[:, None])
        self.slab = HostSlab(16, FRAGMENT)
        self.slab.tensor.fill_(100)
        self.clock = FakeClock()
        self.gate = GatedMover(HostMover(self.layout, self.slab))
        self.engine = CpuCopyEngine(
            self.layout, self.slab, num_threads, piece_bytes=FRAGMENT, mover=self.gate, clock=self.clock
        )

    def slot_values(self) -> dict[int, int]:
        """First byte of each slot that was written."""
        assert (self.slab.tensor == self.slab.tensor[:, :1]).all(), "a slot is half written"
        return {slot: value for slot, value in enumerate(self.slab.tensor[:, 0].tolist()) if value != 100}

    def end(self) -> None:
        self.gate.open()
        assert self.engine.close(30)


def copy_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvortex-copy")]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> object:
    assert copy_threads() == []
    yield
    assert copy_threads() == []


def test_loads_overtake_queued_stores_but_not_each_other() -> None:
    bench = Bench()
    bench.engine.submit([order(1, STORE, [(0, 0), (1, 1), (2, 2)])])
    bench.gate.wait_begun(1)
    bench.engine.submit([order(2, LOAD, [(5, 5), (6, 6)]), order(3, STORE, [(3, 3)]), order(4, LOAD, [(7, 7)])])
    bench.gate.open()
    answers = wait_answers(bench.engine, 4)
    assert [blocks[0] for _, blocks, _ in bench.gate.begun] == [0, 5, 6, 7, 1, 2, 3]
    assert [answer.job_id for answer in answers] == [2, 4, 1, 3]
    bench.end()


def test_poll_and_submit_do_not_wait_for_a_copy() -> None:
    bench = Bench()
    bench.engine.submit([order(1, STORE, [(0, 0)])])
    bench.gate.wait_begun(1)
    assert bench.engine.poll() == []
    bench.engine.submit([order(2, STORE, [(1, 1)])])
    assert bench.engine.poll() == []
    bench.end()


def test_a_late_order_keeps_its_answer_until_nothing_of_it_is_touched_any_more() -> None:
    bench = Bench()
    bench.engine.submit([order(1, STORE, [(0, 0), (1, 1), (2, 2)], deadline_s=5)])
    bench.gate.let_through(1)
    bench.gate.wait_begun(2)
    bench.clock.advance(6)
    assert bench.engine.poll() == [], "a piece is still running"
    bench.gate.open()
    (answer,) = wait_answers(bench.engine, 1)
    assert (answer.outcome, answer.num_bytes) == (Outcome.TIMED_OUT, 2 * FRAGMENT)
    assert "5 s" in answer.detail
    assert bench.slot_values() == {0: 1, 1: 2}
    bench.slab.tensor.fill_(100)
    bench.engine.submit([order(2, STORE, [(9, 9)])])
    wait_answers(bench.engine, 1)
    assert bench.slot_values() == {9: 10}, "the dropped piece was never copied"
    assert len(bench.gate.begun) == 3
    bench.end()


def test_an_order_behind_a_copy_that_never_ends_is_answered_at_its_deadline() -> None:
    bench = Bench()
    bench.engine.submit([order(1, LOAD, [(0, 0)], deadline_s=5), order(2, LOAD, [(1, 1)], deadline_s=5)])
    bench.gate.wait_begun(1)
    bench.clock.advance(5)
    (answer,) = bench.engine.poll()
    assert (answer.job_id, answer.outcome, answer.num_bytes) == (2, Outcome.TIMED_OUT, 0)
    bench.end()
    assert bench.layout.regions[0][1, 0] == 2, "block 1 was not written"


def test_with_several_threads_a_stuck_copy_does_not_hold_up_the_others() -> None:
    layout = packed(16, [FRAGMENT])
    slab = HostSlab(16, FRAGMENT)
    gate = GatedMover(HostMover(layout, slab), held_blocks=[0])
    engine = CpuCopyEngine(layout, slab, 2, mover=gate)
    engine.submit([order(1, STORE, [(0, 0)]), order(2, STORE, [(1, 1)]), order(3, LOAD, [(2, 2)])])
    assert {answer.job_id for answer in wait_answers(engine, 2)} == {2, 3}
    gate.open()
    assert [answer.outcome for answer in wait_answers(engine, 1)] == [Outcome.DONE]
    assert engine.close(30)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_an_exception_in_a_copy_fails_its_order_alone_with_its_text(num_threads: int) -> None:
    layout = packed(32, [FRAGMENT])
    slab = HostSlab(32, FRAGMENT)
    mover = FailingMover(HostMover(layout, slab), [5], RuntimeError("the bus is on fire"))
    engine = CpuCopyEngine(layout, slab, num_threads, piece_bytes=FRAGMENT, mover=mover)
    for round_ in range(5):
        engine.submit([order(10 * round_ + i, STORE, [(4 * i + j, 4 * i + j) for j in range(4)]) for i in range(8)])
        answers = {int(answer.job_id) - 10 * round_: answer for answer in wait_answers(engine, 8)}
        failed = answers.pop(1)
        assert (failed.outcome, failed.detail) == (Outcome.FAILED, "RuntimeError: the bus is on fire")
        assert {answer.outcome for answer in answers.values()} == {Outcome.DONE}
    assert len(copy_threads()) == num_threads
    assert engine.close(30)


def test_wrong_indices_are_a_failed_answer_and_the_engine_goes_on() -> None:
    bench = Bench()
    bench.gate.open()
    bench.engine.submit(
        [
            order(1, STORE, [(0, 0), (16, 1)]),
            order(2, LOAD, [(0, 16)]),
            order(3, LOAD, [(-1, 0)]),
            order(4, STORE, [(4, 4)]),
        ]
    )
    answers = {int(answer.job_id): answer for answer in wait_answers(bench.engine, 4)}
    assert [answers[i].outcome for i in (1, 2, 3)] == [Outcome.FAILED] * 3
    assert "GPU block 16 is outside 0..15" in answers[1].detail
    assert "slot 16 is outside 0..15" in answers[2].detail
    assert "GPU block -1 is outside 0..15" in answers[3].detail
    assert answers[4].outcome is Outcome.DONE
    assert bench.slot_values() == {4: 5}, "a wrong order copies nothing at all"
    bench.end()


def test_close_gives_up_what_waits_and_says_when_a_copy_still_runs() -> None:
    bench = Bench(num_threads=2)
    bench.engine.submit([order(1, STORE, [(0, 0), (1, 1), (2, 2)]), order(2, STORE, [(3, 3)])])
    bench.gate.wait_begun(2)
    assert bench.engine.close(0.01) is False
    assert bench.engine.poll() == []
    bench.gate.open()
    assert bench.engine.close(30) is True
    assert bench.engine.close(0) is True
    assert bench.engine.poll() == []
    assert bench.slot_values() == {0: 1, 1: 2}, "what had not begun is never copied"
    with pytest.raises(AssertionError, match="after close"):
        bench.engine.submit([order(3, STORE, [(0, 0)])])


def test_answers_not_fetched_before_close_are_discarded() -> None:
    bench = Bench()
    bench.gate.open()
    bench.engine.submit([order(1, STORE, [(0, 0)]), order(2, STORE, [(1, 1)])])
    bench.gate.wait_begun(2)
    assert bench.engine.close(30)
    assert bench.engine.poll() == []


def test_a_closed_engine_holds_neither_the_layout_nor_the_slab() -> None:
    layout = packed(4, [FRAGMENT])
    slab = HostSlab(4, FRAGMENT)
    storage = weakref.ref(layout.regions[0])
    engine = CpuCopyEngine(layout, slab, 2)
    engine.submit([order(1, STORE, [(0, 0)])])
    wait_answers(engine, 1)
    assert engine.close(30)
    del layout
    gc.collect()
    assert storage() is None
    assert engine.poll() == []


def test_a_job_submitted_again_is_our_bug() -> None:
    bench = Bench()
    bench.gate.open()
    bench.engine.submit([order(1, STORE, [(0, 0)])])
    wait_answers(bench.engine, 1)
    with pytest.raises(AssertionError, match="submitted before"):
        bench.engine.submit([order(1, STORE, [(0, 0)])])
    bench.end()


def test_the_number_of_threads_of_torch_is_left_alone() -> None:
    before = torch.get_num_threads()
    bench = Bench(num_threads=3)
    bench.gate.open()
    bench.engine.submit([order(1, STORE, [(0, 0)])])
    wait_answers(bench.engine, 1)
    assert torch.get_num_threads() == before
    bench.end()


def test_the_held_engine_is_worked_by_hand() -> None:
    layout = packed(8, [FRAGMENT])
    layout.regions[0].fill_(7)
    slab = HostSlab(8, FRAGMENT)
    engine = HeldEngine(layout, slab)
    engine.submit([order(i, STORE, [(i, i)]) for i in range(5)])
    assert engine.poll() == []
    assert engine.held == [0, 1, 2, 3, 4]
    engine.release(1)
    engine.fail(2, "told so")
    engine.time_out(3)
    engine.drop(4)
    engine.answer_again(1)
    answers = wait_answers(engine, 4)
    assert [(answer.job_id, answer.outcome) for answer in answers] == [
        (1, Outcome.DONE),
        (2, Outcome.FAILED),
        (3, Outcome.TIMED_OUT),
        (1, Outcome.DONE),
    ]
    assert answers[1].detail == "told so"
    assert slab.tensor[:, 0].tolist() == [0, 7, 0, 0, 0, 0, 0, 0]
    assert engine.held == [0]
    assert engine.close(0)
    assert engine.held == []
