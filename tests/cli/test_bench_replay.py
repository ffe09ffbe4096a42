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


def test_larger_blocks_a_smaller_dtype_and_a_measured_speed(kvortex: Any, trace: Path) -> None:
    """2 x 10 blocks of 1,024 tokens a conversation; in 8 bits twice as many fit."""
    options = ("--block-size", "1024", "--kv-cache-dtype", "fp8", "--prefill-speed", "10000", "--warm-up", "0.1")
    result = kvortex("bench", "replay", str(trace), *options, "--ram", "16GiB", "--policy", "lru", "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert (document["block_tokens"], document["token_bytes"], document["warm_up"]) == (1024, 65536, 0.1)
    assert document["prefill"] == "at 10,000 tokens/s"
    (played,) = document["results"]
    assert (played["requests"], played["ram_blocks"], played["hit_rate"]) == (216, 256, 1)
    assert played["prefill_saved_s"] == pytest.approx(played["prefill_s"])
    assert played["prefill_s"] == pytest.approx(216 * 20 * 512 / 10000)


def test_prefill_time_is_estimated_and_the_table_says_how(kvortex: Any, trace: Path) -> None:
    result = kvortex("bench", "replay", str(trace), "--ram", "40GiB", "--policy", "lru")
    assert "prefill: estimated from 6.98 billion weights at 400 TFLOP/s" in result.out
    assert " min, 100.0%" in " ".join(result.out.split()) or " s, 100.0%" in " ".join(result.out.split())


def test_a_page_shows_the_hit_rate_over_the_size(kvortex: Any, trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    sizes = ("--ram", "25GiB", "--ram", "40GiB")
    result = kvortex(
        "bench", "replay", str(trace), *sizes, "--html", str(page), "--policy", "lru", "--policy", "belady"
    )
    assert result.code == 0, result.err
    text = page.read_text()
    assert "● lru, ■ belady" in text
    assert text.count("<polyline") == 2
    for size in ("26.84 GB", "42.95 GB"):
        assert f">{size}</text>" in text
    assert "<script" not in text
    assert "http" not in text


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
        (("--block-size", "128"), "--block-size 128: the trace tells prompts apart every 512 tokens"),
        (("--block-size", "0"), "--block-size 0: "),
        (("--kv-cache-dtype", "fp4"), "--kv-cache-dtype fp4: not known"),
        (("--prefill-speed", "0"), "--prefill-speed: takes tokens a second, more than 0"),
        (("--prefill-speed", "nan"), "--prefill-speed: "),
        (("--warm-up", "1"), "--warm-up: takes a share from 0 to below 1"),
        (("--warm-up", "nan"), "--warm-up: "),
        (("--html", "none/page.html"), "--html none/page.html cannot be written"),
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
    assert "over the requests after the warm-up" in " ".join(done.stdout.split())
    assert set(json.loads(done.stderr)).isdisjoint(HEAVY)
