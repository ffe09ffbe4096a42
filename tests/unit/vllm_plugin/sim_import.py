"""Imports the simulated engine for a test module, or skips it where vLLM is not there or too old."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

import pytest


def import_sim() -> ModuleType:
    """`sim_steps`. vLLM warns of itself and of torch, which is not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("vllm", reason="vLLM is not installed")
        compat = importlib.import_module("kvortex.vllm_plugin.compat")
        if not compat.REPORTS_FAILED_REQUESTS:
            pytest.skip("the stand-in for a model runner calls the hooks of later versions", allow_module_level=True)
        return importlib.import_module("tests.unit.vllm_plugin.sim_steps")
