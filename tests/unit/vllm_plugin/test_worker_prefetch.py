"""A load that no request waits for, in the worker: behind the others, told to the scheduler side only. And `settle`."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvortex.messages import CopyOrder, Direction, JobId, JobResult, Outcome, StepPlan, StepReport

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


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def worker(engine: FakeEngine) -> Any:
    worker = WorkerSide(SimpleNamespace(), SimpleNamespace(kv_cache_groups=[None]), 0)
    worker._engine = engine
    return worker


def step(worker: Any, plan: StepPlan) -> None:
    worker.bind(plan)
    worker.begin_forward(None)
    worker.end_forward()
    worker.collect()


def test_it_is_submitted_behind_the_loads_of_requests(worker: Any, engine: FakeEngine) -> None:
    step(worker, StepPlan(loads=[load(2)], prefetches=[load(1)], requests={JobId(2): "r"}))
    assert [order.job_id for order in engine.submitted] == [2, 1]


def test_the_gpus_engine_is_told_while_the_steps_kernels_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = importlib.import_module("kvortex.transfer.cuda")
    told: list[Any] = []
    monkeypatch.setattr(cuda, "open_cuda", lambda *arguments: told.append(arguments[-1]) or (None, FakeEngine()))
    settings = SimpleNamespace(num_streams=4)
    worker = WorkerSide(SimpleNamespace(num_slots=1, settings=settings), SimpleNamespace(kv_cache_groups=[None]), 0)
    region = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    _, worker._engine = worker._open_engine(SimpleNamespace(regions=[region]))
    (is_launching,) = told
    assert not is_launching()
    for end in (worker.end_forward, worker.collect):  # with a forward pass and without one
        worker.bind(StepPlan())
        assert is_launching()
        end()
        assert not is_launching()
        worker.collect()


def test_it_is_told_late_and_the_load_of_a_request_is_not(worker: Any, engine: FakeEngine) -> None:
    step(worker, StepPlan(loads=[load(2)], prefetches=[load(1)], requests={JobId(2): "r"}))
    assert worker.may_report_late
    engine.end(Outcome.DONE)
    late = worker.take_late_report()
    assert [result.job_id for result in late.results[0]] == [1]
    assert not worker.may_report_late
    assert worker.take_late_report() is None
    worker.collect()
    assert [result.job_id for result in worker.take_report().results[0]] == [2]


def test_a_worker_in_another_process_is_not_asked_again(worker: Any) -> None:
    metadata = importlib.import_module("kvortex.vllm_plugin.connector").KVortexWorkerMetadata
    sent = copy.copy(metadata(StepReport(step_seconds={3: 0.5}), worker.take_late_report))  # by `__reduce__`, as sent
    assert (sent.report.step_seconds, sent.later) == ({3: 0.5}, None)


def test_another_thread_is_told_nothing(worker: Any, engine: FakeEngine) -> None:
    step(worker, StepPlan(prefetches=[load(1)]))
    engine.end(Outcome.DONE)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(worker.take_late_report).result() is None
    assert worker.take_late_report() is not None


@pytest.mark.parametrize("outcome", [Outcome.DONE, Outcome.FAILED, Outcome.TIMED_OUT])
def test_no_request_hears_of_it_and_the_scheduler_side_once(worker: Any, engine: FakeEngine, outcome: Outcome) -> None:
    step(worker, StepPlan(loads=[load(2)], prefetches=[load(1)], requests={JobId(2): "r"}))
    assert worker.take_finished() == ({"r"}, set())  # promised
    engine.submitted = [order for order in engine.submitted if order.job_id == 1]
    engine.end(outcome)
    step(worker, StepPlan())
    assert worker.take_finished() == (set(), set())
    assert worker.take_invalid_blocks() == set()
    results = worker.take_report().results[0]
    assert [(result.job_id, result.outcome) for result in results] == [(1, outcome)]
    assert not worker._unpromisable


def test_the_wait_for_promised_loads_is_not_timed_as_the_steps_computing(worker: Any, engine: FakeEngine) -> None:
    order_of_calls: list[str] = []

    class Watch:
        def stop(self) -> None:
            order_of_calls.append("stop")

        def seconds(self) -> float | None:
            return None

    def stopwatch() -> Watch:
        order_of_calls.append("start")
        return Watch()

    engine.stopwatch = stopwatch  # type: ignore[attr-defined]
    engine.hold_kernels = lambda job_ids: order_of_calls.append(f"hold {job_ids}")  # type: ignore[attr-defined]
    step(worker, StepPlan(loads=[load(2)], requests={JobId(2): "r"}))  # promised at its end
    engine.submitted = []
    step(worker, StepPlan(needed=[JobId(2)], timed_as=7))
    assert order_of_calls == ["hold [2]", "start", "stop"]


class SlowEngine(FakeEngine):
    """Ends what it has at the third question, or never."""

    def __init__(self, *, ends: bool) -> None:
        super().__init__()
        self.ends = ends
        self.num_polls = 0

    def poll(self) -> list[JobResult]:
        self.num_polls += 1
        if self.ends and self.num_polls == 3:
            self.end(Outcome.DONE)
        return super().poll()


def with_copies(worker: Any, engine: FakeEngine) -> None:
    """A step that loads for a request, prefetches and stores."""
    worker._engine = engine
    store = CopyOrder(JobId(3), Direction.STORE, np.array([3]), np.array([3]), 30.0)
    worker.bind(StepPlan(loads=[load(2)], prefetches=[load(1)], stores=[store], requests={JobId(2): "r"}))
    worker.begin_forward(None)
    worker.submit_stores()


def test_a_worker_that_settles_waits_for_every_copy_and_tells_of_them_in_the_next_step(worker: Any) -> None:
    with_copies(worker, SlowEngine(ends=True))
    assert worker.take_late_report() is None
    assert worker.settle(30)
    assert not worker._is_launching
    assert worker.engine.num_polls == 3
    assert sorted(result.job_id for result in worker.take_report().results[0]) == [1, 2, 3]
    assert worker.take_finished() == ({"r"}, set())


def test_it_waits_for_nothing_twice_that_was_set_aside(worker: Any, engine: FakeEngine) -> None:
    with_copies(worker, engine)
    engine.end(Outcome.DONE)
    assert sorted(result.job_id for result in worker.take_late_report().results[0]) == [1, 3]
    assert worker.settle(30)
    assert [result.job_id for result in worker.take_report().results[0]] == [2]


def test_it_does_not_wait_for_ever_and_not_for_another_threads_engine(
    worker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with_copies(worker, SlowEngine(ends=False))
    with ThreadPoolExecutor(1) as other:
        assert other.submit(worker.settle, 30).result()
    assert worker.engine.num_polls == 0
    assert not worker.settle(0.01)
    assert "copies were still under way after 0 s" in caplog.text
