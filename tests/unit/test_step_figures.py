"""What `benchmarks/step_figures.py` says of a trace."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def figures() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        return importlib.import_module("step_figures")


def step(requests: int, tokens: int, gpu_ms: float, **copies: int) -> dict[str, Any]:
    ordered = {"stores": 0, "step_loads": 0, "loads": 0} | copies
    return {
        "at_s": 0.0,
        "requests": requests,
        "tokens": tokens,
        "host_ms": {"schedule": 1.0},
        "gpu_ms": gpu_ms,
        **ordered,
    }


def test_a_kind_is_what_is_computed_and_which_copies_were_ordered(figures: Any) -> None:
    def kind(requests: int, tokens: int, **copies: int) -> str:
        return "".join(figures.kind_of(step(requests, tokens, 1.0, **copies), (501, 699), 4000))

    assert kind(3, 3) == "decode"
    assert kind(3, 643, stores=2, loads=1) == "turn+store+load"
    assert kind(2, 8192, step_loads=1) == "prompt+step-load"
    assert kind(2, 60) == "part"


def test_steps_are_held_against_those_of_as_many_requests(figures: Any) -> None:
    plain = [step(requests, requests, 10.0 * requests) for requests in (1, 2) for _ in range(3)]
    stored = [step(2, 2, 21.0, stores=1), step(1, 1, 10.5, stores=1), step(9, 9, 99.0, stores=1)]
    rows = figures.beyond(stored, plain)
    assert [row["gpu_ms"] for row in rows] == [1.0, 0.5]
    assert [row["schedule"] for row in rows] == [0.0, 0.0]


def test_a_line_that_was_cut_off_ends_the_trace(figures: Any, tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text(json.dumps(step(1, 1, 1.0)) + "\n" + '{"at_s": 1')
    assert len(figures.read(file)) == 1
