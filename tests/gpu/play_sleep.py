"""A tiny model that is put to sleep while blocks are being stored, and woken; a process of its own.

python -m tests.gpu.play_sleep MODEL OUT.json [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from tests.gpu.trial_engine import ENVIRONMENT, VRAM_SHARE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the model's folder")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    # vLLM's CPU build refuses the option, and frees nothing.
    of_gpu = {"gpu_memory_utilization": VRAM_SHARE, "enable_sleep_mode": True} if options.device == "cuda" else {}
    options.out.write_text(json.dumps(play(options.model, of_gpu)))


def play(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Token ids: computed; loaded; after each of some sleeps computed again and loaded again; and from zeroed RAM."""
    # vLLM is imported here and not before: `main` sets its environment first.
    from kvortex.vllm_plugin.register import register_connector
    from tests.e2e.engine import WRITE_THROUGH, engine, greedy, prompt
    from tests.gpu.watched_engine import watched

    register_connector()  # the package need not be installed
    prompts = [prompt(seed, 600) for seed in range(3)]

    def texts(vllm: Any) -> list[list[int]]:
        return [list(vllm.ask(tokens)[0]) for tokens in prompts]

    settings = {**WRITE_THROUGH, "ram_cache_size": 20_000_000}
    rounds = []
    with watched() as opened, engine(model, settings, **options) as vllm:
        (watch,) = opened
        computed = texts(vllm)
        vllm.evict_vram()
        loaded = texts(vllm)
        for number in range(5):
            for seed in range(3):  # their stores are under way, and nobody waits for them
                vllm.ask(prompt(100 * number + seed + 50, 900), greedy(1))
            free_before = free_bytes(options)
            vllm.llm.sleep(level=1)
            freed = free_bytes(options) - free_before
            vllm.llm.wake_up()
            before = vllm.stats()
            again = texts(vllm)
            vllm.evict_vram()
            after = texts(vllm)
            stats = vllm.stats()
            rounds.append(
                {
                    "freed_bytes": freed,
                    "ram_blocks": before["tiers"]["ram"]["used_blocks"],
                    "computed": again,
                    "loaded": after,
                    "ram_hit": stats["tokens"]["ram_hit"] - before["tokens"]["ram_hit"],
                    "wrong": watch.num_wrong,
                }
            )
        vllm.evict_vram()
        watch._slab.tensor.zero_()
        zeroed = texts(vllm)
        vllm.settle()
        stats = vllm.stats()
    return {
        "computed": computed,
        "loaded": loaded,
        "rounds": rounds,
        "zeroed": zeroed,
        "failures": stats["failures"],
        "in_flight": stats["store"]["in_flight"] + stats["load"]["in_flight"],
    }


def free_bytes(options: dict[str, Any]) -> int:
    if not options:
        return 0
    import torch

    return int(torch.cuda.mem_get_info()[0])


if __name__ == "__main__":
    main()
