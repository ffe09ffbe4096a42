"""What prefetch costs where it cannot help, in virtual time: a small engine whose link and steps are both busy."""

from __future__ import annotations

import argparse
import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest

from kvortex.cache.prefetch.budget import PrefetchBudget
from kvortex.cache.prefetch.planner import PrefetchPlanner
from kvortex.vllm_plugin.prefetcher import Prefetcher

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed")
    compat = importlib.import_module("kvortex.vllm_plugin.compat")
    if not compat.REPORTS_FAILED_REQUESTS:
        pytest.skip("the play calls the hooks of later versions", allow_module_level=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
        adversaries = importlib.import_module("virtual_adversaries")

LEAST_THROUGHPUT = 0.99
SMALL = {
    "vram_gb": 4.6,
    "ram_gb": 100.0,
    "link_gb_s": 10.0,
    "first": 3072,
    "added": 256,
    "answer": 16,
    "sessions": 24,
    "concurrency": 4,
    "warm_up": 24,
    "requests": 120,
    "hints_a_s": 30.0,
}


def played(adversary: str, *, prefetch: bool) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    adversaries.add_load_options(parser)
    parser.set_defaults(**SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row: dict[str, Any] = adversaries.play(
            parser.parse_args([]), adversaries.Adversary(adversary), 0, prefetch=prefetch
        )
    return row


def throughput(adversary: str) -> tuple[float, dict[str, Any]]:
    """Of prefetch off, and the row with it on."""
    on = played(adversary, prefetch=True)
    ratio: float = adversaries.compared([played(adversary, prefetch=False)], [on])["throughput"]
    return ratio, on


@pytest.mark.parametrize("adversary", ["never", "memoryless", "hints"])
def test_where_prefetch_cannot_help_it_costs_no_throughput(adversary: str) -> None:
    ratio, on = throughput(adversary)
    assert ratio >= LEAST_THROUGHPUT
    assert on["issued"] > 0 or adversary == "never", "nothing was tried"


def test_without_its_bounds_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: whatever is hinted is brought, in place of what others use, and before what they load."""
    plan = PrefetchPlanner.plan
    monkeypatch.setattr(PrefetchBudget, "allowed", lambda self, _cause: self._capacity_blocks)
    monkeypatch.setattr(
        PrefetchPlanner, "_room", lambda self, **_running: min(self._chunk_blocks, self._vram.free_blocks)
    )
    monkeypatch.setattr(
        PrefetchPlanner,
        "plan",
        lambda self, now, *, running, requests_load: plan(self, now, running=running, requests_load=False),
    )
    monkeypatch.setattr(Prefetcher, "takeable", lambda _self, count, *_of: count)
    ratio, on = throughput("hints")
    assert on["wasted"] > 0
    assert ratio < LEAST_THROUGHPUT
