"""A tiny model of one architecture without KVortex, with it, and with RAM emptied under it; a process of its own.

python -m tests.gpu.play_model MODEL OUT.json [--options JSON] [--device cpu]
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
    parser.add_argument("--options", type=json.loads, default={}, help="of the engine")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    if options.device == "cuda":
        options.options |= {"gpu_memory_utilization": VRAM_SHARE}
    options.out.write_text(json.dumps(play(options.model, options.options)))


def play(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Token ids: without KVortex computed and from vLLM's own cache; with it computed, loaded, loaded from zeroed RAM.

    Requests come one at a time: equal work has equal shapes then, and equal text.
    """
    # vLLM is imported here and not before: `main` sets its environment first.
    from kvortex.vllm_plugin.register import register_connector
    from tests.e2e.engine import BLOCK_SIZE, WRITE_THROUGH, engine, prompt
    from tests.gpu.watched_engine import watched

    register_connector()  # the package need not be installed
    prompts = [prompt(seed, 600) for seed in range(3)]

    def texts(vllm: Any) -> list[list[int]]:
        return [list(vllm.ask(tokens)[0]) for tokens in prompts]

    with engine(model, None, **options) as plain:
        computed, cached = texts(plain), texts(plain)
    block_size = options.get("block_size", BLOCK_SIZE)
    settings = {**WRITE_THROUGH, "ram_cache_size": 20_000_000, "block_size": block_size}
    with watched() as opened, engine(model, settings, **options) as vllm:
        (watch,) = opened
        through = texts(vllm)
        vllm.evict_vram()
        loaded = texts(vllm)
        stats, num_wrong = vllm.stats(), watch.num_wrong
        found_in = vllm.side._groups[0].block_size  # vLLM 0.26 gives windows blocks of its own choice
        vllm.evict_vram()
        watch._slab.tensor.zero_()
        zeroed = texts(vllm)
    return {
        "without": {"computed": computed, "cached": cached},
        "with": {"computed": through, "loaded": loaded, "zeroed": zeroed},
        "hit_tokens": stats["tokens"]["ram_hit"],
        "right_hit_tokens": len(prompts) * (599 // found_in * found_in),
        "loaded_blocks": stats["load"]["blocks"],
        "watched": {"loaded": watch.num_loaded, "wrong": num_wrong},
    }


if __name__ == "__main__":
    main()
