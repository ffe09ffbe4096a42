"""Is what RAM holds loaded exactly when that is quicker? A real vLLM on its CPU build, over links as slow as you like.

    VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 TORCH_COMPILE_DISABLE=1 \\
        python benchmarks/load_or_compute.py --link-mb 20 80 320 --json figures.json

Conversations of different lengths are computed once, stored and pushed out of VRAM; then each is asked again, with a
new question behind it, so that the hit is in RAM alone. Every link has a process of its own, and in it one engine that
does so in three modes in turn: `always` loads a hit, `never` computes it, `auto` decides as the server does. Seconds
are those of all conversations, medians over the runs; `auto/better` is the median over the runs of `auto` against the
better of the two others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from kvortex.messages import Direction, IntArray

if TYPE_CHECKING:
    from vllm import LLM

    from kvortex.transfer.base import CopyEngine, KVLayout
    from kvortex.transfer.slab import HostSlab
    from kvortex.vllm_plugin.scheduler import SchedulerSide
    from kvortex.vllm_plugin.worker import WorkerSide

MODES = ("always", "never", "auto")
BLOCK_SIZE = 32
LENGTHS = (256, 512, 1024, 1536)
"""Tokens of the conversations, in turn."""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class SlowMover:
    """A link of so many bytes a second: one copy at a time in each direction, however many threads ask."""

    def __init__(self, layout: KVLayout, slab: HostSlab, bytes_per_s: float) -> None:
        from kvortex.transfer.cpu import HostMover

        self._mover = HostMover(layout, slab)
        self._block_s = layout.block_bytes / bytes_per_s
        self._links = {direction: threading.Lock() for direction in Direction}

    def copy_piece(self, direction: Direction, gpu_blocks: IntArray, slots: IntArray) -> None:
        with self._links[direction]:
            end = time.perf_counter() + len(slots) * self._block_s
            self._mover.copy_piece(direction, gpu_blocks, slots)
            time.sleep(max(0.0, end - time.perf_counter()))


@contextmanager
def slow_engine(bytes_per_s: float, options: argparse.Namespace) -> Iterator[LLM]:
    """vLLM in this process, whose copies go over the slow link."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    from kvortex.transfer.cpu import CpuCopyEngine
    from kvortex.transfer.slab import HostSlab
    from kvortex.vllm_plugin.worker import WorkerSide

    def opened(side: WorkerSide, layout: KVLayout) -> tuple[HostSlab, CopyEngine]:
        slab = HostSlab(side._facts.num_slots, layout.block_bytes)
        # A piece is what the link is given at a time; small, so that threads share it as they would a real one.
        mover = SlowMover(layout, slab, bytes_per_s)
        return slab, CpuCopyEngine(layout, slab, 2, piece_bytes=1 << 20, mover=mover)

    model = Path(tempfile.mkdtemp(prefix="kvortex-load-or-compute-"))
    (model / "config.json").write_text(json.dumps(LLAMA))
    longest = max(LENGTHS) + options.question + options.gen
    with patch.object(WorkerSide, "_open_engine", opened):
        llm = LLM(
            str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=longest + BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=options.concurrency * (longest // BLOCK_SIZE + 3) + 1,
            kv_cache_memory_bytes=1 << 30,
            max_num_batched_tokens=4096,
            enforce_eager=True,
            enable_prefix_caching=True,
            disable_log_stats=True,
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVortexConnector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={
                    "ram_cache_size": 2 << 30,
                    "block_size": BLOCK_SIZE,
                    "offload_threshold": 0.0,
                    "offload_target": 0.0,
                },
            ),
        )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def side_of(llm: LLM) -> SchedulerSide:
    core: Any = llm.llm_engine.engine_core
    side: SchedulerSide = core.engine_core.scheduler.connector._scheduler_side
    return side


