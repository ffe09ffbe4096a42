"""Sleep mode that gives the KV cache's memory back: what RAM holds is forgotten, and what comes after it is right.

KVORTEX_TRIALS_ON_CPU=1 plays it on vLLM's CPU build, which frees nothing; KVORTEX_TEST_OUT as in test_trials.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.e2e.tiny_models import save_model
from tests.gpu.trial_results import PROCESS_TIMEOUT_S, run_process

ON_CPU = os.environ.get("KVORTEX_TRIALS_ON_CPU") == "1"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_CPU and not torch.cuda.is_available(), reason="needs an NVIDIA GPU that torch can use"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(PROCESS_TIMEOUT_S + 60),
]


def test_an_engine_that_sleeps_while_it_stores_says_the_same_afterwards(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_model("llama", model)
    kept = os.environ.get("KVORTEX_TEST_OUT")
    out = (Path(kept) if kept else tmp_path) / "sleep.json"
    result = run_process("tests.gpu.play_sleep", [str(model), str(out), "--device", "cpu" if ON_CPU else "cuda"], out)
    assert "ending" not in result, result["ending"]
    assert result["loaded"] == result["computed"]
    for played in result["rounds"]:
        assert played["ram_blocks"] == 0
        assert played["computed"] == played["loaded"] == result["computed"]
        assert played["ram_hit"] > 0
        assert played["wrong"] == 0
        assert ON_CPU or played["freed_bytes"] > 0
    assert (result["failures"], result["in_flight"]) == ({"store": 0, "load": 0, "recomputed_tokens": 0}, 0)
    # The control: with other bytes in RAM it says something else.
    assert all(zeroed != said for zeroed, said in zip(result["zeroed"], result["computed"], strict=True))
