"""Who waits until the blocks that VRAM would take are safe, and for how long."""

from __future__ import annotations

from kvortex.cache.gate import MAX_WAIT_S, NOBODY, Gate, Line
from tests.fakes.clock import FakeClock


def unsafe() -> bool:
    return True


def safe() -> bool:
    return False


def test_nobody_waits_for_blocks_that_are_safe() -> None:
    gate = Gate(FakeClock())
    assert not gate.must_wait("a", 10, safe)
    assert gate.take_line() == NOBODY


def test_those_behind_the_first_wait_too_and_are_not_looked_at() -> None:
    """A short request behind a long one would take the blocks that were made safe for the long one."""
    gate = Gate(FakeClock())
    assert gate.must_wait("long", 70, unsafe)
    asked = []
    assert gate.must_wait("short", 1, lambda: bool(asked.append(1)))
    assert not asked
    assert gate.take_line() == Line(71, 70)


def test_the_line_forms_anew_each_step() -> None:
    gate = Gate(FakeClock())
    gate.must_wait("a", 70, unsafe)
    gate.take_line()
    assert not gate.must_wait("a", 70, safe)
    assert gate.take_line() == NOBODY


def test_the_first_in_line_is_let_through_at_its_deadline() -> None:
    clock = FakeClock()
    gate = Gate(clock)
    assert gate.must_wait("a", 70, unsafe)
    for _ in range(3):
        gate.take_line()
        clock.advance(MAX_WAIT_S / 4)
        assert gate.must_wait("a", 70, unsafe)
    gate.take_line()
    clock.advance(MAX_WAIT_S / 4)
    assert not gate.must_wait("a", 70, unsafe)
    assert gate.must_wait("b", 70, unsafe), "the next one has a deadline of its own"
    assert (gate.waited, gate.overdue) == (2, 1)
    assert gate.waited_s == MAX_WAIT_S


def test_the_time_that_the_first_in_line_waited_is_counted_once() -> None:
    clock = FakeClock()
    gate = Gate(clock)
    gate.must_wait("a", 70, unsafe)
    clock.advance(0.25)
    gate.take_line()
    for _ in range(2):  # vLLM may ask again before it has room
        assert not gate.must_wait("a", 70, safe)
        clock.advance(0.25)
    assert gate.waited_s == 0.25


def test_a_request_that_wants_no_block_waits_behind_nobody_for_long() -> None:
    gate = Gate(FakeClock())
    gate.must_wait("a", 70, unsafe)
    assert gate.must_wait("b", 0, safe)
    assert gate.take_line() == Line(70, 70)
