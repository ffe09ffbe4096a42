"""The same prompts again and again on an engine of several ranks; a process of its own, with one more for each rank.

python -m tests.gpu.play_tensor_parallel MODE MODEL OUT.json [--ranks 2] [--device cpu]
"""

from __future__ import annotations

import json
import os
import random
import time
from types import SimpleNamespace
from typing import Any

from tests.gpu.trial_engine import ENVIRONMENT, VRAM_SHARE, play, trial_options


def main() -> None:
    parser = trial_options(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    os.environ.update(
        ENVIRONMENT,
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",  # to ask the workers what they saw
        KVORTEX_WATCH_ZEROS="1" if options.mode == "zeros" else "0",
    )
    run(options)


def run(options: Any) -> None:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    from tests.gpu.trial_sizes import CPU, GPU

    size = GPU if options.device == "cuda" else CPU
    transfer = None
    if options.mode != "plain":
        settings: dict[str, Any] = {"ram_cache_size": 400 * 10**6, "block_size": size.block}
        if options.mode != "defaults":
            settings["offload_threshold"] = 0.0
        transfer = KVTransferConfig(
            kv_connector="WatchedConnector",
            kv_connector_module_path="tests.gpu.watched_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=settings,
        )
    engine: dict[str, Any] = {
        "tensor_parallel_size": options.ranks,
        "distributed_executor_backend": "mp",
        "block_size": size.block,
        "num_gpu_blocks_override": size.pool,
        "kv_cache_memory_bytes": 100_000_000,
        "gpu_memory_utilization": VRAM_SHARE,
        "max_num_seqs": size.seqs,
        "max_num_batched_tokens": 8192 if options.device == "cuda" else 1024,
        "max_model_len": 2048,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
    }
    begin = time.perf_counter()
    llm = LLM(options.model, **engine, kv_transfer_config=transfer)
    result: dict[str, Any] = {"mode": options.mode, "ranks": options.ranks}
    result["start"] = {"seconds": round(time.perf_counter() - begin, 1), "engine": engine}
    options.out.write_text(json.dumps(result))
    asked = rounds_of(llm, size, 2 if options.mode == "zeros" else 4)
    result["same"] = {**asked, **(seen(llm) if transfer else {})}
    options.out.write_text(json.dumps(result))
    llm.llm_engine.engine_core.shutdown()


def rounds_of(llm: Any, size: Any, num_rounds: int) -> dict[str, Any]:
    num, length, answer, _ = size.same
    # Not tests.e2e.engine's: importing that would start vLLM's device in this process.
    prompts = [[random.Random(1000 * seed + i).randrange(3, 510) for i in range(length)] for seed in range(num)]
    said = []
    for number in range(num_rounds):
        order = list(range(num))
        random.Random(number).shuffle(order)
        vllm: Any = SimpleNamespace(llm=llm)
        played = play(vllm, [prompts[i] for i in order], answer, size.seqs)
        by_prompt = dict(zip(order, played.answers, strict=True))
        said.append([by_prompt[i] for i in range(num)])
    return {"prompts": prompts, "rounds": said}


def seen(llm: Any) -> dict[str, Any]:
    """The counters of the scheduler side and of each rank's watcher, when nothing is under way any more."""
    from kvortex.vllm_plugin.stats_socket import ask_engine
    from tests.gpu.watched_connector import read_watch

    engine_id = str(llm.llm_engine.vllm_config.kv_transfer_config.engine_id)
    end = time.monotonic() + 30
    while (counters := ask_engine(engine_id, "stats"))["store"]["in_flight"] and time.monotonic() < end:
        time.sleep(0.2)
    return {"counters": counters, "watched": llm.collective_rpc(read_watch)}


if __name__ == "__main__":
    main()
