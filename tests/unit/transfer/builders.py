"""Layouts, orders and byte checks for the copy engine's tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvortex.messages import CopyOrder, Direction, JobId, JobResult, Outcome
from kvortex.transfer.base import CopyEngine, KVLayout

STORE, LOAD = Direction.STORE, Direction.LOAD


def packed(num_blocks: int, fragment_bytes: Sequence[int]) -> KVLayout:
    """One contiguous region for each fragment."""
    return KVLayout(tuple(torch.zeros(num_blocks, n, dtype=torch.uint8) for n in fragment_bytes))


def strided(num_blocks: int, fragment_bytes: Sequence[int], gap: int = 7) -> KVLayout:
    """Regions whose rows have `gap` foreign bytes before and after them."""
    wide = [torch.full((num_blocks, n + 2 * gap), 0xAA, dtype=torch.uint8) for n in fragment_bytes]
    return KVLayout(tuple(region[:, gap:-gap] for region in wide))


def order(job_id: int, direction: Direction, pairs: Sequence[tuple[int, int]], deadline_s: float = 60.0) -> CopyOrder:
    """`pairs` of (GPU block, slot)."""
    blocks = np.array([block for block, _ in pairs], dtype=np.int64)
    slots = np.array([slot for _, slot in pairs], dtype=np.int64)
    return CopyOrder(JobId(job_id), direction, blocks, slots, deadline_s)


def wait_answers(engine: CopyEngine, num_answers: int, within_s: float = 30.0) -> list[JobResult]:
    """Polls until that many answers came; fails loudly when they do not."""
    answers: list[JobResult] = []
    end_s = time.monotonic() + within_s
    while len(answers) < num_answers:
        answers += engine.poll()
        assert time.monotonic() < end_s, f"{len(answers)} of {num_answers} answers: {answers}"
        time.sleep(0.0002)
    assert len(answers) == num_answers, answers
    return answers


def wait_until(happened: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(30_000):
        if happened():
            return
        pause.wait(0.001)
    raise AssertionError("it did not happen")


def fill_random(layout: KVLayout, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for region in layout.regions:
        region.copy_(torch.randint(0, 256, region.shape, dtype=torch.uint8, generator=generator))


def block_contents(layout: KVLayout, block: int) -> bytes:
    """Every byte of a block, regions one after the other."""
    return b"".join(region[block].numpy().tobytes() for region in layout.regions)


def set_block(layout: KVLayout, block: int, contents: bytes) -> None:
    begin = 0
    for region in layout.regions:
        end = begin + region.shape[1]
        region[block] = torch.frombuffer(bytearray(contents[begin:end]), dtype=torch.uint8)
        begin = end


def check_round_trip(engine: CopyEngine, layout: KVLayout, num_slots: int, seed: int = 0) -> None:
    """Stores every block, wipes the device, loads each block elsewhere: every byte must be back."""
    rng = np.random.default_rng(seed)
    num_blocks = layout.num_blocks
    fill_random(layout, seed)
    before = [block_contents(layout, block) for block in range(num_blocks)]
    slots = rng.permutation(num_slots)[:num_blocks]
    stored_from, loaded_to = rng.permutation(num_blocks), rng.permutation(num_blocks)

    engine.submit([order(1, STORE, list(zip(stored_from, slots, strict=True)))])
    (stored,) = wait_answers(engine, 1)
    assert stored.outcome is Outcome.DONE, stored
    assert stored.num_bytes == num_blocks * layout.block_bytes

    for region in layout.regions:
        region.fill_(0xEE)
    engine.submit([order(2, LOAD, list(zip(loaded_to, slots, strict=True)))])
    (loaded,) = wait_answers(engine, 1)
    assert loaded.outcome is Outcome.DONE, loaded

    wrong = [
        int(to)
        for to, block in zip(loaded_to, stored_from, strict=True)
        if block_contents(layout, int(to)) != before[int(block)]
    ]
    assert not wrong, f"{len(wrong)} of {num_blocks} blocks came back wrong: {wrong[:8]}"
