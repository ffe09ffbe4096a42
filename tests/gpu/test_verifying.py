"""`verify: all` on a GPU: every block that changed in RAM is refused, no other one is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvortex.messages import Direction, Outcome
from kvortex.transfer.base import CopyEngine
from kvortex.transfer.pinned import PinnedSlab
from kvortex.transfer.verifying import VerifyingEngine
from tests.gpu.builders import contents, engine_for, fill_random, needs_gpu, order, packed
from tests.unit.transfer.builders import wait_answers

pytestmark = needs_gpu

BLOCKS = 2000
STORE, LOAD = Direction.STORE, Direction.LOAD


def store_and_spoil(engine: CopyEngine, slab: PinnedSlab, rng: np.random.Generator) -> set[int]:
    """Stores block b in slot b, then turns one bit over in half of the slots; these slots."""
    every = np.arange(BLOCKS)
    engine.submit([order(1, STORE, every, every)])
    (answer,) = wait_answers(engine, 1)
    assert answer.outcome is Outcome.DONE, answer
    spoiled = rng.permutation(BLOCKS)[: BLOCKS // 2]
    for slot in spoiled:
        slab.tensor[slot, int(rng.integers(slab.tensor.shape[1]))] ^= 1 << int(rng.integers(8))
    return {int(slot) for slot in spoiled}


@pytest.mark.parametrize("verified", [True, False], ids=["verified", "control"])
def test_every_changed_block_is_refused_and_no_other(verified: bool) -> None:
    rng = np.random.default_rng(0)
    layout = packed(BLOCKS, [4096, 65536, 100])
    fill_random(layout)
    before = contents(layout)
    with engine_for(layout, BLOCKS) as (copies, slab):
        engine: CopyEngine = VerifyingEngine(copies, layout, slab, 4) if verified else copies
        spoiled = store_and_spoil(engine, slab, rng)
        for region in layout.regions:
            region.fill_(0x11)
        engine.submit([order(10 + slot, LOAD, [slot], [slot]) for slot in range(BLOCKS)])
        answers = wait_answers(engine, BLOCKS, within_s=60)
        refused = {answer.job_id - 10 for answer in answers if answer.outcome is Outcome.FAILED}
        told = {slot for answer in answers for slot in answer.corrupt_slots}
        after = contents(layout)
        assert refused == told == (spoiled if verified else set())
        expected = before.clone()
        expected[sorted(refused)] = 0x11
        changed = set(torch.nonzero((after != expected).any(1)).flatten().tolist())
        assert changed == (set() if verified else spoiled)
        if verified:
            assert engine.close(60)