def ask_all(llm: LLM, prompts: list[list[int]], gen: int, concurrency: int) -> float:
    """Seconds until all are answered, `concurrency` at a time, and each of them with a request in flight."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=gen, ignore_eos=True, detokenize=False)
    waiting, in_flight = list(reversed(prompts)), 0
    begin = time.perf_counter()
    while waiting or in_flight:
        while waiting and in_flight < concurrency:
            engine.add_request(f"{time.monotonic_ns()}", {"prompt_token_ids": waiting.pop()}, params)
            in_flight += 1
        in_flight -= sum(output.finished for output in engine.step())
    seconds = time.perf_counter() - begin
    while side_of(llm).busy:
        engine.step()
    return seconds


def play(options: argparse.Namespace) -> dict[str, Any]:
    """One link: all modes, in turn, in one engine."""
    from kvortex.cache.load_choice import LoadChoice, Way

    rng = random.Random(options.seed)
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(options.conversations)]
    told = [[rng.randrange(3, 512) for _ in range(length)] for length in lengths]
    decide = LoadChoice._or_compute
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    loaded: dict[str, int] = dict.fromkeys(MODES, 0)
    with slow_engine(options.one * 1e6, options) as llm:
        side = side_of(llm)
        for tokens in told:
            ask_all(llm, [tokens], 1, 1)  # and stores it, before VRAM is given to the next
        ask_all(llm, told[:1], options.gen, 1)
        for run in range(options.runs):
            for mode in MODES[run % 3 :] + MODES[: run % 3]:
                prompts = [tokens + [rng.randrange(3, 512) for _ in range(options.question)] for tokens in told]
                before = side.snapshot()["tokens"]["ram_hit"]

                def decided(choice: LoadChoice, way: Way, *costs: Any, mode: str = mode) -> Way:
                    return {"always": way, "never": Way.COMPUTE}.get(mode) or decide(choice, way, *costs)

                with patch.object(LoadChoice, "_or_compute", decided):
                    seconds[mode].append(ask_all(llm, prompts, options.gen, options.concurrency))
                loaded[mode] += side.snapshot()["tokens"]["ram_hit"] - before
    hit_tokens = options.runs * sum(length // BLOCK_SIZE * BLOCK_SIZE for length in lengths)
    ratios = [auto / min(a, n) for a, n, auto in zip(*(seconds[mode] for mode in MODES), strict=True)]
    return {
        "link_mb_per_s": options.one,
        "concurrency": options.concurrency,
        "seconds": {mode: round(statistics.median(seconds[mode]), 3) for mode in MODES},
        "all_seconds": {mode: [round(s, 3) for s in seconds[mode]] for mode in MODES},
        "loaded_share": {mode: round(loaded[mode] / hit_tokens, 3) for mode in MODES},
        "auto_of_better": round(statistics.median(ratios), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link-mb", type=float, nargs="+", default=[10, 40, 80, 160, 640], help="MB/s, a run each")
    parser.add_argument("--concurrencies", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--question", type=int, default=48, help="tokens of a question")
    parser.add_argument("--gen", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=900, help="seconds a link")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--concurrency", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("RESULT " + json.dumps(play(options)), flush=True)
        return
    results = []
    print(f"{'MB/s':>8} {'at once':>7} {'always s':>9} {'never s':>9} {'auto s':>9} {'loaded':>7} {'auto/better':>11}")
    for concurrency in options.concurrencies:
        for link in options.link_mb:
            command = [sys.executable, __file__, *sys.argv[1:], "--one", str(link), "--concurrency", str(concurrency)]
            environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=options.timeout, check=False, env=environment
            )
            found = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if not found:
                sys.exit(f"a link of {link:g} MB/s failed:\n{done.stderr[-3000:]}")
            result = json.loads(found[0])
            results.append(result)
            took = result["seconds"]
            print(
                f"{link:8g} {concurrency:7d} {took['always']:9.3f} {took['never']:9.3f} {took['auto']:9.3f} "
                f"{result['loaded_share']['auto']:7.0%} {result['auto_of_better']:11.3f}",
                flush=True,
            )
    if options.json:
        conditions = {"python": platform.python_version(), "machine": platform.processor() or platform.machine()}
        options.json.write_text(json.dumps({**conditions, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
