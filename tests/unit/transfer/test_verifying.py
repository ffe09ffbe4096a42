"""Blocks that change in RAM are refused before a byte of them is copied; what did not change comes back as it was."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvortex.messages import CopyOrder, JobResult, Outcome
from kvortex.transfer import checksums
from kvortex.transfer.cpu import CpuCopyEngine, ReachedFence
from kvortex.transfer.slab import HostSlab
from kvortex.transfer.verifying import VerifyingEngine
from tests.fakes.clock import FakeClock
from tests.fakes.copy_engines import HeldEngine
from tests.unit.transfer.builders import (
    LOAD,
    STORE,
    block_contents,
    check_round_trip,
    fill_random,
    order,
    packed,
    strided,
    wait_answers,
)

FRAGMENTS = [96, 32, 64]
NUM_BLOCKS = 16


@pytest.fixture
def layout():
    made = strided(NUM_BLOCKS, FRAGMENTS)
    fill_random(made, 1)
    return made


@pytest.fixture
def slab(layout):
    return HostSlab(32, layout.block_bytes)


@pytest.fixture
def engine(layout, slab) -> Iterator[VerifyingEngine]:
    made = VerifyingEngine(CpuCopyEngine(layout, slab, 2), layout, slab, 2)
    yield made
    assert made.close(30)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvortex-copy")]


class Held:
    """A verifying engine over one that is worked by hand."""

    def __init__(self, layout, slab) -> None:
        self.clock = FakeClock()
        self.copies = Fenced(layout, slab)
        self.engine = VerifyingEngine(self.copies, layout, slab, 1, clock=self.clock)

    def store(self, *slots: int, **fields: Any) -> None:
        """From the blocks of the slots' numbers, as job 1 for slot 0, 2 for slot 1 ..."""
        for slot in slots:
            self.engine.submit([order(slot + 1, STORE, [(slot, slot)], **fields)])
            self.copies.release(slot + 1)
            (answer,) = wait_answers(self.engine, 1)
            assert answer.outcome is Outcome.DONE, answer

    def until(self, happened: Callable[[], object]) -> list[JobResult]:
        answers: list[JobResult] = []
        end_s = time.monotonic() + 30
        while not happened():
            answers += self.engine.poll()
            assert time.monotonic() < end_s, "did not happen"
            time.sleep(0.0002)
        return answers


class Fenced(HeldEngine):
    """Keeps what each order waits for on the device."""

    def __init__(self, layout, slab) -> None:
        super().__init__(layout, slab)
        self.afters: list[Any] = []

    def submit(self, orders, *, after=None) -> None:
        super().submit(orders, after=after)
        self.afters += [after] * len(orders)


@pytest.fixture
def held(layout, slab) -> Iterator[Held]:
    made = Held(layout, slab)
    yield made
    assert made.engine.close(30)


