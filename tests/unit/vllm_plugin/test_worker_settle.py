"""A worker that waits for whatever is under way: vLLM may take the memory away next."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kvortex.messages import CopyOrder, Direction, JobId, JobResult, Outcome, StepPlan
from tests.unit.vllm_plugin.worker_bench import FakeEngine, load, make_worker


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


def with_copies(engine: FakeEngine) -> Any:
    """A worker whose step loads for a request, prefetches and stores."""
    worker = make_worker(engine)
    store = CopyOrder(JobId(3), Direction.STORE, np.array([3]), np.array([3]), 30.0)
    worker.bind(StepPlan(loads=[load(2)], prefetches=[load(1)], stores=[store], requests={JobId(2): "r"}))
    worker.begin_forward(None)
    worker.submit_stores()
    return worker


def test_a_worker_that_settles_waits_for_every_copy_and_tells_of_them_in_the_next_step() -> None:
    worker = with_copies(SlowEngine(ends=True))
    assert worker.take_late_report() is None
    assert worker.settle(30)
    assert not worker._is_launching
    assert worker.engine.num_polls == 3
    assert sorted(result.job_id for result in worker.take_report().results[0]) == [1, 2, 3]
    assert worker.take_finished() == ({"r"}, set())


def test_it_waits_for_nothing_twice_that_was_set_aside() -> None:
    engine = FakeEngine()
    worker = with_copies(engine)
    engine.end(Outcome.DONE)
    assert sorted(result.job_id for result in worker.take_late_report().results[0]) == [1, 3]
    assert worker.settle(30)
    assert [result.job_id for result in worker.take_report().results[0]] == [2]


def test_it_does_not_wait_for_ever_and_not_for_another_threads_engine(caplog: pytest.LogCaptureFixture) -> None:
    worker = with_copies(SlowEngine(ends=False))
    with ThreadPoolExecutor(1) as other:
        assert other.submit(worker.settle, 30).result()
    assert worker.engine.num_polls == 0
    assert not worker.settle(0.01)
    assert "copies were still under way after 0 s" in caplog.text


def test_a_worker_that_has_closed_has_nothing_to_wait_for() -> None:
    worker = with_copies(SlowEngine(ends=False))
    worker._engine.close = lambda timeout_s: True
    worker.close()
    assert worker.settle(30)
