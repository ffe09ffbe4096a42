"""What a KV connector costs the thread that launches a model's kernels: engines beside each other that take turns.

    python benchmarks/launches.py                                        # a GPU, 32 thin layers: launching is all
    VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 TORCH_COMPILE_DISABLE=1 \\
        python benchmarks/launches.py --modes plain kvortex --ram-gb 1   # to try it out on vLLM's CPU build

alone   prompts one after another, with rests in which what was stored has long been copied
crowd   twelve at once: stores are under way while the next step is launched

Of each, medians in milliseconds and the ratio to plain vLLM in the same round: `execute` of a step with a prompt and of
one that only decodes, `sample`; how much of `execute` the thread ran on a core, and how often it waited in a step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multi_turn import LLAMA

MODES = ("plain", "simple", "kvortex")
PARTS = ("alone", "crowd")
FIGURES = ("prompt", "decode", "sample", "on_a_core", "waits")
BLOCK_SIZE, PROMPT_TOKENS, CROWD, REST_S = 128, 600, 12, 0.02
THIN = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "vocab_size": 512,
}


class Engine:
    """vLLM in this process, so that this thread is the one that launches; its calls are timed."""

    def __init__(self, mode: str, ram_gb: float) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        model = Path(tempfile.mkdtemp(prefix="kvortex-launches-"))
        (model / "config.json").write_text(json.dumps({**LLAMA, **THIN}))
        self._llm = LLM(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=4096,
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=1_000_000_000,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=True,
            max_num_batched_tokens=4096,
            enforce_eager=True,
            disable_log_stats=True,
            kv_transfer_config=transfer_of(mode, ram_gb),
        )
        self._dice = random.Random(mode)
        self._steps: list[dict[str, float]] = []
        core: Any = self._llm.llm_engine.engine_core
        core = core.engine_core
        core.scheduler.schedule = self._stepped(core.scheduler.schedule)
        for name in ("execute_model", "sample_tokens"):
            setattr(core.model_executor, name, self._timed(getattr(core.model_executor, name), name))

    def _stepped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def schedule(*args: Any, **kwargs: Any) -> Any:
            scheduled = call(*args, **kwargs)
            new = scheduled.total_num_scheduled_tokens - len(scheduled.num_scheduled_tokens)
            self._steps.append({"new": new, "waits": 0.0})
            return scheduled

        return schedule

    def _timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before, begin, begin_cpu = (
                resource.getrusage(resource.RUSAGE_THREAD),
                time.perf_counter(),
                time.thread_time(),
            )
            result = call(*args, **kwargs)
            step = self._steps[-1]
            step[name] = (time.perf_counter() - begin) * 1e3
            step[f"{name}_cpu"] = (time.thread_time() - begin_cpu) * 1e3
            after = resource.getrusage(resource.RUSAGE_THREAD)
            step["waits"] += after.ru_nvcsw - before.ru_nvcsw + after.ru_nivcsw - before.ru_nivcsw
            return result

        return timed

    def play(self, part: str, prompts: int) -> dict[str, float]:
        self._steps.clear()
        if part == "alone":
            for _ in range(prompts):
                self._ask([3])
                time.sleep(REST_S)
        else:
            self._ask([20 + 3 * number for number in range(CROWD)])
        steps = [step for step in self._steps if "execute_model" in step]
        with_prompt = [step for step in steps if step["new"]]
        return {
            "prompt": statistics.median(step["execute_model"] for step in with_prompt),
            "decode": statistics.median(step["execute_model"] for step in steps if not step["new"]),
            "sample": statistics.median(step["sample_tokens"] for step in steps if "sample_tokens" in step),
            "on_a_core": statistics.median(step["execute_model_cpu"] / step["execute_model"] for step in with_prompt),
            "waits": statistics.mean(step["waits"] for step in steps),
        }

    def _ask(self, answers: list[int]) -> None:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": [self._dice.randrange(10, 500) for _ in range(PROMPT_TOKENS)]} for _ in answers]
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in answers]
        self._llm.generate(prompts, params, use_tqdm=False)


def transfer_of(mode: str, ram_gb: float) -> Any:
    from vllm.config import KVTransferConfig

    if mode == "plain":
        return None
    if mode == "simple":
        extra: dict[str, Any] = {"cpu_bytes_to_use": int(ram_gb * 1e9), "lazy_offload": False}
        return KVTransferConfig(
            kv_connector="SimpleCPUOffloadConnector", kv_role="kv_both", kv_connector_extra_config=extra
        )
    return KVTransferConfig(
        kv_connector="KVortexConnector",
        kv_connector_module_path="kvortex.vllm_plugin.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"ram_cache_size": int(ram_gb * 1e9), "block_size": BLOCK_SIZE},
    )


def serve_turns(mode: str, ram_gb: float, prompts: int) -> None:
    """A child's life: a line of JSON for each part that it is told to play."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints
    engine = Engine(mode, ram_gb)
    for part in PARTS:
        engine.play(part, 3)
    answers.write("{}\n")
    for line in sys.stdin:
        answers.write(json.dumps(engine.play(line.strip(), prompts)) + "\n")
    answers.close()
    os._exit(0)  # an engine in its caller's process has nobody to end for


def answer_of(child: subprocess.Popen[str]) -> dict[str, float]:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise SystemExit(f"{child.args!r} ended with {child.wait()}")
    return dict(json.loads(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--ram-gb", type=float, default=20.0, help="of each engine's cache (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=12, help="in a round, alone (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve_turns(options.child, options.ram_gb, options.prompts)
        return
    common = ["--ram-gb", str(options.ram_gb), "--prompts", str(options.prompts)]
    children = {
        mode: subprocess.Popen(
            [sys.executable, __file__, "--child", mode, *common],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for mode in options.modes
    }
    for child in children.values():
        answer_of(child)
    rows: list[dict[str, Any]] = []
    for number in range(options.rounds):
        for part in PARTS:
            for mode, child in children.items():
                assert child.stdin is not None
                child.stdin.write(part + "\n")
                child.stdin.flush()
                rows.append({"round": number, "part": part, "mode": mode, **answer_of(child)})
    for child in children.values():
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
    print(f"{'':18}" + "".join(f"{figure:>18}" for figure in FIGURES))
    for part in PARTS:
        for mode in options.modes:
            print(f"{part + ' ' + mode:18}" + "".join(f"{cell(rows, part, mode, figure):>18}" for figure in FIGURES))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


def cell(rows: list[dict[str, Any]], part: str, mode: str, figure: str) -> str:
    """The median over the rounds, and of the ratios to plain vLLM within each."""
    own, plain = ([row[figure] for row in rows if (row["part"], row["mode"]) == (part, of)] for of in (mode, "plain"))
    shown = f"{statistics.median(own):.2f}"
    if not plain or mode == "plain" or figure not in ("prompt", "decode", "sample"):
        return shown
    ratios = [mine / theirs for mine, theirs in zip(own, plain, strict=True)]
    return f"{shown} ({statistics.median(ratios):.2f})"


if __name__ == "__main__":
    main()