class Gate:
    """Holds whoever computes a checksum until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.entered = threading.Event()
        real = checksums.xxhash.xxh3_64_intdigest

        def digest(row: Any) -> int:
            self.entered.set()
            assert self.opened.wait(60), "never opened"
            return real(row)

        monkeypatch.setattr(checksums.xxhash, "xxh3_64_intdigest", digest)


@pytest.fixture
def gate(monkeypatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


def done(engine: VerifyingEngine, *orders: CopyOrder) -> list[JobResult]:
    engine.submit(list(orders))
    return wait_answers(engine, len(orders))


def test_every_byte_comes_back(engine, layout) -> None:
    check_round_trip(engine, layout, 32)


def test_any_bit_of_any_block_that_changes_is_found_and_nothing_is_copied(engine, layout, slab) -> None:
    pairs = [(block, block + 3) for block in range(NUM_BLOCKS)]
    assert done(engine, order(1, STORE, pairs))[0].outcome is Outcome.DONE
    rng = random.Random(0)
    rows = slab.tensor.numpy()
    for region in layout.regions:
        region.fill_(0xEE)
    empty = block_contents(layout, 0)
    for job in range(2, 152):
        block = rng.randrange(NUM_BLOCKS)
        byte, bit = rng.randrange(layout.block_bytes), 1 << rng.randrange(8)
        rows[block + 3, byte] ^= bit
        (answer,) = done(engine, order(job, LOAD, pairs))
        assert (answer.outcome, answer.corrupt_slots, answer.num_bytes) == (Outcome.FAILED, (block + 3,), 0)
        assert f"in slots [{block + 3}]" in answer.detail
        rows[block + 3, byte] ^= bit
        engine._checksums._is_corrupt[:] = False  # a server never stores in such a slot again
        assert all(block_contents(layout, b) == empty for b in range(NUM_BLOCKS))
    (answer,) = done(engine, order(152, LOAD, pairs))
    assert (answer.outcome, answer.corrupt_slots) == (Outcome.DONE, ())


def test_all_changed_blocks_of_a_piece_are_named_at_once_and_others_load(engine, slab) -> None:
    done(engine, order(1, STORE, [(block, block) for block in range(8)]))
    slab.tensor[2] += 1
    slab.tensor[5] += 1
    first, second = sorted(
        done(engine, order(2, LOAD, [(b, b) for b in range(8)]), order(3, LOAD, [(9, 0), (10, 1)])),
        key=lambda answer: answer.job_id,
    )
    assert (first.outcome, first.corrupt_slots) == (Outcome.FAILED, (2, 5))
    assert "2 of 8 blocks" in first.detail
    assert second.outcome is Outcome.DONE


def test_a_store_over_a_slot_replaces_its_checksum(engine, layout, slab) -> None:
    done(engine, order(1, STORE, [(0, 7)]))
    slab.tensor[7] += 1
    assert done(engine, order(2, LOAD, [(1, 7)]))[0].corrupt_slots == (7,)
    done(engine, order(3, STORE, [(4, 7)]))
    assert done(engine, order(4, LOAD, [(1, 7)]))[0].outcome is Outcome.DONE
    assert block_contents(layout, 1) == block_contents(layout, 4)


def test_of_a_sample_the_others_are_not_compared_and_wait_for_nothing(held, slab, gate) -> None:
    gate.opened.set()
    stored = order(1, STORE, [(block, block) for block in range(4)])
    held.engine.submit([replace(stored, sampled=np.array([False, True, False, True]))])
    held.copies.release(1)
    assert wait_answers(held.engine, 1)[0].outcome is Outcome.DONE
    slab.tensor[:] += 1
    held.engine.submit([order(2, LOAD, [(0, 0), (1, 2)])])
    assert held.copies.held == [2], "there is nothing to compare"
    assert held.copies.orders[-1].slots.tolist() == [0, 2]
    held.copies.release(2)
    assert wait_answers(held.engine, 1)[0].outcome is Outcome.DONE
    held.engine.submit([order(3, LOAD, [(block, block) for block in range(4)])])
    assert wait_answers(held.engine, 1)[0].corrupt_slots == (1, 3)


def test_a_store_of_which_nothing_is_sampled_is_answered_when_it_is_copied(held) -> None:
    held.engine.submit([replace(order(1, STORE, [(0, 0)]), sampled=np.array([False]))])
    held.copies.release(1)
    (answer,) = held.engine.poll()
    assert answer.outcome is Outcome.DONE


def test_a_store_is_told_when_its_checksum_is_taken(held, gate) -> None:
    held.engine.submit([order(1, STORE, [(0, 0)])])
    assert held.engine.poll() == []
    held.copies.release(1)
    assert held.engine.poll() == []
    assert gate.entered.wait(30)
    assert held.engine.poll() == [], "copied, and its checksum is not taken"
    gate.opened.set()
    (answer,) = wait_answers(held.engine, 1)
    assert (answer.outcome, answer.num_bytes) == (Outcome.DONE, sum(FRAGMENTS))


def test_a_load_is_copied_when_it_was_compared_behind_the_fence_it_came_with(held, gate) -> None:
    gate.opened.set()
    held.store(0)
    gate.opened.clear()
    fence = ReachedFence()
    held.engine.submit([order(9, LOAD, [(3, 0)])], after=fence)
    assert held.engine.poll() == []
    assert held.copies.held == []
    held.copies.promise_next = [9]
    assert held.engine.promise(1.0) == [], "it may still fail"
    gate.opened.set()
    assert held.until(lambda: held.copies.held) == []
    assert held.copies.afters[-1] is fence
    held.copies.promise_next = [9]
    assert held.engine.promise(1.0) == [9]
    held.engine.hold_kernels([9])
    assert [answer.job_id for answer in held.engine.poll()] == [9]


@pytest.mark.parametrize("ended", ["fail", "time_out"])
def test_a_store_that_was_not_copied_gets_no_checksum(held, ended) -> None:
    held.store(0)
    held.engine.submit([order(7, STORE, [(1, 0)])])
    getattr(held.copies, ended)(7)
    (answer,) = held.engine.poll()
    assert answer.outcome is not Outcome.DONE
    assert not held.engine._checksums.known(np.array([0])).any(), "its old bytes are gone"


def test_a_copy_that_fails_after_its_checksums_were_right_names_no_slot(held) -> None:
    held.store(0)
    held.engine.submit([order(9, LOAD, [(3, 0)])])
    held.until(lambda: held.copies.held)
    held.copies.fail(9)
    (answer,) = held.engine.poll()
    assert (answer.outcome, answer.detail, answer.corrupt_slots) == (Outcome.FAILED, "told to fail", ())


def test_what_has_no_checksum_in_time_is_late(held, gate, layout) -> None:
    gate.opened.set()
    held.store(0)
    gate.opened.clear()
    gate.entered.clear()
    held.engine.submit([order(9, LOAD, [(3, 0)], deadline_s=5)])
    assert gate.entered.wait(30)
    held.clock.advance(6)
    assert held.engine.poll() == [], "its bytes are being read"
    gate.opened.set()
    (answer,) = wait_answers(held.engine, 1)
    assert (answer.outcome, answer.seconds) == (Outcome.TIMED_OUT, 6)
    assert held.copies.held == []


def test_both_parts_of_an_order_share_one_deadline(held) -> None:
    held.store(0)
    held.engine.submit([order(9, STORE, [(3, 1)], deadline_s=5), order(10, STORE, [(4, 2)], deadline_s=5)])
    held.clock.advance(3)
    held.copies.release(9)
    assert wait_answers(held.engine, 1)[0].outcome is Outcome.DONE
    held.clock.advance(3)
    held.copies.release(10)
    (answer,) = held.engine.poll()
    assert (answer.outcome, answer.job_id) == (Outcome.TIMED_OUT, 10)
    held.engine.submit([order(11, LOAD, [(3, 0)], deadline_s=5)])
    held.until(lambda: held.copies.held)
    assert held.copies.orders[-1].deadline_s == 5
    held.copies.release(11)


def test_an_error_while_a_checksum_is_computed_fails_the_order_and_accuses_no_slot(held, monkeypatch) -> None:
    held.store(0)
    monkeypatch.setattr(checksums.xxhash, "xxh3_64_intdigest", lambda row: 1 // 0)
    held.engine.submit([order(9, LOAD, [(3, 0)])])
    (answer,) = wait_answers(held.engine, 1)
    assert (answer.outcome, answer.corrupt_slots) == (Outcome.FAILED, ())
    assert "ZeroDivisionError" in answer.detail


def test_an_order_outside_the_slab_is_answered_failed(engine) -> None:
    for job, direction in ((1, STORE), (2, LOAD)):
        (answer,) = done(engine, order(job, direction, [(0, 99)]))
        assert (answer.outcome, answer.corrupt_slots) == (Outcome.FAILED, ())
    done(engine, order(3, STORE, [(0, 31)]))  # the nearest slot has a checksum
    (answer,) = done(engine, order(4, LOAD, [(0, 99)]))
    assert (answer.outcome, answer.corrupt_slots) == (Outcome.FAILED, ())


def test_a_load_with_its_step_is_refused_at_once(held) -> None:
    with pytest.raises(AssertionError, match="must not fail"):
        held.engine.load_for_step([order(1, LOAD, [(0, 0)])], after=ReachedFence())


def test_the_link_is_as_slow_as_comparing_makes_it(layout, slab) -> None:
    engine = VerifyingEngine(CpuCopyEngine(layout, slab, 1), layout, slab, 1, share=0.5)
    assert engine.link is None
    done(engine, order(1, STORE, [(0, 0)]))
    done(engine, order(2, LOAD, [(0, 0)]))
    copies, checks = engine._copies.link, engine._checks.link
    assert copies is not None
    assert checks is not None
    link = engine.link
    assert link is not None
    assert 1 / link.bytes_per_s == pytest.approx(1 / copies.bytes_per_s + 0.5 / checks.bytes_per_s)
    assert engine.close(30)


def test_an_answer_that_comes_again_goes_on_to_whoever_counts_it(held) -> None:
    held.store(0)
    held.copies.answer_again(1)
    assert [answer.job_id for answer in held.engine.poll()] == [1]


def test_close_waits_for_a_checksum_that_is_being_computed(layout, slab, gate) -> None:
    engine = VerifyingEngine(CpuCopyEngine(layout, slab, 1), layout, slab, 1)
    engine.submit([order(1, STORE, [(0, 0)])])
    end_s = time.monotonic() + 30
    while not gate.entered.is_set():
        engine.poll()
        assert time.monotonic() < end_s, "no checksum was begun"
        time.sleep(0.0002)
    assert not engine.close(0.01)
    gate.opened.set()
    assert engine.close(30)


def test_a_block_is_told_from_one_whose_parts_are_swapped() -> None:
    """What a sum would not see."""
    layout = packed(1, [64])
    slab = HostSlab(1, 64)
    layout.regions[0].copy_(torch.arange(64, dtype=torch.uint8)[None])
    engine = VerifyingEngine(CpuCopyEngine(layout, slab, 1), layout, slab, 1)
    done(engine, order(1, STORE, [(0, 0)]))
    slab.tensor[0] = slab.tensor[0].roll(32)
    assert done(engine, order(2, LOAD, [(0, 0)]))[0].corrupt_slots == (0,)
    assert engine.close(30)
