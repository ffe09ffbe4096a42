"""Public reports of what went wrong for others, played on a real vLLM: right answers, no hang, no needless copy.

One engine a mode, each in a process of its own that plays all loads (`play_trials`); the tests read what it wrote.
On a GPU plain vLLM does not always agree with itself: there it judges the answers that are not its own, and near ties
between two tokens are no faults (`tests.near_ties`). KVORTEX_TRIALS_ON_CPU=1 plays a small version on vLLM's CPU build,
where every answer has to be the same. KVORTEX_TEST_OUT names a folder that keeps the results; KVORTEX_TRIALS_AT_ONCE=1
plays all modes at the same time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.e2e.tiny_models import save_model
from tests.gpu import trial_sizes
from tests.gpu.oracle import JudgeProcess, Oracle
from tests.gpu.trial_engine import MODES
from tests.gpu.trial_results import (
    PROCESS_TIMEOUT_S,
    Results,
    check_at_rest,
    check_bytes,
    grown,
    part_of,
    run_process,
)

ON_CPU = os.environ.get("KVORTEX_TRIALS_ON_CPU") == "1"
DEVICE = "cpu" if ON_CPU else "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_CPU and not torch.cuda.is_available(), reason="needs an NVIDIA GPU that torch can use"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(4 * PROCESS_TIMEOUT_S),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("KVORTEX_TEST_OUT")
    return Path(kept) if kept else tmp_path_factory.mktemp("trials")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def results(folder: Path, model: Path) -> Results:
    def run(mode: str) -> dict[str, Any]:
        file = folder / f"trials-{mode}.json"
        return run_process("tests.gpu.play_trials", [mode, str(model), str(file), "--device", DEVICE], file)

    return Results(run, MODES)


@pytest.fixture(scope="module")
def judge(results: Results, model: Path, folder: Path) -> JudgeProcess:
    return JudgeProcess(str(model), lambda: results("plain"), folder, "trials")


@pytest.fixture(scope="module")
def same(results: Results, judge: JudgeProcess) -> Oracle:
    part = part_of(results("plain"), "same")
    return Oracle(part["prompts"], part["rounds"], judge, exact=ON_CPU)


@pytest.fixture(scope="module")
def pressure(results: Results, judge: JudgeProcess) -> Oracle:
    part = part_of(results("plain"), "pressure")
    return Oracle(part["prompts"], part["runs"], judge, exact=ON_CPU)


def test_the_judge_finds_no_answer_of_plain_vllm_wrong(same: Oracle, pressure: Oracle) -> None:
    same.check_own()
    pressure.check_own()


@pytest.mark.parametrize("mode", ["through", "defaults"])
def test_b03_the_same_prompts_get_the_same_answers_at_high_concurrency(
    results: Results, same: Oracle, mode: str
) -> None:
    part = part_of(results(mode), "same")
    print(f"{grown(part, 'load', 'blocks')} blocks loaded, {grown(part, 'evicted', 'vram_blocks')} evicted from VRAM")
    check_at_rest(part)
    check_bytes(part, exact=ON_CPU)
    same.check(part["rounds"])


def test_b03_control_loads_of_zeros_are_found_by_text_and_by_bytes(results: Results, same: Oracle) -> None:
    part = part_of(results("zeros"), "same")
    assert grown(part, "load", "blocks") > 0
    assert grown(part, "watched", "wrong") == grown(part, "watched", "loaded")
    assert part["clean"]["copied_unequal"] > 0
    same.check_spoiled(part["rounds"][1:])  # RAM had nothing to spoil the first round with


@pytest.mark.parametrize("mode", ["through", "defaults"])
def test_b23_preempted_requests_come_back_right(results: Results, pressure: Oracle, mode: str) -> None:
    plain, part = part_of(results("plain"), "pressure"), part_of(results(mode), "pressure")
    print(f"preempted: {plain['preempted']} without, {part['preempted']} with KVortex")
    assert part["preempted"] > 0, "no pressure, no trial"
    check_at_rest(part)
    check_bytes(part, exact=ON_CPU)
    pressure.check(part["runs"])


def test_b23_control_loads_of_zeros_are_found(results: Results, pressure: Oracle) -> None:
    part = part_of(results("zeros"), "pressure")
    assert grown(part, "watched", "wrong") == grown(part, "load", "blocks") > 0
    assert pressure.verdict(part["runs"]).wrong, "not one of them"  # most were never preempted


def test_b33_sessions_that_come_back_together_never_stop_the_engine(results: Results, judge: JudgeProcess) -> None:
    """A stall of 60 s ends the process, and "returns" is then not there."""
    plain, part = part_of(results("plain"), "returns"), part_of(results("through"), "returns")
    check_at_rest(part)
    check_bytes(part, exact=ON_CPU)
    Oracle(plain["prompts"], plain["runs"], judge, exact=ON_CPU).check(part["runs"])


def test_b33_control_a_session_whose_load_is_lost_is_seen_to_hang(results: Results) -> None:
    assert part_of(results("zeros"), "stall")["seen"] is True


def test_b38_a_shared_prefix_is_loaded_once(results: Results) -> None:
    plain, part = part_of(results("plain"), "shared"), part_of(results("through"), "shared")
    check_at_rest(part)
    once, convoy = grown(part, "load", "blocks"), grown(part_of(results("through"), "convoy"), "load", "blocks")
    for name in ("ttft_p95_ms", "output_tokens_per_s"):
        print(f"shared prefix, {name}: {plain[name]} without, {part[name]} with KVortex")
    assert once > 0
    assert convoy >= 2 * once, f"the control loaded {convoy} blocks, so {once} say nothing"
    size = trial_sizes.CPU if ON_CPU else trial_sizes.GPU
    prefix = size.shared[2] // size.block
    assert once < 1.5 * prefix, f"{once} blocks loaded of a prefix of {prefix}"


@pytest.mark.parametrize("mode", ["through", "defaults"])
def test_b39_prompts_that_never_come_again_load_nothing(results: Results, mode: str) -> None:
    plain, part = part_of(results("plain"), "fresh"), part_of(results(mode), "fresh")
    check_at_rest(part)
    stored, reused = grown(part, "store", "blocks"), grown(part, "load", "blocks")
    print(
        f"{mode}: stored {stored}, reused {reused}; output tokens/s: {plain['output_tokens_per_s']} without, "
        f"{part['output_tokens_per_s']} with KVortex"
    )
    assert stored > 0
    assert reused == 0
    # The control: the same counter does grow where prompts come again.
    assert grown(part_of(results(mode), "same"), "load", "blocks") > 0
