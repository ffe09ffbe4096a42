"""A worker's side with a copy engine that is worked by hand."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvortex.messages import CopyOrder, Direction, JobId, JobResult, Outcome

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed")
    WorkerSide = importlib.import_module("kvortex.vllm_plugin.worker").WorkerSide


class FakeEngine:
    """Promises every load at once, as a GPU's engine does with short ones, and ends them when told."""

    link = None

    def __init__(self) -> None:
        self.submitted: list[CopyOrder] = []
        self.ended: list[JobResult] = []

    def fence(self) -> str:
        return "before this step's kernels"

    def submit(self, orders: list[CopyOrder], *, after: Any = None) -> None:
        assert after == "before this step's kernels" or orders[0].direction is Direction.STORE
        self.submitted += orders

    def promise(self, window_s: float, never: Collection[JobId] = ()) -> list[JobId]:
        return [order.job_id for order in self.submitted if order.job_id not in never]

    def poll(self) -> list[JobResult]:
        ended, self.ended = self.ended, []
        return ended

    def end(self, outcome: Outcome) -> None:
        self.ended = [JobResult(order.job_id, order.direction, outcome, 0.01, 1) for order in self.submitted]
        self.submitted = []


def load(number: int) -> CopyOrder:
    return CopyOrder(JobId(number), Direction.LOAD, np.array([number]), np.array([number]), 30.0)


def make_worker(engine: FakeEngine) -> Any:
    worker = WorkerSide(SimpleNamespace(), SimpleNamespace(kv_cache_groups=[None]), 0)
    worker._engine = engine
    return worker
