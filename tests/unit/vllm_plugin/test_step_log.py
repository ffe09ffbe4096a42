"""Who runs, and which steps are timed."""

from __future__ import annotations

import importlib
import warnings
from types import SimpleNamespace

import pytest

from kvortex.cache.costs import prompt_work

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed")
    step_log = importlib.import_module("kvortex.vllm_plugin.step_log")
    StepLog, STEPS_REMEMBERED = step_log.StepLog, step_log.STEPS_REMEMBERED


def scheduled(decoding=(), prefilling=(), new=()):
    """A SchedulerOutput's fields; `prefilling` and `new` are (request, tokens computed before, tokens)."""
    counts = {**dict.fromkeys(decoding, 1), **{r: n for r, _, n in (*prefilling, *new)}}
    cached = [(r, 100) for r in decoding] + [(r, begin) for r, begin, _ in prefilling]
    return SimpleNamespace(
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[r for r, _ in cached], num_computed_tokens=[begin for _, begin in cached]
        ),
        scheduled_new_reqs=[SimpleNamespace(req_id=r, num_computed_tokens=begin) for r, begin, _ in new],
    )


def test_what_a_step_computes_of_prompts() -> None:
    log = StepLog()
    number = log.begin(scheduled(["a", "b"], [("c", 512, 100)], [("d", 64, 30)]), completions=0, loads=False)
    assert number > 0
    assert log.work_of(number) == prompt_work(512, 612) + prompt_work(64, 94)
    assert log.work_of(number) is None


def test_steps_that_load_or_do_nothing_are_not_timed() -> None:
    log = StepLog()
    assert log.begin(scheduled(new=[("a", 0, 50)]), completions=0, loads=True) == 0
    assert log.begin(scheduled(), completions=0, loads=False) == 0


def test_of_steps_without_prompts_some_are_timed() -> None:
    log = StepLog()
    timed = [log.begin(scheduled(["a"]), completions=0, loads=False) for _ in range(160)]
    assert sum(number > 0 for number in timed) == 10


def test_who_runs() -> None:
    log = StepLog()
    log.begin(scheduled(["a", "b"], [("c", 0, 9)]), completions=0, loads=False)
    assert log.num_running == 3
    log.request_ended("b")
    log.request_ended("unknown")
    assert log.num_running == 2
    log.begin(scheduled(["a"]), completions=0, loads=False)
    assert log.num_running == 1


def test_what_is_never_reported_is_not_kept_for_ever() -> None:
    log = StepLog()
    first = log.begin(scheduled(new=[("a", 0, 50)]), completions=0, loads=False)
    for i in range(100):
        log.begin(scheduled(new=[(f"r{i}", 0, 50)]), completions=0, loads=False)
    assert log.work_of(first) is None


def test_a_block_was_written_by_the_step_in_which_it_was_completed() -> None:
    log = StepLog()
    log.begin(scheduled(new=[("a", 0, 50)]), completions=3, loads=False)
    log.begin(scheduled(["a"]), completions=3, loads=False)
    log.begin(scheduled(["a"]), completions=4, loads=False)
    assert [log.written_by(completion) for completion in range(6)] == [1, 1, 1, 3, 4, 4]


def test_of_steps_long_ago_one_that_came_later_is_named() -> None:
    log = StepLog()
    for number in range(1, 101):
        log.begin(scheduled(["a"]), completions=number, loads=False)
    assert log.written_by(0) == 101 - STEPS_REMEMBERED
    assert log.written_by(98) == 99
