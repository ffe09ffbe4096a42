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
from tests.gpu.trial_results import PROCESS_TIMEOUT_S, Oracle, Results, part_of, run_process

ON_CPU = os.environ.get("KVORTEX_TRIALS_ON_CPU") == "1"
RANKS = 2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_CPU and torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} NVIDIA GPUs"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(4 * PROCESS_TIMEOUT_S),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    kept = os.environ.get("KVORTEX_TEST_OUT")
    out = Path(kept) if kept else tmp_path_factory.mktemp("tensor-parallel")
    model = save_model("llama", tmp_path_factory.mktemp("tiny-llama"))

    def run(mode: str) -> dict[str, Any]:
        file = out / f"tensor-parallel-{mode}.json"
        arguments = [mode, str(model), str(file), "--device", "cpu" if ON_CPU else "cuda", "--ranks", str(RANKS)]
        return run_process("tests.gpu.play_tensor_parallel", arguments, file)

    return Results(run, ("plain", "through", "zeros"))


@pytest.fixture(scope="module")
def oracle(results: Results) -> Oracle:
    return Oracle(part_of(results("plain"), "same")["rounds"])


def test_answers_and_bytes_are_right_on_every_rank(results: Results, oracle: Oracle) -> None:
    part = part_of(results("through"), "same")
    loaded = part["counters"]["load"]["blocks"]
    assert loaded > 0
    assert part["counters"]["failures"] == {"store": 0, "load": 0, "recomputed_tokens": 0}
    assert part["counters"]["ranks"] == RANKS
    assert part["watched"] == [{"loaded": loaded, "wrong": 0}] * RANKS
    assert oracle.num_wrong(part["rounds"]) == 0


def test_control_loads_of_zeros_are_found_on_every_rank(results: Results, oracle: Oracle) -> None:
    part = part_of(results("zeros"), "same")
    loaded = part["counters"]["load"]["blocks"]
    assert loaded > 0
    assert part["watched"] == [{"loaded": loaded, "wrong": loaded}] * RANKS
    assert oracle.num_wrong(part["rounds"]) > 0
