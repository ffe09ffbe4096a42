"""Pinning for real: in the background, beside a model that starts, exactly as much as was asked for, and given back."""

from __future__ import annotations

import numpy as np
import psutil
import torch

from kvortex.messages import Direction, Outcome
from kvortex.transfer.cuda import CudaCopyEngine
from kvortex.transfer.cuda_driver import CudaDriver
from kvortex.transfer.pinned import PinnedSlab
from tests.gpu.builders import COPY_ENGINE_ONLY, contents, fill_random, needs_gpu, order, packed
from tests.unit.transfer.builders import wait_answers

pytestmark = needs_gpu

GIB = 1 << 30


def test_the_slab_takes_what_was_asked_for_and_gives_it_back() -> None:
    process = psutil.Process()
    driver = CudaDriver(0)
    torch.zeros(1, device="cuda")
    before = process.memory_info().rss
    slab = PinnedSlab(1000, GIB // 1000, driver)
    assert slab.wait_pinned(60)
    taken = process.memory_info().rss - before
    assert abs(taken - slab.num_bytes) < 0.05 * slab.num_bytes, taken
    view = slab.tensor[999]
    assert view.is_pinned()
    slab.close()
    assert not view.is_pinned()
    del view
    left = process.memory_info().rss - before
    assert abs(left) < 0.05 * GIB, left


def test_orders_are_served_while_the_slab_is_being_pinned() -> None:
    layout = packed(512, [1 << 20])
    fill_random(layout)
    driver = CudaDriver(0)
    slab = PinnedSlab(2048, 1 << 20, driver)
    engine = CudaCopyEngine(layout, slab, 4, driver, COPY_ENGINE_ONLY)
    seen_pinning = slab.is_pinning
    # The last slots first: this order waits for all of the slab.
    slots = np.arange(2047, 2047 - 512, -1)
    engine.submit([order(1, Direction.STORE, np.arange(512), slots)])
    (answer,) = wait_answers(engine, 1)
    assert answer.outcome is Outcome.DONE, answer
    assert seen_pinning
    assert torch.equal(slab.tensor[slots.copy()], contents(layout))
    assert engine.close(60)
    slab.close()


def test_pinning_does_not_break_the_capture_of_a_cuda_graph() -> None:
    left, out = torch.randn(512, 512, device="cuda"), torch.empty(512, 512, device="cuda")
    torch.mm(left, left, out=out)
    torch.cuda.synchronize()
    slab = PinnedSlab(4, GIB // 2, CudaDriver(0))
    num_captures = 0
    while slab.is_pinning or not num_captures:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                torch.mm(left, left, out=out)
        graph.replay()
        num_captures += 1
    torch.cuda.synchronize()
    assert slab.wait_pinned(60), slab.refusal
    assert torch.allclose(out, left @ left)
    slab.close()
