"""The scheduler side hears of a link once, and again when it has changed."""

from __future__ import annotations

import importlib
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from kvortex.messages import LinkFacts

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM and its imports deprecate is not ours
    pytest.importorskip("vllm", reason="vLLM is not installed")
    WorkerSide = importlib.import_module("kvortex.vllm_plugin.worker").WorkerSide


def told_by(side: Any, link: LinkFacts | None) -> LinkFacts | None:
    side._engine = SimpleNamespace(link=link)
    report = side.take_report()
    return None if report is None else report.links[3]


def test_a_link_is_told_again_only_when_it_is_another() -> None:
    side = WorkerSide(SimpleNamespace(), SimpleNamespace(kv_cache_groups=[None]), 3)
    assert told_by(side, None) is None
    assert told_by(side, LinkFacts(100.0, by_layer=False)) == LinkFacts(100.0, by_layer=False)
    for rate in (100.0, 104.0, 96.0, 104.0):
        assert told_by(side, LinkFacts(rate, by_layer=False)) is None
    assert told_by(side, LinkFacts(106.0, by_layer=False)) == LinkFacts(106.0, by_layer=False)
    assert told_by(side, LinkFacts(102.0, by_layer=False)) is None
    assert told_by(side, LinkFacts(106.0, by_layer=True)) == LinkFacts(106.0, by_layer=True)
