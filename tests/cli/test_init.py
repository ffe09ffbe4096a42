"""`kvortex init`: the file it writes loads as it is, fits the machine, and overwrites nothing."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvortex.config.machine import MachineFacts
from kvortex.config.resolve import CommandLine, ResolvedConfig, resolve
from kvortex.config.settings import KVCacheSettings
from kvortex.errors import UsageError
from kvortex.hardware.gpu import Driver, Gpu, GpuReport
from kvortex.hardware.memory import CgroupLimit, Ram
from kvortex.kv_shape import KVShape, read_kv_shape
from kvortex_cli.init import render, write_new
from kvortex_cli.sizing import suggest

GB = 10**9
GPU = Gpu(0, "GPU-0", "NVIDIA H200", 141 * GB, 140 * GB, (9, 0), 5, 16, 16, 0)
RAM = Ram(512 * GB, 400 * GB, ())
LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
}
SMOL = {
    **LLAMA_70B,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}
SHAPE = read_kv_shape(LLAMA_70B)


def gpus(number: int) -> tuple[Gpu, ...]:
    return tuple(replace(GPU, index=i, uuid=f"GPU-{i}") for i in range(number))


def written(tmp_path: Path, ram: Ram, cards: tuple[Gpu, ...], shape: KVShape | None) -> ResolvedConfig:
    report = GpuReport(Driver("570.1", (12, 8)), "", cards, len(cards), None, "") if cards else None
    path = tmp_path / "kvortex.yaml"
    write_new(path, render("o/m", suggest(ram, cards, shape), ram, report, "", "kvortex.yaml"), force=True)
    return resolve(CommandLine(config=str(path)), {}, MachineFacts(ram.usable_bytes, len(cards) or None))


def values(ram: Ram, cards: tuple[Gpu, ...], shape: KVShape | None) -> dict[str, str]:
    sizing = suggest(ram, cards, shape)
    return {suggestion.key: suggestion.value for suggestion in (*sizing.vllm, *sizing.kv_cache)}


def test_what_no_machine_decides_is_the_default(tmp_path: Path) -> None:
    written_settings = written(tmp_path, RAM, gpus(2), SHAPE).kv_cache
    defaults = KVCacheSettings(ram_cache_size=1)
    assert written_settings == defaults.model_copy(update={"ram_cache_size": written_settings.ram_cache_size})


@pytest.mark.parametrize("number", [0, 1, 2, 8])
@pytest.mark.parametrize("shape", [SHAPE, None])
def test_what_is_written_loads_and_fits_the_machine(tmp_path: Path, number: int, shape: KVShape | None) -> None:
    resolved = written(tmp_path, RAM, gpus(number), shape)
    assert resolved.num_ranks == max(number, 1)
    assert 0 < resolved.kv_cache.ram_cache_size < RAM.usable_bytes
    assert (resolved.kv_cache.block_size, resolved.kv_cache.num_streams) == (128, 4)
    assert resolved.uses_kvortex


def test_every_value_has_its_reason(tmp_path: Path) -> None:
    written(tmp_path, RAM, gpus(2), SHAPE)
    lines = (tmp_path / "kvortex.yaml").read_text().splitlines()
    settings = [line for line in lines if re.match(r" *\w+: \S", line) and not line.startswith("model:")]
    assert len(settings) == 8
    assert all("  # " in line for line in settings), settings


@pytest.mark.parametrize(
    ("config", "number", "tp"),
    [(LLAMA_70B, 8, 8), (LLAMA_70B, 6, 4), (LLAMA_70B, 16, 8), (SMOL, 2, 1), (SMOL, 4, 3), (SMOL, 1, 1)],
)
def test_the_ranks_are_as_many_gpus_as_divide_the_heads(config: dict[str, object], number: int, tp: int) -> None:
    assert values(RAM, gpus(number), read_kv_shape(config))["tensor_parallel_size"] == str(tp)


def test_an_unknown_model_gets_a_power_of_two() -> None:
    assert values(RAM, gpus(6), None)["tensor_parallel_size"] == "4"


def test_a_gpu_that_is_partly_in_use_gets_a_smaller_share() -> None:
    assert values(RAM, gpus(1), SHAPE)["gpu_memory_utilization"] == "0.85"
    busy = (replace(GPU, free_bytes=GPU.memory_bytes // 2 if GPU.memory_bytes else None),)
    assert values(RAM, busy, SHAPE)["gpu_memory_utilization"] == "0.48"


def test_a_container_is_sized_by_its_limit_not_by_the_machine() -> None:
    limited = Ram(512 * GB, 400 * GB, (CgroupLimit("/c", 40 * GB, 0),))
    assert values(limited, gpus(1), SHAPE)["ram_cache_size"] == '"20GB"'


def test_without_a_gpu_server_and_cache_together_stay_below_the_ram() -> None:
    limited = Ram(512 * GB, 400 * GB, (CgroupLimit("/c", 40 * GB, 8 * GB),))
    chosen = values(limited, (), SHAPE)
    assert chosen["ram_cache_size"] == '"8GB"'
    # vLLM takes it of what the container may have at most.
    assert float(chosen["gpu_memory_utilization"]) * 40 * GB + 8 * GB < 32 * GB


def init(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return kvortex("init", *arguments, cwd=cwd)


def kvortex(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from kvortex_cli.main import main; main()", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "smol"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(SMOL))
    return directory


def test_the_file_is_served_as_it_is(model: Path, tmp_path: Path) -> None:
    done = init(str(model), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert "kvortex.yaml" in done.stderr
    assert yaml.safe_load((tmp_path / "kvortex.yaml").read_text())["model"] == str(model)
    shown = kvortex("serve", "--config", "kvortex.yaml", "--dry-run", "--json", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)


def test_a_file_that_is_there_stays_unless_forced(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "kvortex.yaml"
    path.write_text("mine")
    done = init(str(model), cwd=tmp_path)
    assert done.returncode == 2
    assert "--force" in done.stderr
    assert path.read_text() == "mine"
    assert init(str(model), "--force", cwd=tmp_path).returncode == 0
    assert "kv_cache:" in path.read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kvortex.yaml", "smol"]


def test_a_file_that_appears_meanwhile_stays_too(tmp_path: Path) -> None:
    path = tmp_path / "kvortex.yaml"
    path.write_text("mine")
    with pytest.raises(UsageError, match="already there"):
        write_new(path, "new", force=False)
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_to_nowhere_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "kvortex.yaml"
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="already there"):
        write_new(path, "new", force=False)
    assert not (tmp_path / "elsewhere").exists()


def test_a_bad_place_is_one_message(model: Path, tmp_path: Path) -> None:
    for output in ("no/such/kvortex.yaml", "smol", "smol/config.json/kvortex.yaml"):
        done = init(str(model), "-o", output, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ")
        assert len(done.stderr.splitlines()) <= 2, done.stderr


def test_a_model_that_cannot_be_read_still_gets_a_valid_file(tmp_path: Path) -> None:
    done = init("no-one/no-such-model", cwd=tmp_path)
    assert done.returncode == 0
    assert "warning: " in done.stderr
    text = (tmp_path / "kvortex.yaml").read_text()
    assert "# The model's size is not known: " in text
    resolved = resolve(CommandLine(config=str(tmp_path / "kvortex.yaml")), {}, MachineFacts(10**12))
    assert resolved.model is not None
    assert resolved.model.value == "no-one/no-such-model"


@pytest.mark.parametrize("name", ['quo"ted', "#hash", "a: b", "sp ace", "ünï"])
def test_an_odd_name_is_written_as_it_is(tmp_path: Path, name: str) -> None:
    text = render(name, suggest(RAM, (), None), RAM, None, "line\nbreak: in the reason", "k.yaml")
    assert yaml.safe_load(text)["model"] == name


@pytest.mark.parametrize("name", ["", "  ", "two\nlines", "/no/such/model", "./nowhere", "a/b/c"])
def test_a_name_that_is_none_and_a_path_where_nothing_is_are_refused(tmp_path: Path, name: str) -> None:
    assert init(name, cwd=tmp_path).returncode == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["s3://bucket/a/model", "owner/repository/file.gguf"])
def test_what_only_vllm_can_read_gets_a_file(tmp_path: Path, name: str) -> None:
    done = init(name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load((tmp_path / "kvortex.yaml").read_text())["model"] == name


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lines for standard input, on a machine of two GPUs."""
    report = GpuReport(Driver("570.1", (12, 8)), "", gpus(2), 2, None, "")
    monkeypatch.setattr("kvortex.hardware.read_gpus", lambda: report)
    monkeypatch.setattr("kvortex.hardware.read_ram", lambda: RAM)
    monkeypatch.setattr("kvortex.config.vllm_install.installed_vllm", lambda: None)

    def type_in(*lines: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    return type_in


@pytest.fixture
def llama(tmp_path: Path) -> str:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA_70B))
    return str(tmp_path / "llama")


