"""A load that no request waits for, in the worker: behind the others, told to the scheduler side only."""

from __future__ import annotations

import copy
import importlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from kvortex.messages import JobId, Outcome, StepPlan, StepReport
from tests.unit.vllm_plugin.worker_bench import FakeEngine, WorkerSide, load, make_worker


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def worker(engine: FakeEngine) -> Any:
    return make_worker(engine)


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
