"""`kvortex serve --dry-run`: what is resolved, from which source, and how it is shown."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DESIGN_YAML = """\
model: "meta-llama/Llama-3.3-70B-Instruct"
tensor_parallel_size: 2
gpu_memory_utilization: 0.85

kv_cache:
  backend: "kvortex"
  offload_threshold: 0.85      # start storing cold blocks when this share of VRAM KV is resident
  ram_cache_size: "128GB"      # host RAM for blocks, the whole server, split over its GPUs
  prefetch_enabled: true
  num_streams: 4
  block_size: 128              # tokens; becomes vLLM's --block-size
"""
COMMAND = [sys.executable, "-c", "from kvortex_cli.main import main; main()"]
SECRET = "sk-TESTSECRET"


def in_a_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False)


def dry_run(run: Any, *arguments: str) -> dict[str, Any]:
    result = run("serve", *arguments, "--dry-run", "--json")
    assert result.code == 0, result.err
    data: dict[str, Any] = json.loads(result.out)
    return data


@pytest.mark.usefixtures("clean_environment")
def test_the_designs_file_works_verbatim(tmp_path: Path) -> None:
    (tmp_path / "kvortex.yaml").write_text(DESIGN_YAML)
    done = in_a_process("serve", "--config", "kvortex.yaml", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["model"] == "meta-llama/Llama-3.3-70B-Instruct"
    assert data["values"]["kv_cache.ram_cache_size"]["value"] == 128_000_000_000
    assert data["values"]["kv_cache.ram_cache_size"]["source"] == "kvortex.yaml:8"
    assert data["values"]["kv_cache.idle_after"] == {
        "value": 30.0,
        "source": "default",
        "source_kind": "default",
    }
    assert (data["ranks"], data["ram_per_rank_bytes"]) == (2, 64_000_000_000)
    argv = data["vllm"]["argv"]
    assert argv[:3] == ["vllm", "serve", "meta-llama/Llama-3.3-70B-Instruct"]
    assert argv[argv.index("--tensor-parallel-size") + 1] == "2"
    assert argv[argv.index("--gpu-memory-utilization") + 1] == "0.85"
    assert argv[argv.index("--block-size") + 1] == "128"
    extra = json.loads(argv[argv.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    assert (extra["ram_cache_size"], extra["offload_threshold"], extra["num_streams"]) == (
        128 * 10**9,
        0.85,
        4,
    )
    assert {"kvortex", "kvortex_routes"} <= set(data["vllm"]["env"]["VLLM_PLUGINS"].split(","))


def test_the_table_has_the_model_first_each_source_and_the_vllm_line(kvortex: Any, tmp_path: Path) -> None:
    (tmp_path / "kvortex.yaml").write_text(DESIGN_YAML)
    result = kvortex("serve", "-c", "kvortex.yaml", "--dry-run", "--seed", "7")
    assert result.code == 0
    rows = [" ".join(line.split()) for line in result.out.splitlines() if line.strip()]
    assert rows[0] == "setting value from"
    assert rows[2] == "model meta-llama/Llama-3.3-70B-Instruct kvortex.yaml:1"
    assert "seed 7 --seed" in rows
    assert "kv_cache.ram_cache_size 128 GB in total, 64 GB per rank kvortex.yaml:8" in rows
    assert "kv_cache.offload_batch 256 MB default" in rows
    words = shlex.split(rows[-1])
    assert words[0].startswith("VLLM_PLUGINS=")
    assert words[1:4] == ["vllm", "serve", "meta-llama/Llama-3.3-70B-Instruct"]


@pytest.mark.parametrize(
    "line",
    [
        "serve M --config {f}",
        "serve M --config={f}",
        "serve M -c {f}",
        "serve --config {f} M",
        "serve --config={f} M",
        "serve -c {f} M",
        "serve --dtype auto -c {f} M",
    ],
)
def test_every_form_of_config_means_the_same(kvortex: Any, tmp_path: Path, line: str) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    file = folder / "my config.yaml"
    file.write_text("served_model_name: [a, b]\nhf_overrides: {rope: {factor: 2}}\ntensor_parallel_size: '2'\n")
    data = dry_run(kvortex, *shlex.split(line.format(f=shlex.quote(str(file))))[1:])
    argv = data["vllm"]["argv"]
    assert argv[2] == "M"
    assert argv[argv.index("--served-model-name") + 1 :][:2] == ["a", "b"]
    assert json.loads(argv[argv.index("--hf-overrides") + 1]) == {"rope": {"factor": 2}}
    assert data["values"]["tensor_parallel_size"]["value"] == 2
    assert data["values"]["served_model_name"]["source"] == f"{file}:1"


def test_each_value_tells_which_of_the_five_sources_it_is_from(
    kvortex: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f.yaml").write_text("seed: 1\nkv_cache: {num_streams: 2, block_size: 64}\n")
    monkeypatch.setenv("KVORTEX_NUM_STREAMS", "3")
    values = dry_run(kvortex, "M", "-c", "f.yaml", "--set", "kv_cache.block_size=32")["values"]
    told = {name: (values[name]["source"], values[name]["source_kind"]) for name in values}
    assert told["model"] == ("MODEL", "command line")
    assert told["kv_cache.block_size"] == ("--set kv_cache.block_size", "command line")
    assert told["kv_cache.num_streams"] == ("KVORTEX_NUM_STREAMS", "environment")
    assert told["seed"] == ("f.yaml:1", "file")
    assert told["kv_cache.ram_cache_size"][1] == "hardware"
    assert told["kv_cache.idle_after"] == ("default", "default")


def test_a_machine_too_small_is_a_warning_in_a_dry_run_and_a_refusal_in_a_real_one(kvortex: Any) -> None:
    arguments = ["serve", "M", "--set", "kv_cache.ram_cache_size=4PB"]
    dry = kvortex(*arguments, "--dry-run")
    assert dry.code == 0
    assert "warning: --set kv_cache.ram_cache_size: is 4 PB" in dry.err
    real = kvortex(*arguments, "--uds", "s")
    assert (real.code, real.out) == (2, "")
    assert "error: --set kv_cache.ram_cache_size: is 4 PB" in real.err


def test_a_request_log_that_cannot_be_is_refused_at_its_line(kvortex: Any, tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("model: M\nkv_cache:\n  ram_cache_size: 1MB\n  request_log: none/log.jsonl\n")
    real = kvortex("serve", "-c", "f.yaml", "--uds", "s")
    assert (real.code, real.out) == (2, "")
    assert real.err.splitlines()[-2:] == [
        "error: f.yaml:4: kv_cache.request_log: there is no folder none",
        "hint: make it, or give another file",
    ]
    (tmp_path / "none").mkdir()
    values = dry_run(kvortex, "-c", "f.yaml", "--set", "kv_cache.request_log_size=1GB")["values"]
    assert values["kv_cache.request_log"] == {
        "value": "none/log.jsonl",
        "source": "f.yaml:4",
        "source_kind": "file",
    }
    assert values["kv_cache.request_log_size"]["value"] == 10**9
    table = kvortex("serve", "M", "--dry-run").out
    assert "kv_cache.request_log null (none) default" in " ".join(table.split())
    assert list((tmp_path / "none").iterdir()) == []


def test_a_request_log_is_asked_for_by_environment(kvortex: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVORTEX_REQUEST_LOG", "log.jsonl")
    values = dry_run(kvortex, "M")["values"]
    assert values["kv_cache.request_log"]["source"] == "KVORTEX_REQUEST_LOG"


def test_a_file_that_is_there_and_not_named_is_mentioned(kvortex: Any, tmp_path: Path) -> None:
    (tmp_path / "kvortex.yaml").write_text("seed: 1\n")
    assert "kvortex.yaml is here and not used" in kvortex("serve", "M", "--dry-run").err
    assert "not used" not in kvortex("serve", "M", "--dry-run", "-c", "kvortex.yaml").err


@pytest.mark.parametrize("way", ["option", "file", "environment"])
def test_a_secret_is_shown_nowhere(kvortex: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    arguments = ["serve", "M", "--dry-run"]
    if way == "option":
        arguments += ["--api-key", SECRET, "--hf-token", SECRET]
    elif way == "file":
        (tmp_path / "f.yaml").write_text(f"api_key: {SECRET}\nhf_token: {SECRET}\n")
        arguments += ["-c", "f.yaml"]
    else:
        monkeypatch.setenv("KVORTEX_API_KEY", SECRET)
        monkeypatch.setenv("KVORTEX_HF_TOKEN", SECRET)
    for mode in ([], ["--json"]):
        result = kvortex(*arguments, *mode)
        assert result.code == 0
        assert SECRET not in result.out + result.err
        assert "VLLM_API_KEY" in result.out
        assert "***" in result.out


@pytest.mark.parametrize("content", [f"api_key: {{a: {SECRET}}}\n", f"api_key: [{SECRET}, {SECRET}2]\n"])
def test_a_wrong_secret_is_refused_without_showing_it(kvortex: Any, tmp_path: Path, content: str) -> None:
    (tmp_path / "f.yaml").write_text(content)
    result = kvortex("serve", "M", "-c", "f.yaml", "--dry-run")
    assert result.code == 2
    assert SECRET not in result.out + result.err


@pytest.mark.parametrize("option", ["--api-k", "--api-key", "--hf-tok", "--hf_t", "--api_key"])
def test_a_secret_is_not_passed_on_by_a_way_around(kvortex: Any, option: str) -> None:
    for form in ([option, SECRET], [f"{option}={SECRET}"]):
        result = kvortex("serve", "M", "--dry-run", "--", *form)
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith(f"error: {option}: ")
        assert SECRET not in result.err


def test_a_variable_that_names_a_missing_file_is_told_by_its_name(
    kvortex: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVORTEX_CONFIG", "gone.yaml")
    result = kvortex("serve", "M", "--dry-run")
    assert result.code == 2
    assert result.err.startswith("error: KVORTEX_CONFIG: names gone.yaml, and there is no such file")


@pytest.mark.parametrize(("algorithm", "warned"), [("xxhash", True), ("xxhash_cbor", True), ("sha256_cbor", False)])
def test_a_hash_that_can_be_made_to_collide_is_warned_of(kvortex: Any, algorithm: str, warned: bool) -> None:
    """Field trial B66."""
    result = kvortex("serve", "m", "--prefix-caching-hash-algo", algorithm, "--dry-run")
    assert result.code == 0
    assert ("warning: --prefix-caching-hash-algo: with xxhash" in result.err) is warned
