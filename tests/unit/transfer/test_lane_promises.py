"""What a lane promises of its loads, and that kernels run behind what was promised."""

from __future__ import annotations

import pytest

from kvortex.messages import Outcome
from tests.unit.transfer.builders import LOAD, STORE, order
from tests.unit.transfer.lane_bench import Bench, same

pytestmark = pytest.mark.usefixtures("no_lane_is_left")


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


def test_what_is_not_to_be_promised_keeps_its_deadline() -> None:
    bench = Bench()
    bench.add(order(1, LOAD, same([1, 2, 3]), deadline_s=10.0), order(2, LOAD, same([4]), deadline_s=10.0))
    assert bench.lane.promise(100.0, {1}) == [2]
    bench.clock.advance(60.0)
    bench.stream.run()
    answers = {answer.job_id: answer.outcome for answer in bench.collect(2)}
    assert answers == {1: Outcome.TIMED_OUT, 2: Outcome.DONE}
    bench.end()
