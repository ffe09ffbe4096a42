"""The table of vLLM's options, against the vLLM that is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvortex.config.vllm_install import NEWEST, OLDEST, installed_vllm
from kvortex.config.vllm_options import Kind, ValueType, vllm_options

TOOL = Path(__file__).parents[3] / "tools" / "list_vllm_options.py"


def test_the_table_is_over_every_supported_version() -> None:
    supported = tuple(f"0.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1))
    assert vllm_options().versions == supported


def test_a_name_is_found_in_every_spelling() -> None:
    options = vllm_options()
    tensor_parallel = options.by_name["tensor_parallel_size"]
    assert options.find("tensor-parallel-size") is tensor_parallel
    assert options.find_short("-tp") is tensor_parallel
    assert options.find("device_memory_utilization") is options.by_name["gpu_memory_utilization"]
    assert options.find_negation("no-enforce-eager") is options.by_name["enforce_eager"]
    assert options.find_negation("disable_log_requests") is options.by_name["enable_log_requests"]
    assert options.find("disable_log_stats") is options.by_name["disable_log_stats"]
    assert options.find("tensor_paralel_size") is None


def test_an_option_that_a_version_does_not_have_is_told() -> None:
    options = vllm_options()
    names = ["max_model_len", "max_num_queued_tokens", "calculate_kv_scales"]
    assert [option.name for option in options.missing_in("0.26", names)] == ["max_num_queued_tokens"]
    assert [option.name for option in options.missing_in("0.32", names)] == ["calculate_kv_scales"]
    assert options.missing_in("0.99", names) == []


def test_no_name_means_two_options() -> None:
    options = vllm_options()
    names = [name for option in options for name in (option.name, *option.aliases, *option.short)]
    assert len(names) == len(set(names))
    negations = [f"no_{option.name}" for option in options if option.kind is Kind.SWITCH]
    assert not set(negations) & set(names)


@pytest.mark.skipif(installed_vllm() is None, reason="no vLLM is installed to compare with")
def test_the_installed_vllms_parser_has_no_option_that_the_table_lacks() -> None:
    dump = subprocess.run(
        [sys.executable, str(TOOL), "collect"],
        env={**os.environ, "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"},
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    collected = json.loads(dump.stdout)
    options = vllm_options()
    missing = options.missing_in(collected["version"], options.by_name)
    expected = set(options.by_name) - {option.name for option in missing}
    assert set(collected["options"]) == expected
    for name, option in collected["options"].items():
        known = options.by_name[name]
        assert known.kind.value == option["kind"], name
        assert list(ValueType).index(known.type) >= list(ValueType).index(ValueType(option["type"])), name
        assert set(option["aliases"]) <= set(known.aliases), name
        assert set(option["negations"]) <= set(known.negations), name
        assert set(option["short"]) <= set(known.short), name
