"""Loads that a step's own kernels read: each layer's kernels see their bytes, and no kernel before sees them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvortex.messages import Direction, Outcome
from kvortex.transfer.base import KVLayout
from kvortex.transfer.cuda import CudaCopyEngine
from kvortex.transfer.cuda_driver import CudaDriver, DriverError
from tests.gpu.builders import LAYOUTS, RefusingDriver, engine_for, needs_gpu, order, packed, spin
from tests.unit.transfer.builders import wait_answers

pytestmark = needs_gpu

LOAD = Direction.LOAD
SIZES = [256 << 10] * 6
NUM_BLOCKS = 48


def run_layers(engine: CudaCopyEngine, layout: KVLayout, job_ids: Sequence[int], *, hold: bool = True) -> list[bool]:
    """Loads blocks 8 .. from slots in reverse, runs a kernel a region behind its hold; whether each read its bytes."""
    blocks = np.arange(8, 8 + NUM_BLOCKS // 2)
    slots = NUM_BLOCKS - 1 - np.arange(len(blocks))
    half = len(blocks) // len(job_ids)
    parts = [slice(i * half, (i + 1) * half) for i in range(len(job_ids))]
    orders = [order(job, LOAD, blocks[part], slots[part]) for job, part in zip(job_ids, parts, strict=True)]
    loads = engine.load_for_step(orders, after=engine.fence())
    read = []
    for i, region in enumerate(layout.regions):
        if hold:
            loads.hold_kernels([i])
        read.append(region.clone())
    assert loads.end() is hold
    torch.cuda.synchronize()
    taken = blocks[: half * len(job_ids)]
    right = []
    for i, region in enumerate(read):
        expected = torch.full((layout.num_blocks,), 0xAA, dtype=torch.uint8)
        expected[taken] = torch.as_tensor(slot_byte(i, slots[: len(taken)]))
        right.append(bool((region.cpu() == expected[:, None]).all()))
    return right


def slot_byte(region: int, slots: np.ndarray) -> np.ndarray:
    return ((slots * 7 + region * 31) % 100).astype(np.uint8)


def fill(layout: KVLayout, slab: torch.Tensor) -> None:
    begin = 0
    for i, region in enumerate(layout.regions):
        slab[:, begin : begin + region.shape[1]] = torch.as_tensor(slot_byte(i, np.arange(len(slab))))[:, None]
        begin += region.shape[1]
        region.fill_(0xAA)
    torch.cuda.synchronize()


@pytest.mark.parametrize("layout_name", list(LAYOUTS))
@pytest.mark.parametrize("pinned", [True, False])
def test_each_layers_kernels_read_its_bytes(layout_name: str, pinned: bool) -> None:
    layout = LAYOUTS[layout_name](NUM_BLOCKS, SIZES)
    with engine_for(layout, NUM_BLOCKS, pinned=pinned) as (engine, slab):
        for repeat in range(20):
            fill(layout, slab.tensor)
            assert all(run_layers(engine, layout, [2 * repeat, 2 * repeat + 1]))
            answers = wait_answers(engine, 2)
            assert [answer.outcome for answer in answers] == [Outcome.DONE] * 2


def test_control_kernels_that_are_not_held_are_caught() -> None:
    layout = packed(NUM_BLOCKS, SIZES)
    with engine_for(layout, NUM_BLOCKS) as (engine, slab):
        fill(layout, slab.tensor)
        assert not all(run_layers(engine, layout, [1], hold=False))


def test_nothing_is_written_under_the_kernels_of_the_step_before() -> None:
    layout = packed(NUM_BLOCKS, SIZES)
    with engine_for(layout, NUM_BLOCKS) as (engine, slab):
        for repeat in range(20):
            fill(layout, slab.tensor)
            spin()
            before = [region.clone() for region in layout.regions]
            assert all(run_layers(engine, layout, [repeat]))
            assert all(bool((region == 0xAA).all()) for region in before)
            wait_answers(engine, 1)


def test_other_loads_begin_nothing_meanwhile_and_end_afterwards() -> None:
    layout = packed(NUM_BLOCKS, SIZES)
    with engine_for(layout, NUM_BLOCKS) as (engine, slab):
        fill(layout, slab.tensor)
        fence = engine.fence()
        spin(200)
        loads = engine.load_for_step([order(1, LOAD, [1, 2], [3, 4])], after=engine.fence())
        engine.submit([order(2, LOAD, [5], [6])], after=fence)
        assert engine.poll() == []
        loads.hold_kernels(range(len(SIZES)))
        assert loads.end()
        answers = wait_answers(engine, 2)
        assert [answer.job_id for answer in answers] == [1, 2]
        assert bool((layout.regions[0][5] == int(slot_byte(0, np.array([6]))[0])).all())


class OnceFailingDriver(CudaDriver):
    """Refuses one batch of copies, after it was told to."""

    refuse_next = False

    def copy_at(self, *arguments: int) -> None:
        if self.refuse_next:
            self.refuse_next = False
            raise DriverError("cuMemcpyBatchAsync", 1, "CUDA_ERROR_INVALID_VALUE")
        super().copy_at(*arguments)


def test_copies_that_the_driver_refuses_are_made_in_another_way() -> None:
    layout = packed(NUM_BLOCKS, SIZES)
    driver = OnceFailingDriver(0)
    with engine_for(layout, NUM_BLOCKS, driver=driver) as (engine, slab):
        fill(layout, slab.tensor)
        driver.refuse_next = True
        assert all(run_layers(engine, layout, [1]))
        assert not driver.refuse_next
        assert wait_answers(engine, 1)[0].outcome is Outcome.DONE


def test_a_slab_that_cannot_be_pinned_serves_steps_too() -> None:
    layout = packed(NUM_BLOCKS, SIZES)
    with engine_for(layout, NUM_BLOCKS, driver=RefusingDriver(0), pinned=False) as (engine, slab):
        fill(layout, slab.tensor)
        assert all(run_layers(engine, layout, [1]))
        wait_answers(engine, 1)