def test_empty_answers_write_what_init_writes_unasked(kvortex: Any, answers: Any, llama: str) -> None:
    assert kvortex("init", llama, "-o", "plain.yaml").code == 0
    answers("", "", "", "")
    assert kvortex("init", llama, "-o", "asked.yaml", "--interactive").code == 0
    plain, asked = (yaml.safe_load(Path(name).read_text()) for name in ("plain.yaml", "asked.yaml"))
    assert asked == plain


def test_answers_are_in_the_file_and_change_what_follows(kvortex: Any, answers: Any, llama: str) -> None:
    answers(llama, "1", "0.9", "25%", "0")
    result = kvortex("init", "-i", "-o", "k.yaml")
    assert (result.code, result.out) == (0, ""), result.err
    written = yaml.safe_load(Path("k.yaml").read_text())
    assert (written["model"], written["tensor_parallel_size"], written["gpu_memory_utilization"]) == (llama, 1, 0.9)
    assert (written["kv_cache"]["ram_cache_size"], written["kv_cache"]["offload_threshold"]) == ("25%", 0)
    # 100 GB of blocks of 128 tokens x 320 KiB.
    assert f"{100 * GB // (128 * 320 * 1024) * 128:,} tokens" in Path("k.yaml").read_text()


def test_an_answer_that_serve_would_refuse_is_asked_again_and_says_why(kvortex: Any, answers: Any, llama: str) -> None:
    answers("4", "two", "2", "90", "", "1TB", "12 gigs", "40GB", "85", "0.5")
    result = kvortex("init", llama, "-i", "-o", "k.yaml")
    assert result.code == 0, result.err
    refusals = [line.removeprefix("error: ") for line in re.findall(r"error: .*", result.err)]
    assert [refusal.split()[0].rstrip(":") for refusal in refusals] == [
        "tensor_parallel_size",
        "tensor_parallel_size",
        "gpu_memory_utilization",
        "kv_cache.ram_cache_size",
        "kv_cache.ram_cache_size",
        "kv_cache.offload_threshold",
    ]
    assert "2 visible GPUs" in refusals[0]
    assert yaml.safe_load(Path("k.yaml").read_text())["kv_cache"]["ram_cache_size"] == "40GB"


def test_input_that_ends_early_writes_nothing(kvortex: Any, answers: Any, llama: str) -> None:
    answers("1")
    assert kvortex("init", llama, "-i", "-o", "k.yaml").code == 130
    assert not Path("k.yaml").exists()


def test_without_a_model_it_says_how_to_name_one(kvortex: Any) -> None:
    result = kvortex("init")
    assert result.code == 2
    assert result.err.splitlines() == [
        "error: no model is named",
        "hint: kvortex init MODEL, or --interactive to be asked",
    ]
