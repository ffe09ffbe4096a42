"""Deadlines, faults, and the end, on a real stream."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from kvortex.messages import Direction, Outcome
from kvortex.transfer.addresses import Addresses
from kvortex.transfer.cuda import CudaCopyEngine
from kvortex.transfer.cuda_driver import CudaDriver, DriverError
from tests.fakes.clock import FakeClock
from tests.gpu.builders import (
    COPY_ENGINE_ONLY,
    contents,
    engine_for,
    fill_random,
    needs_gpu,
    order,
    packed,
    spin,
)
from tests.unit.transfer.builders import wait_answers, wait_until

pytestmark = needs_gpu

STORE, LOAD = Direction.STORE, Direction.LOAD


class FailingDriver(CudaDriver):
    """Refuses the batch of number `fails_at`."""

    fails_at = 0
    num_batches = 0

    def copy(self, target: Addresses, source: Addresses, num_bytes: Addresses, stream: int) -> None:
        self.num_batches += 1
        if self.num_batches == self.fails_at:
            empty = np.array([], np.uint64)
            super().copy(empty, empty, empty, stream)
        super().copy(target, source, num_bytes, stream)


def test_orders_not_enqueued_by_their_deadline_are_dropped_and_the_others_are_answered_when_they_end() -> None:
    clock = FakeClock()
    layout = packed(1200, [1 << 20])
    with engine_for(layout, 1200, clock=clock) as (engine, slab):
        spin(100)
        behind = engine.fence()
        # Some 960 MB are enqueued ahead, by the lane's thread; the second order's bytes are not among them.
        engine.submit([order(1, STORE, np.arange(1000), np.arange(1000), late_s=5)])
        engine.submit([order(2, STORE, np.arange(1000, 1200), np.arange(1000, 1200), late_s=5)])
        lane = engine._lanes[STORE]
        wait_until(lambda: lane._bytes_ahead >= lane._bounds.ahead_bytes)
        clock.advance(5)
        (dropped,) = engine.poll()
        assert (dropped.job_id, dropped.outcome, dropped.num_bytes) == (2, Outcome.TIMED_OUT, 0)
        assert not behind.is_reached()
        (late,) = wait_answers(engine, 1)
        assert behind.is_reached()
        assert (late.job_id, late.outcome) == (1, Outcome.TIMED_OUT)
        assert 0 < late.num_bytes < 1000 << 20
        stored = late.num_bytes >> 20
        assert bool((slab.tensor[:stored, 0] == 0).all())
        torch.cuda.synchronize()
        assert bool((slab.tensor[stored:, 0] == 0xEE).all()), "nothing moves after the answer"


def test_a_batch_that_the_driver_refuses_fails_its_order_with_the_drivers_name_for_it() -> None:
    driver = FailingDriver(0)
    layout = packed(40, [4 << 20])
    fill_random(layout)
    with engine_for(layout, 40, driver=driver) as (engine, slab):
        driver.fails_at = 2
        engine.submit([order(1, STORE, np.arange(20), np.arange(20)), order(2, STORE, [30], [30])])
        failed, done = wait_answers(engine, 2)
        assert (failed.job_id, failed.outcome, done.outcome) == (1, Outcome.FAILED, Outcome.DONE)
        assert "CUDA_ERROR_INVALID_VALUE" in failed.detail
        assert torch.equal(slab.tensor[30], contents(layout)[30])
        driver.fails_at = 0
        engine.submit([order(3, LOAD, [0], [30])])
        assert wait_answers(engine, 1)[0].outcome is Outcome.DONE


def test_the_driver_refuses_a_copy_across_pieces_that_were_pinned_one_by_one() -> None:
    """Why copies are cut at seams."""
    driver = CudaDriver(0)
    layout = packed(2, [4096])
    with engine_for(layout, 64, driver=driver, piece_bytes=64 << 10) as (_, slab):
        stream = driver.create_stream()
        device, host = np.array([layout.regions[0].data_ptr()], np.uint64), np.array([slab.address], np.uint64)
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
            driver.copy(device, host + np.uint64(62 << 10), np.array([4096], np.uint64), stream)
        driver.destroy_stream(stream)


def test_wrong_indices_are_a_failed_answer() -> None:
    layout = packed(4, [4096])
    with engine_for(layout, 4) as (engine, _):
        engine.submit([order(1, STORE, [4], [0]), order(2, LOAD, [0], [-1]), order(3, LOAD, [1], [1])])
        answers = {int(answer.job_id): answer.outcome for answer in wait_answers(engine, 3)}
        assert answers == {1: Outcome.FAILED, 2: Outcome.FAILED, 3: Outcome.DONE}


def test_close_waits_for_what_is_on_the_gpu_and_drops_the_rest() -> None:
    layout = packed(1200, [1 << 20])
    with engine_for(layout, 1200) as (engine, slab):
        spin(100)
        behind = engine.fence()
        engine.submit([order(1, STORE, np.arange(1200), np.arange(1200))])
        lane = engine._lanes[STORE]
        wait_until(lambda: lane._bytes_ahead > 0)
        assert engine.close(0.001) is False
        assert engine.poll() == []
        assert engine.close(60) is True
        assert behind.is_reached()
        seen = slab.tensor[:, 0].clone()
        assert bool((seen == 0xEE).any()), "what was not enqueued never moves"
        torch.cuda.synchronize()
        assert torch.equal(seen, slab.tensor[:, 0])
        with pytest.raises(AssertionError, match="after close"):
            engine.submit([order(2, STORE, [0], [0])])


def test_no_store_is_enqueued_while_the_models_thread_launches() -> None:
    launching = True
    layout = packed(64, [1 << 20])
    driver = CudaDriver(0)
    with engine_for(layout, 64, driver=driver) as (_, slab):
        engine = CudaCopyEngine(layout, slab, 2, driver, COPY_ENGINE_ONLY, is_launching=lambda: launching)
        engine.submit([order(1, STORE, np.arange(64), np.arange(64))])
        time.sleep(0.05)
        assert engine.poll() == []
        torch.cuda.synchronize()
        assert bool((slab.tensor == 0xEE).all())
        launching = False
        (answer,) = wait_answers(engine, 1)
        assert answer.outcome is Outcome.DONE
        assert bool((slab.tensor == 0).all())
        assert engine.close(60)


def test_many_orders_both_ways_are_each_answered_once_and_in_order() -> None:
    layout = packed(256, [256 << 10] * 4)
    fill_random(layout)
    before = contents(layout)
    with engine_for(layout, 256) as (engine, slab):
        engine.submit([order(i, STORE, [i], [i]) for i in range(128)])
        answers = wait_answers(engine, 128)
        assert [answer.job_id for answer in answers] == list(range(128))
        for i in range(128, 256):
            engine.submit([order(i, STORE, [i], [i])])
            engine.submit([order(1000 + i, LOAD, [i - 128], [255 - i])])
        answers = wait_answers(engine, 256)
        assert {answer.outcome for answer in answers} == {Outcome.DONE}
        for direction in (STORE, LOAD):
            ids = [answer.job_id for answer in answers if answer.direction is direction]
            assert ids == sorted(ids)
        assert torch.equal(slab.tensor, before)
        assert torch.equal(contents(layout)[:128], before[:128].flip(0))
