"""The gather kernel loads the same bytes as the copy engine, and is taken where it was measured to be faster."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvortex.messages import Direction
from kvortex.transfer.addresses import rows_of
from kvortex.transfer.cuda_driver import CudaDriver
from kvortex.transfer.tuning import TransferTuning, read, tune
from tests.gpu.builders import LAYOUTS, contents, engine_for, fill_random, needs_gpu, order
from tests.unit.transfer.builders import wait_answers

pytestmark = needs_gpu

STORE, LOAD = Direction.STORE, Direction.LOAD


@pytest.mark.parametrize("shape", LAYOUTS)
@pytest.mark.parametrize("size", [16, 48, 4096, 4112, 24 << 10, 32 << 10, 40 << 10])
def test_the_kernel_loads_what_was_stored(shape: str, size: int) -> None:
    pytest.importorskip("triton")
    layout = LAYOUTS[shape](101, [size] * 3)
    merged = {row.num_bytes for row in rows_of(layout)}
    tuning = TransferTuning(50e9, 50e9, dict.fromkeys(merged, 4))
    rng = np.random.default_rng(size)
    with engine_for(layout, 120, tuning=tuning) as (engine, _):
        assert engine._lanes[LOAD]._mover.num_copied_rows == 0, "the kernel moves all of it"  # type: ignore[attr-defined]
        fill_random(layout)
        before = contents(layout)
        slots = rng.permutation(120)[:101]
        engine.submit([order(1, STORE, np.arange(101), slots)])
        wait_answers(engine, 1)
        for region in layout.regions:
            region.fill_(0x11)
        targets = rng.permutation(101)[:90]
        engine.submit([order(2, LOAD, targets[:37], slots[:37]), order(3, LOAD, targets[37:], slots[37:90])])
        wait_answers(engine, 2)
        expected = torch.full_like(before, 0x11)
        expected[targets] = before[:90]
        assert torch.equal(contents(layout), expected)


def test_a_layout_of_small_and_large_fragments_uses_both_ways() -> None:
    pytest.importorskip("triton")
    layout = LAYOUTS["packed"](64, [4096, 1 << 20, 4096, 112])
    with engine_for(layout, 70, tuning=TransferTuning(50e9, 50e9, {4096: 2})) as (engine, _):
        assert engine._lanes[LOAD]._mover.num_copied_rows == 2  # type: ignore[attr-defined]
        fill_random(layout)
        before = contents(layout)
        engine.submit([order(1, STORE, np.arange(64), np.arange(64) + 3)])
        wait_answers(engine, 1)
        for region in layout.regions:
            region.zero_()
        engine.submit([order(2, LOAD, np.arange(64), np.arange(64) + 3)])
        wait_answers(engine, 1)
        assert torch.equal(contents(layout), before)


def test_many_loads_in_flight_each_read_their_own_block_ids() -> None:
    pytest.importorskip("triton")
    layout = LAYOUTS["packed"](400, [4096] * 4)
    with engine_for(layout, 400, tuning=TransferTuning(50e9, 50e9, {4096: 1})) as (engine, _):
        fill_random(layout)
        before = contents(layout)
        engine.submit([order(0, STORE, np.arange(400), np.arange(400))])
        wait_answers(engine, 1)
        targets = np.random.default_rng(1).permutation(400)
        engine.submit([order(1 + i, LOAD, targets[i : i + 1], [i]) for i in range(400)])
        wait_answers(engine, 400)
        expected = torch.empty_like(before)
        expected[targets] = before
        assert torch.equal(contents(layout), expected)


def test_this_card_is_measured_once(tmp_path: Path) -> None:
    driver = CudaDriver(0)
    reserved = torch.cuda.memory_reserved()
    tuned = tune(driver, [4096, 65536], tmp_path)
    assert tuned.load_bandwidth > 1e9
    assert tuned.store_bandwidth > 1e9
    assert set(tuned.kernel_ctas) == {4096, 65536}
    (path,) = tmp_path.iterdir()
    assert driver.gpu_uuid in path.name
    assert read(path) == tuned
    assert tune(driver, [4096], tmp_path) == tuned
    assert torch.cuda.memory_reserved() <= reserved, "the scratch memory was given back"
