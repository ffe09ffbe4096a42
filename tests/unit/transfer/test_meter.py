"""What the CPU engine's meter makes of copies whose times are known."""

from __future__ import annotations

import pytest

from kvortex.messages import Direction
from kvortex.transfer.cpu import LoadMeter
from tests.fakes.clock import FakeClock

LOAD, STORE = Direction.LOAD, Direction.STORE


def copy(meter: LoadMeter, clock: FakeClock, direction: Direction, bytes_per_s: float) -> None:
    meter.begin(direction)
    clock.advance(1.0)
    meter.end(direction, int(bytes_per_s))


def test_before_a_copy_nothing_is_known() -> None:
    clock = FakeClock()
    meter = LoadMeter(clock)
    assert meter.bytes_per_s is None
    copy(meter, clock, LOAD, 100)
    clock.advance(60)
    assert meter.bytes_per_s == pytest.approx(100)


def test_threads_that_share_the_link_are_not_taken_for_slow_ones() -> None:
    clock = FakeClock()
    meter = LoadMeter(clock)
    for _ in range(10):
        meter.begin(LOAD)
        clock.advance(0.5)
        meter.begin(LOAD)
        clock.advance(0.5)
        meter.end(LOAD, 100)
        clock.advance(1.0)
        meter.end(LOAD, 100)
    assert meter.bytes_per_s == pytest.approx(100)


def test_stores_tell_until_there_are_loads() -> None:
    clock = FakeClock()
    meter = LoadMeter(clock)
    for _ in range(50):
        copy(meter, clock, STORE, 10)
    assert meter.bytes_per_s == pytest.approx(10)
    for _ in range(5):
        copy(meter, clock, LOAD, 100)
    assert meter.bytes_per_s == pytest.approx(100, rel=0.2)


def test_loads_that_were_slow_long_ago_are_forgotten() -> None:
    clock = FakeClock()
    meter = LoadMeter(clock)
    copy(meter, clock, LOAD, 1)
    for _ in range(600):
        copy(meter, clock, STORE, 100)
    assert meter.bytes_per_s == pytest.approx(100, rel=0.05)
