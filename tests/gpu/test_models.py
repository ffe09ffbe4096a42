"""Kinds of models on a GPU: each says with KVortex what it says without, through eviction and load.

A tiny checkpoint each, in a process of its own. KVORTEX_TRIALS_ON_CPU=1 plays those that vLLM's CPU build can;
KVORTEX_TEST_OUT names a folder that keeps the results; KVORTEX_TRIALS_AT_ONCE=1 plays six at a time.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.e2e.tiny_models import save_model
from tests.gpu.trial_results import PROCESS_TIMEOUT_S, part_of, run_process

ON_CPU = os.environ.get("KVORTEX_TRIALS_ON_CPU") == "1"
AT_ONCE = 6 if os.environ.get("KVORTEX_TRIALS_AT_ONCE") == "1" else 1

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mistral-sliding": {"num_blocks": 80},
    "qwen2": {},
    "qwen3": {},
    "gpt-neox": {},
    "falcon": {},
    "mixtral": {},
    "qwen3-moe": {},
    "deepseek-wide": {"block_size": 64},
    "llama-wide": {"kv_cache_dtype": "fp8"},
}
"""Family -> options of its engine. Kernels for FP8 want larger heads, those for latent attention blocks of 64."""
NOT_ON_CPU = {"deepseek-wide", "llama-wide"}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_CPU and not torch.cuda.is_available(), reason="needs an NVIDIA GPU that torch can use"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(len(MODELS) * PROCESS_TIMEOUT_S),
]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[dict[str, Any]]]:
    kept = os.environ.get("KVORTEX_TEST_OUT")
    out = Path(kept) if kept else tmp_path_factory.mktemp("models")
    folders = {family: save_model(family, tmp_path_factory.mktemp(family)) for family in MODELS}

    def play(family: str) -> dict[str, Any]:
        file = out / f"model-{family}.json"
        arguments = [str(folders[family]), str(file), "--options", json.dumps(MODELS[family])]
        arguments += ["--device", "cpu" if ON_CPU else "cuda"]
        return run_process("tests.gpu.play_model", arguments, file)

    pool = ThreadPoolExecutor(AT_ONCE)
    futures = {family: pool.submit(play, family) for family in MODELS if not (ON_CPU and family in NOT_ON_CPU)}
    pool.shutdown(wait=False)
    return futures


@pytest.mark.parametrize("family", MODELS)
def test_a_model_says_on_a_gpu_what_it_says_without_kvortex(
    played: dict[str, Future[dict[str, Any]]], family: str
) -> None:
    if family not in played:
        pytest.skip("not for vLLM's CPU build")
    result = played[family].result()
    without, having = part_of(result, "without"), part_of(result, "with")
    assert having["computed"] == without["computed"]
    assert having["loaded"] == without["cached"]
    assert result["hit_tokens"] == result["right_hit_tokens"]
    assert result["watched"]["loaded"] >= result["loaded_blocks"] > 0
    assert result["watched"]["wrong"] == 0
    # The control: with other bytes in RAM it says something else.
    assert all(zeroed != cached for zeroed, cached in zip(having["zeroed"], without["cached"], strict=True))
