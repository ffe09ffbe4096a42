"""Two ranks, each with a slab of its own, one decision: right answers and right bytes on both.

KVORTEX_TRIALS_ON_CPU, KVORTEX_TEST_OUT and KVORTEX_TRIALS_AT_ONCE are as in test_trials.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.e2e.tiny_models import save_model
from tests.gpu.oracle import JudgeProcess, Oracle
from tests.gpu.trial_results import PROCESS_TIMEOUT_S, Results, part_of, run_process

ON_CPU = os.environ.get("KVORTEX_TRIALS_ON_CPU") == "1"
RANKS = 2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_CPU and torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} NVIDIA GPUs"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(4 * PROCESS_TIMEOUT_S),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("KVORTEX_TEST_OUT")
    return Path(kept) if kept else tmp_path_factory.mktemp("tensor-parallel")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def results(folder: Path, model: Path) -> Results:
    def run(mode: str) -> dict[str, Any]:
        file = folder / f"tensor-parallel-{mode}.json"
        arguments = [mode, str(model), str(file), "--device", "cpu" if ON_CPU else "cuda", "--ranks", str(RANKS)]
        return run_process("tests.gpu.play_tensor_parallel", arguments, file)

    return Results(run, ("plain", "through", "zeros"))


@pytest.fixture(scope="module")
def oracle(results: Results, model: Path, folder: Path) -> Oracle:
    part = part_of(results("plain"), "same")
    judge = JudgeProcess(str(model), lambda: results("plain"), folder, "tensor-parallel")
    return Oracle(part["prompts"], part["rounds"], judge, exact=ON_CPU)


def test_answers_and_bytes_are_right_on_every_rank(results: Results, oracle: Oracle) -> None:
    part = part_of(results("through"), "same")
    loaded = part["counters"]["load"]["blocks"]
    assert loaded > 0
    assert part["counters"]["failures"] == {"store": 0, "load": 0, "recomputed_tokens": 0}
    assert part["counters"]["ranks"] == RANKS
    assert part["watched"] == [{"loaded": loaded, "wrong": 0}] * RANKS
    oracle.check(part["rounds"])


def test_control_loads_of_zeros_are_found_on_every_rank(results: Results, oracle: Oracle) -> None:
    part = part_of(results("zeros"), "same")
    loaded = part["counters"]["load"]["blocks"]
    assert loaded > 0
    assert part["watched"] == [{"loaded": loaded, "wrong": loaded}] * RANKS
    oracle.check_spoiled(part["rounds"][1:])  # RAM had nothing to spoil the first round with
