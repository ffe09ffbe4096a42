"""A store reads only what the kernels before it have written; a load writes only what the kernels before it have read.

Each with its negative control: an engine that skips the wait must be caught, else the test proves nothing.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvortex.messages import Direction, Outcome
from kvortex.transfer.base import Fence
from kvortex.transfer.cuda import CudaCopyEngine
from kvortex.transfer.cuda_stream import CudaFence
from tests.gpu.builders import COPY_ENGINE_ONLY, engine_for, needs_gpu, order, packed, random_bytes, spin
from tests.unit.transfer.builders import wait_answers

pytestmark = needs_gpu

STORE, LOAD = Direction.STORE, Direction.LOAD
REPEATS = 150


class UnfencedEngine(CudaCopyEngine):
    """Waits for a stream on which nothing ever runs."""

    def fence(self) -> Fence:
        return CudaFence(torch.cuda.Stream())


def wrong_stores(
    kind: type[CudaCopyEngine], num_streams: int, repeats: int, *, pinned: bool = True, stop_at_first: bool = False
) -> int:
    """In how many of the repeats the host got other bytes than the kernel wrote."""
    layout = packed(64, [32 << 10] * 4)
    blocks = np.arange(64)
    wrong = 0
    with engine_for(layout, 64, num_streams=num_streams, kind=kind, pinned=pinned) as (engine, slab):
        for repeat in range(repeats):
            for region in layout.regions:
                region.fill_(0xAA)
            tags = [random_bytes(*region.shape) for region in layout.regions]
            torch.cuda.synchronize()
            spin()
            for region, tag in zip(layout.regions, tags, strict=True):
                torch.add(tag, 0, out=region)
            engine.submit([order(repeat, STORE, blocks, blocks)])
            (answer,) = wait_answers(engine, 1)
            assert answer.outcome is Outcome.DONE, answer
            wrong += not torch.equal(slab.tensor, torch.cat(tags, dim=1).cpu())
            torch.cuda.synchronize()
            if wrong and stop_at_first:
                break
    return wrong


def wrong_loads(
    kind: type[CudaCopyEngine], num_streams: int, repeats: int, *, ctas: int = 0, stop_at_first: bool = False
) -> int:
    """In how many of the repeats a kernel read other bytes than were there when it was launched."""
    layout = packed(4, [32 << 10])
    block = layout.regions[0][0]
    result = torch.zeros_like(block)
    tuning = COPY_ENGINE_ONLY if not ctas else type(COPY_ENGINE_ONLY)(50e9, 50e9, {32 << 10: ctas})
    wrong = 0
    with engine_for(layout, 4, num_streams=num_streams, kind=kind, tuning=tuning) as (engine, slab):
        for repeat in range(repeats):
            slab.tensor[2] = repeat % 100
            block.fill_(0xAA)
            result.zero_()
            torch.cuda.synchronize()
            spin()
            torch.add(block, 0, out=result)
            engine.submit([order(repeat, LOAD, [0], [2])])
            (answer,) = wait_answers(engine, 1)
            assert answer.outcome is Outcome.DONE, answer
            torch.cuda.synchronize()
            assert bool((block == repeat % 100).all()), "the load's bytes are not there"
            wrong += not bool((result == 0xAA).all())
            if wrong and stop_at_first:
                break
    return wrong


@pytest.mark.parametrize("num_streams", [1, 2, 8])
def test_a_store_never_reads_a_block_before_the_kernel_that_writes_it(num_streams: int) -> None:
    assert wrong_stores(CudaCopyEngine, num_streams, REPEATS) == 0


@pytest.mark.parametrize("num_streams", [1, 2, 8])
def test_control_a_store_that_does_not_wait_is_caught(num_streams: int) -> None:
    assert wrong_stores(UnfencedEngine, num_streams, REPEATS, stop_at_first=True) > 0


@pytest.mark.parametrize("num_streams", [1, 8])
def test_a_load_never_overwrites_a_block_that_a_kernel_still_reads(num_streams: int) -> None:
    assert wrong_loads(CudaCopyEngine, num_streams, REPEATS) == 0


@pytest.mark.parametrize("num_streams", [1, 8])
def test_control_a_load_that_does_not_wait_is_caught(num_streams: int) -> None:
    assert wrong_loads(UnfencedEngine, num_streams, REPEATS, stop_at_first=True) > 0


def test_a_load_by_the_kernel_waits_too() -> None:
    pytest.importorskip("triton")
    assert wrong_loads(CudaCopyEngine, 4, 10, ctas=4) == 0
    assert wrong_loads(UnfencedEngine, 4, 10, ctas=4, stop_at_first=True) > 0


def test_a_store_to_memory_that_is_not_pinned_waits_too() -> None:
    assert wrong_stores(CudaCopyEngine, 4, 10, pinned=False) == 0
    assert wrong_stores(UnfencedEngine, 4, 10, pinned=False, stop_at_first=True) > 0


@pytest.mark.parametrize("direction", [LOAD, STORE])
def test_an_earlier_fence_lets_an_order_pass_kernels_that_do_not_touch_its_blocks(direction: Direction) -> None:
    layout = packed(4, [32 << 10])
    with engine_for(layout, 4) as (engine, _):
        before = engine.fence()
        spin(200)
        behind = engine.fence()
        engine.submit([order(1, direction, [0], [0])], after=before)
        assert [answer.job_id for answer in wait_answers(engine, 1)] == [1]
        assert before.is_reached()
        assert not behind.is_reached()


def test_a_store_that_waits_does_not_hold_up_loads() -> None:
    layout = packed(8, [1 << 20])
    with engine_for(layout, 8) as (engine, _):
        before = engine.fence()
        spin(200)
        behind = engine.fence()
        engine.submit([order(1, STORE, [0, 1], [0, 1])])
        engine.submit([order(2, LOAD, [2, 3], [2, 3])], after=before)
        assert [answer.job_id for answer in wait_answers(engine, 1)] == [2]
        assert not behind.is_reached()
        assert [answer.job_id for answer in wait_answers(engine, 1)] == [1]
        assert behind.is_reached()
