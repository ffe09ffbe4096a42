"""`kvortex bench replay` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvortex.config.settings import KVCacheSettings
from kvortex.replay.synthesis import round_robin
from tests.cli.test_help import HEAVY, run

GIB = 1 << 30


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """24 conversations of 64 MiB x 20 blocks, 30 GiB in all, ten times in turn."""
    path = tmp_path / "trace.jsonl"
    lines = [
        json.dumps(
            {
                "timestamp": int(request.arrival_s * 1000),
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": request.blocks,
            }
        )
        for request in round_robin(conversations=24, blocks_each=20, rounds=10)
    ]
    path.write_text("\n".join(lines))
    return path


def test_json_holds_one_result_for_each_size_and_policy(kvortex: Any, trace: Path) -> None:
    policies = ("--policy", "lru", "--policy", "belady", "--policy", "default")
    call = ("bench", "replay", str(trace), "--model", "llama-3.1-8b", "--ram", "25GiB", "--ram", "40GiB", "--vram", "0")
    result = kvortex(*call, *policies, "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert (document["requests"], document["token_bytes"]) == (240, 131072)
    results = {(r["policy"], r["ram_bytes"]): r for r in document["results"]}
    assert list(results) == [(p, s * GIB) for s in (25, 40) for p in ("lru", "belady", "default")]
    assert results["lru", 25 * GIB]["hit_rate"] == 0
    assert results["belady", 25 * GIB]["hit_rate"] == pytest.approx(25 / 30, abs=0.03)
    assert results["default", 25 * GIB]["hit_rate"] >= 25 / 30 / 2
    assert results["default", 25 * GIB]["eviction_policy"] == KVCacheSettings(ram_cache_size=1).eviction_policy
    for policy in ("lru", "belady", "default"):
        held = results[policy, 40 * GIB]
        assert held["hit_rate"] == 1
        assert held["hit_tokens"] == held["ram_hit_tokens"] == held["queried_tokens"] == 120 * 20 * 512
        assert (held["vram_hit_tokens"], held["bytes_stored"]) == (0, 0)
        assert held["bytes_loaded"] == 120 * 20 * 64 * 2**20


def test_a_table_names_policies_and_sizes(kvortex: Any, trace: Path) -> None:
    result = kvortex("bench", "replay", str(trace), "--ram", "40GiB", "--vram", "0GiB")
    assert result.code == 0, result.err
    for named in ("240 requests", "llama-3.1-8b", "lru", "belady", "default: adaptive", "100.00%", "42.95 GB"):
        assert named in result.out
    assert "Traceback" not in result.err


def test_vram_in_front_takes_its_share(kvortex: Any, trace: Path) -> None:
    result = kvortex("bench", "replay", str(trace), "--ram", "25GiB", "--vram", "40GiB", "--policy", "lru", "--json")
    (played,) = json.loads(result.out)["results"]
    assert played["vram_hit_tokens"] == played["hit_tokens"] == played["queried_tokens"]


def test_a_models_own_configuration_tells_its_size(kvortex: Any, trace: Path, tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 2048,
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    result = kvortex("bench", "replay", str(trace), "--model", str(tmp_path / "model"), "--policy", "lru", "--json")
    assert json.loads(result.out)["token_bytes"] == 2 * 16 * 8 * 64 * 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--policy", "lruu"), "did you mean lru?"),
        (("--policy", "magic"), "Known: adaptive, lru, priority, belady, default"),
        (("--ram", "12 bananas"), "--ram: "),
        (("--ram", "1MiB"), "less than one block"),
        (("--vram", "-1"), "--vram: "),
    ],
)
def test_a_wrong_option_is_named(kvortex: Any, trace: Path, arguments: tuple[str, ...], says: str) -> None:
    result = kvortex("bench", "replay", str(trace), *arguments)
    assert result.code == 2
    assert says in result.err
    assert result.out == ""


def test_a_bad_line_is_named(kvortex: Any, trace: Path) -> None:
    trace.write_text(trace.read_text() + "\n{}\n")
    result = kvortex("bench", "replay", str(trace))
    assert result.code == 2
    assert f"{trace}:241: timestamp is null" in result.err
    assert "hint: a line is" in result.err


def test_help_imports_nothing_heavy() -> None:
    done = run("bench", "replay", "--help")
    assert done.returncode == 0
    assert set(json.loads(done.stderr)).isdisjoint(HEAVY)
