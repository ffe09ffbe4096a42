"""A real model says the same with KVortex as without, through thousands of evictions.

KVORTEX_REAL_MODEL names the model's folder, such as the one that examples/make_demo_model.py makes.
What is the same, KVORTEX_TRIALS_ON_CPU=1 and KVORTEX_TEST_OUT are as in test_trials.
"""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.oracle import JudgeProcess, Oracle
from tests.gpu.trial_results import (
    PROCESS_TIMEOUT_S,
    check_at_rest,
    check_bytes,
    grown,
    part_of,
    run_process,
)

MODEL = os.environ.get("KVORTEX_REAL_MODEL")
ON_CPU = os.environ.get("KVORTEX_TRIALS_ON_CPU") == "1"
EVICTIONS = 200 if ON_CPU else 5000

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(MODEL is None, reason="KVORTEX_REAL_MODEL names no model"),
    pytest.mark.skipif(not ON_CPU and not torch.cuda.is_available(), reason="needs an NVIDIA GPU that torch can use"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(3 * PROCESS_TIMEOUT_S),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("KVORTEX_TEST_OUT")
    return Path(kept) if kept else tmp_path_factory.mktemp("real-model")


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    return play("plain", folder)


@pytest.fixture(scope="module")
def oracle(plain: dict[str, Any], folder: Path) -> Oracle:
    runs = [flat(part_of(plain, part)["answers"]) for part in ("own", "again")]
    judge = JudgeProcess(str(MODEL), lambda: plain, folder, "real-model")
    return Oracle(flat(part_of(plain, "again")["prompts"]), runs, judge, exact=ON_CPU)


def play(mode: str, folder: Path) -> dict[str, Any]:
    out = folder / f"real-model-{mode}.json"
    arguments = [mode, str(MODEL), str(out), "--device", "cpu" if ON_CPU else "cuda"]
    if mode != "plain":
        arguments += ["--history", str(folder / "real-model-plain.json")]
    return run_process("tests.gpu.play_real_model", arguments, out)


def flat(turns: list[list[list[int]]]) -> list[list[int]]:
    return list(chain.from_iterable(turns))


def test_the_judge_finds_no_answer_of_plain_vllm_wrong(oracle: Oracle) -> None:
    oracle.check_own()


def test_a_real_model_is_greedy_equal_through_thousands_of_evictions(folder: Path, oracle: Oracle) -> None:
    part = part_of(play("through", folder), "again")
    evicted, loaded = grown(part, "evicted", "vram_blocks"), grown(part, "load", "blocks")
    print(f"{evicted} blocks evicted from VRAM, {loaded} loaded, {grown(part, 'tokens', 'ram_hit')} tokens from RAM")
    assert evicted >= EVICTIONS
    check_at_rest(part)
    check_bytes(part, exact=ON_CPU)
    oracle.check([flat(part["answers"])])


def test_control_a_real_model_whose_loads_bring_zeros_says_something_else(
    folder: Path, plain: dict[str, Any], oracle: Oracle
) -> None:
    part = part_of(play("zeros", folder), "again")
    assert grown(part, "load", "blocks") > 0
    # RAM had nothing to spoil the first turn with, and no more than the second was asked after it.
    turns = [answers if turn == 1 else None for turn, answers in enumerate(part["answers"])]
    num_turns, num_talks = len(part_of(plain, "again")["answers"]), len(part["answers"][0])
    turns += [None] * (num_turns - len(turns))
    oracle.check_spoiled([list(chain.from_iterable(answers or [None] * num_talks for answers in turns))])
