"""What `kvortex doctor` says of a model: KV bytes by dtype and ranks, what fits where, the longest request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvortex.config.machine import MachineFacts
from kvortex.config.resolve import CommandLine, resolve
from kvortex.hardware.gpu import Gpu
from kvortex_cli.checks.finding import Status
from kvortex_cli.checks.model import ModelReport, check_model

GB = 10**9
H200 = Gpu(
    index=0,
    uuid="GPU-1",
    name="NVIDIA H200",
    memory_bytes=141 * GB,
    free_bytes=140 * GB,
    compute_capability=(9, 0),
    pcie_gen=5,
    pcie_width=16,
    pcie_max_width=16,
    numa_node=0,
)
LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "max_position_embeddings": 131072,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 163840,
}
GEMMA = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131072,
}


def report_of(
    tmp_path: Path, config: Mapping[str, Any], *sets: str, gpus: int = 2, weights: int | None = None
) -> ModelReport:
    """What is said of a model on H200s."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    if weights is not None:
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.truncate(weights)  # a hole: it takes no room
    machine = MachineFacts(512 * GB, gpus)
    command_line = CommandLine(str(tmp_path), None, ("kv_cache.ram_cache_size=128GB", *sets))
    resolved = resolve(command_line, {}, machine)
    return check_model(resolved, tuple(replace(H200, index=index) for index in range(gpus)))


@pytest.mark.parametrize(
    ("config", "by_dtype"),
    [
        # 2 x 80 layers x 8 heads x 128 x 2 bytes; more ranks than KV heads do not split a head.
        (
            LLAMA_70B,
            {
                "16-bit": {"1": 327680, "2": 163840, "4": 81920, "8": 40960},
                "fp8": {"1": 163840, "2": 81920, "4": 40960, "8": 20480},
            },
        ),
        # MLA: one vector of 576 elements a layer, whole on every rank.
        (
            DEEPSEEK,
            {
                "16-bit": dict.fromkeys(("1", "2", "4", "8"), 61 * 576 * 2),
                "fp8": dict.fromkeys(("1", "2", "4", "8"), 61 * 576),
            },
        ),
        (
            GEMMA,
            {
                "16-bit": {"1": 393216, "2": 196608, "4": 98304, "8": 49152},
                "fp8": {"1": 196608, "2": 98304, "4": 49152, "8": 24576},
            },
        ),
    ],
)
def test_kv_bytes_are_told_by_dtype_and_ranks(
    tmp_path: Path, config: Mapping[str, Any], by_dtype: dict[str, dict[str, int]]
) -> None:
    report = report_of(tmp_path, config)
    assert report.data is not None
    assert report.data["kv_bytes_per_token_on_a_gpu"] == by_dtype
    shown = next(f.value for f in report.findings if f.check == "kv bytes")
    assert f"{by_dtype['16-bit']['2'] / 1024:.4g} KiB (tp 2)" in shown


def test_the_dtype_and_the_ranks_of_the_configuration_are_those_counted(tmp_path: Path) -> None:
    data = report_of(tmp_path, LLAMA_70B, "tensor_parallel_size=2", "kv_cache_dtype=fp8").data
    assert data is not None
    assert (data["kv_bytes_per_token"], data["tensor_parallel_size"]) == (163840, 2)
    # A latent vector is on both.
    data = report_of(tmp_path, DEEPSEEK, "tensor_parallel_size=2").data
    assert data is not None
    assert data["kv_bytes_per_token"] == 2 * 61 * 576 * 2


def test_what_fits_vram_and_ram_and_the_longest_request(tmp_path: Path) -> None:
    report = report_of(
        tmp_path, LLAMA_70B, "tensor_parallel_size=2", "gpu_memory_utilization=0.9", weights=141_000_000_000
    )
    assert report.data is not None
    vram = int(2 * 141 * GB * 0.9) - 141 * GB
    tokens = vram // 327680
    assert report.data["vram"] == {"bytes": vram, "tokens": tokens, "conversations": tokens // 8192}
    assert report.data["context"] == {"limit_tokens": 131072, "vram_tokens": tokens}
    blocks = 128 * GB // (128 * 327680)
    assert report.data["ram"] == {
        "bytes": 128 * GB,
        "blocks": blocks,
        "tokens": blocks * 128,
        "conversations": blocks // 64,
    }
    finding = next(f for f in report.findings if f.check == "context")
    assert finding.status is Status.OK
    assert finding.value == f"one request may have 131,072 tokens; VRAM holds {tokens:,} tokens of one request at most"


def test_a_context_that_vram_cannot_hold_fails_with_one_that_it_can(tmp_path: Path) -> None:
    options = ("gpu_memory_utilization=0.9",)
    report = report_of(tmp_path, LLAMA_70B, *options, gpus=1, weights=110_000_000_000)
    finding = next(f for f in report.findings if f.check == "context")
    assert finding.status is Status.FAIL
    held = (int(141 * GB * 0.9) - 110_000_000_000) // 327680
    assert f"--max-model-len {held // 1024 * 1024}" in finding.fix
    again = report_of(
        tmp_path, LLAMA_70B, *options, f"max_model_len={held // 1024 * 1024}", gpus=1, weights=110_000_000_000
    )
    assert next(f for f in again.findings if f.check == "context").status is Status.OK


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        ({"model_type": "mamba"}, (), "unknown_shape"),
        (LLAMA_70B, ("tensor_parallel_size=3",), "ranks"),
    ],
)
def test_why_there_are_no_numbers_is_one_word(
    tmp_path: Path, config: Mapping[str, Any], options: tuple[str, ...], reason: str
) -> None:
    report = report_of(tmp_path, config, *options, gpus=4)
    assert report.data == {"unavailable": reason}
    assert [(f.check, f.status) for f in report.findings] == [("model", Status.FAIL)]


def test_sliding_windows_make_long_requests_cheap(tmp_path: Path) -> None:
    report = report_of(tmp_path, GEMMA, "gpu_memory_utilization=0.9", gpus=1, weights=120_000_000_000)
    assert report.data is not None
    vram = int(141 * GB * 0.9) - 120_000_000_000
    layer_bytes = 2 * 8 * 256 * 2
    # 8 of 48 layers keep every token, the others 1,024.
    tokens = (vram // layer_bytes - 40 * 1024) // 8
    assert report.data["context"] == {"limit_tokens": 131072, "vram_tokens": tokens}
    assert 40 * 1024 * layer_bytes + 8 * tokens * layer_bytes <= vram
    assert "at least" in next(f.value for f in report.findings if f.check == "fits ram")
