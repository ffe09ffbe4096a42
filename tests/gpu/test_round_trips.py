"""Whatever the layout, a block that was stored comes back byte for byte, and nothing else is written."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvortex.messages import Direction, Outcome
from kvortex.transfer.base import KVLayout
from kvortex.transfer.cuda import CudaCopyEngine
from kvortex.transfer.cuda_driver import CudaDriver
from kvortex.transfer.pinned import PinnedSlab
from kvortex.transfer.tuning import TransferTuning
from tests.gpu.builders import COPY_ENGINE_ONLY, LAYOUTS, contents, engine_for, fill_random, needs_gpu, order, packed
from tests.unit.transfer.builders import wait_answers

pytestmark = needs_gpu

STORE, LOAD = Direction.STORE, Direction.LOAD


def check_round_trip(engine: CudaCopyEngine, slab: PinnedSlab, layout: KVLayout, seed: int = 0) -> None:
    """Stores most blocks, wipes the device, loads some of them elsewhere."""
    rng = np.random.default_rng(seed)
    num_blocks = layout.num_blocks
    fill_random(layout)
    before = contents(layout)
    stored = rng.permutation(num_blocks)[: max(1, num_blocks - 1)]
    slots = rng.permutation(slab.num_slots)[: len(stored)]
    engine.submit([order(1, STORE, stored, slots)])
    (answer,) = wait_answers(engine, 1)
    assert answer.outcome is Outcome.DONE, answer
    assert answer.num_bytes == len(stored) * layout.block_bytes
    expected_slots = torch.full_like(slab.tensor, 0xEE)
    expected_slots[slots] = before[stored]
    assert torch.equal(slab.tensor, expected_slots)
    assert torch.equal(contents(layout), before), "a store changed the device"

    for region in layout.regions:
        region.fill_(0x11)
    chosen = rng.permutation(len(stored))[: max(1, len(stored) - 1)]
    targets = rng.permutation(num_blocks)[: len(chosen)]
    engine.submit([order(2, LOAD, targets, slots[chosen])])
    (answer,) = wait_answers(engine, 1)
    assert answer.outcome is Outcome.DONE, answer
    expected = torch.full_like(before, 0x11)
    expected[targets] = before[stored[chosen]]
    assert torch.equal(contents(layout), expected)
    assert torch.equal(slab.tensor, expected_slots), "a load changed the host"


@pytest.mark.parametrize("shape", LAYOUTS)
@pytest.mark.parametrize(
    ("num_blocks", "sizes"),
    [(1, [1]), (7, [3, 1000, 5]), (40, [4096] * 8), (33, [32768] * 6), (20, [524288] * 4), (6, [20_000_003])],
    ids=str,
)
def test_blocks_come_back(num_blocks: int, sizes: list[int], shape: str) -> None:
    layout = LAYOUTS[shape](num_blocks, sizes)
    with engine_for(layout, num_blocks + 3) as (engine, slab):
        check_round_trip(engine, slab, layout)
    for region in layout.regions:
        if shape == "strided":
            assert region._base is not None
            assert bool((region._base[:, :16] == 0xAA).all())
            assert bool((region._base[:, -16:] == 0xAA).all())


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    shape=st.sampled_from(sorted(LAYOUTS)),
    num_blocks=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 70_000), min_size=1, max_size=5),
    aligned=st.booleans(),
    pages=st.sampled_from([16, 64, 16384]),
    seed=st.integers(0, 99),
)
def test_blocks_of_any_shape_come_back_over_memory_pinned_in_pieces(
    shape: str, num_blocks: int, sizes: list[int], aligned: bool, pages: int, seed: int
) -> None:
    if aligned:
        sizes = [-(-size // 16) * 16 for size in sizes]
    tuning = TransferTuning(1e9, 1e9, dict.fromkeys(sizes, 4)) if aligned else COPY_ENGINE_ONLY
    layout = LAYOUTS[shape](num_blocks, sizes)
    with engine_for(layout, num_blocks + 2, tuning=tuning, piece_bytes=pages * 4096) as (engine, slab):
        check_round_trip(engine, slab, layout, seed)


@pytest.mark.parametrize("num_streams", [1, 2, 64])
def test_blocks_come_back_with_any_number_of_streams(num_streams: int) -> None:
    layout = packed(200, [4096, 65536, 100])
    with engine_for(layout, 220, num_streams=num_streams) as (engine, slab):
        check_round_trip(engine, slab, layout)


def test_blocks_come_back_without_the_batch_call() -> None:
    driver = CudaDriver(0)
    driver._batch = None
    layout = packed(20, [4096, 65536, 10])
    with engine_for(layout, 24, driver=driver) as (engine, slab):
        check_round_trip(engine, slab, layout)


def test_blocks_come_back_with_memsets_for_pauses() -> None:
    driver = CudaDriver(0)
    driver._has_stream_writes = False
    layout = packed(20, [1 << 20] * 4)
    with engine_for(layout, 24, driver=driver) as (engine, slab):
        check_round_trip(engine, slab, layout)


def test_blocks_come_back_over_memory_that_cannot_be_pinned() -> None:
    layout = packed(20, [4096, 65536, 1 << 20])
    with engine_for(layout, 24, pinned=False) as (engine, slab):
        assert slab.pinned_bytes == 0
        assert "CUDA_ERROR_OUT_OF_MEMORY" in slab.refusal
        check_round_trip(engine, slab, layout)


MANY = int(os.environ.get("KVORTEX_ROUND_TRIPS", "50000"))
"""Blocks stored and loaded; 1,000,000 takes a minute."""


def num_changed(engine: CudaCopyEngine, slab: PinnedSlab, layout: KVLayout, seed: int, *, spoil: int = 0) -> int:
    """Stores every block and loads it elsewhere, both in orders of random sizes, all under way at once; blocks that do
    not come back as they were, compared on the device. `spoil` of them are changed in RAM meanwhile."""
    rng = np.random.default_rng(seed)
    num_blocks = layout.num_blocks
    fill_random(layout)
    before = [region.clone() for region in layout.regions]
    slots, sources, targets = (rng.permutation(n) for n in (slab.num_slots, num_blocks, num_blocks))
    slots = slots[:num_blocks]
    cuts = np.sort(rng.choice(np.arange(1, num_blocks), 15, replace=False))
    for first, direction, blocks in ((0, STORE, sources), (100, LOAD, targets)):
        parts = zip(np.split(blocks, cuts), np.split(slots, cuts), strict=True)
        engine.submit(
            [order(1000 * seed + first + number, direction, *part, late_s=120) for number, part in enumerate(parts)]
        )
        answers = wait_answers(engine, len(cuts) + 1, within_s=120)
        assert all(answer.outcome is Outcome.DONE for answer in answers), answers
        if direction is STORE:
            for region in layout.regions:
                region.fill_(0x11)
            slab.tensor[slots[:spoil], 0] += 1
    came, went = torch.from_numpy(targets).cuda(), torch.from_numpy(sources).cuda()
    wrong = torch.zeros(num_blocks, dtype=torch.bool, device="cuda")
    for region, original in zip(layout.regions, before, strict=True):
        wrong |= (region[came] != original[went]).any(1)
    return int(wrong.sum())


@pytest.mark.parametrize("ctas", [0, 4], ids=["copy engine", "kernel"])
def test_no_block_of_many_is_changed(ctas: int) -> None:
    sizes = [4096, 8192]
    tuning = TransferTuning(50e9, 50e9, dict.fromkeys(sizes, ctas)) if ctas else COPY_ENGINE_ONLY
    layout = packed(8192, sizes)
    with engine_for(layout, 9000, tuning=tuning) as (engine, slab):
        rounds = -(-MANY // (2 * layout.num_blocks))
        wrong = [num_changed(engine, slab, layout, number) for number in range(rounds)]
        print(f"{rounds * layout.num_blocks} blocks stored and loaded, {sum(wrong)} changed")
        assert not any(wrong)
        assert num_changed(engine, slab, layout, rounds, spoil=3) == 3
