"""A flow of copies that never runs dry: what `bench transfer` measures, alone and beside a model's steps."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from kvortex.errors import KVortexError
from kvortex.messages import CopyOrder, Direction, JobId, Outcome
from kvortex.transfer.base import CopyEngine, Fence
from kvortex.transfer.model_step import ModelStep

ORDER_BYTES: Final = 64 << 20
DEADLINE_S: Final = 60.0

_AHEAD_S: Final = 0.1
"""Of copies submitted and not answered: more than a step takes."""

_ALONE_S: Final = 0.3
_WARM_UP_STEPS: Final = 3
_STEPS: Final = 20
_MAX_S: Final = 2.0
"""Of one measurement, where copies are so slow that steps take long."""

_POLL_S: Final = 0.0002


@dataclass(frozen=True, slots=True)
class Beside:
    """Copies while a model runs.

    Attributes:
        bandwidth: bytes a second.
        mean_step: duration of a model's step meanwhile, over that of one alone.
        worst_step: the same of the longest.
    """

    bandwidth: float
    mean_step: float
    worst_step: float


class Flow:
    """Blocks to load and others to store, in random order, over and over.

    Args:
        engine: has at least two blocks and as many slots, and no other orders.
    """

    def __init__(self, engine: CopyEngine, num_blocks: int, block_bytes: int) -> None:
        self._engine = engine
        self._block_bytes = block_bytes
        rng = np.random.default_rng(0)
        blocks, slots = rng.permutation(num_blocks), rng.permutation(num_blocks)
        half = num_blocks // 2
        # Both at once touch different blocks and slots.
        self._pairs = {
            Direction.LOAD: (blocks[:half], slots[:half]),
            Direction.STORE: (blocks[half:], slots[half:]),
        }
        self._ids = itertools.count()
        self._under_way = dict.fromkeys(Direction, 0)

    def alone(self, directions: Sequence[Direction]) -> float:
        """Bytes a second while nothing else runs."""
        # A first look at the rate, which also wakes up what sleeps: as much as two orders each.
        begin_s = time.perf_counter()
        fence = self._engine.fence()
        endless = {direction: self._orders(direction) for direction in directions}
        for orders in endless.values():
            for _ in range(2):
                self._submit(next(orders), fence)
        num_bytes = self._drain()
        ahead_bytes = num_bytes / (time.perf_counter() - begin_s) * _AHEAD_S
        begin_s = time.perf_counter()
        num_bytes = 0
        while (elapsed_s := time.perf_counter() - begin_s) < _ALONE_S:
            num_bytes += self._top_up(endless, ahead_bytes, fence)
            time.sleep(_POLL_S)
        self._drain()
        return num_bytes / elapsed_s

    def beside(self, directions: Sequence[Direction], step: ModelStep, step_s: float, alone: float) -> Beside:
        """Of steps that always have more to copy beside them.

        Args:
            step_s: of a step alone.
            alone: bytes a second without steps.
        """
        endless = {direction: self._orders(direction) for direction in directions}
        num_bytes = 0

        def meanwhile() -> None:
            nonlocal num_bytes
            num_bytes += self._top_up(endless, alone * _AHEAD_S, fence)

        with torch.cuda.stream(step.stream):
            # No step touches the blocks, so that none has to be waited for.
            fence = self._engine.fence()
            for _ in range(_WARM_UP_STEPS):
                step.run(meanwhile)
            num_bytes, begin_s = 0, time.perf_counter()
            seconds: list[float] = []
            while len(seconds) < _STEPS and time.perf_counter() < begin_s + _MAX_S:
                seconds.append(step.run(meanwhile))
            rate = num_bytes / (time.perf_counter() - begin_s)
            self._drain()
        return Beside(rate, statistics.mean(seconds) / step_s, max(seconds) / step_s)

    def _top_up(self, endless: dict[Direction, Iterator[CopyOrder]], ahead_bytes: float, fence: Fence) -> int:
        """Keeps so much submitted in each direction; bytes answered."""
        num_bytes = self._collect()
        for direction, orders in endless.items():
            while self._under_way[direction] < ahead_bytes:
                self._submit(next(orders), fence)
        return num_bytes

    def _submit(self, order: CopyOrder, fence: Fence) -> None:
        self._under_way[order.direction] += len(order.slots) * self._block_bytes
        self._engine.submit([order], after=fence)

    def _collect(self) -> int:
        """Bytes answered since the last call."""
        num_bytes = 0
        for answer in self._engine.poll():
            if answer.outcome is not Outcome.DONE:
                raise KVortexError(f"a copy failed: {answer.detail}")
            self._under_way[answer.direction] -= answer.num_bytes
            num_bytes += answer.num_bytes
        return num_bytes

    def _drain(self) -> int:
        num_bytes = 0
        while sum(self._under_way.values()):
            num_bytes += self._collect()
            time.sleep(_POLL_S)
        return num_bytes

    def _orders(self, direction: Direction) -> Iterator[CopyOrder]:
        blocks, slots = self._pairs[direction]
        count = max(1, min(ORDER_BYTES // self._block_bytes, len(blocks)))
        while True:
            for begin in range(0, len(blocks) - count + 1, count):
                part = slice(begin, begin + count)
                yield CopyOrder(JobId(next(self._ids)), direction, blocks[part], slots[part], DEADLINE_S)
