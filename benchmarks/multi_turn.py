"""Multi-turn load on one engine a mode, without HTTP: token ids in, dummy weights of the Llama-3.1-8B shape.

    python benchmarks/multi_turn.py off simple_eager kvortex
    python benchmarks/multi_turn.py off --vram-gb 80              # everything stays in VRAM: the bound
    python benchmarks/multi_turn.py kvortex --kv-cache '{"offload_threshold": 0}'

Needs a GPU. Each mode runs in a process of its own and prints one line of JSON; figures are those of turns 2 and later.
`kvortex bench compare` plays a like load over HTTP; this one leaves the HTTP server out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODES = ("off", "native", "simple_eager", "simple_lazy", "kvortex")
SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def connector(options: argparse.Namespace) -> dict[str, Any] | None:
    """The --kv-transfer-config of a mode."""
    ram = int(options.ram_gb * 1e9)
    match options.one:
        case "off":
            return None
        case "native":
            name, extra = "OffloadingConnector", {"cpu_bytes_to_use": ram}
        case "simple_eager" | "simple_lazy":
            lazy = options.one == "simple_lazy"
            name, extra = "SimpleCPUOffloadConnector", {"cpu_bytes_to_use": ram, "lazy_offload": lazy}
        case _:
            settings = {"ram_cache_size": ram, "block_size": options.block_size, **options.kv_cache}
            return {
                "kv_connector": "KVortexConnector",
                "kv_connector_module_path": "kvortex.vllm_plugin.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": settings,
            }
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


async def play(options: argparse.Namespace) -> dict[str, Any]:
    """One mode's engine through all turns."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    model = Path(tempfile.mkdtemp(prefix="kvortex-multi-turn-"))
    (model / "config.json").write_text(json.dumps({**LLAMA, **SHAPES[options.shape]}))
    transfer = connector(options)
    start = time.perf_counter()
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=32768,
            tensor_parallel_size=options.tensor_parallel_size,
            kv_cache_memory_bytes=int(options.vram_gb * 1e9),
            block_size=options.block_size,
            enable_prefix_caching=True,
            max_num_batched_tokens=8192,
            compilation_config={
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
            },
            kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
            disable_log_stats=True,
        )
    )
    start_s = time.perf_counter() - start
    rng = random.Random(options.seed)
    conversations = [[rng.randrange(10, 128000) for _ in range(options.first)] for _ in range(options.conversations)]
    slots = asyncio.Semaphore(options.concurrency)
    ttfts: list[list[float]] = [[] for _ in range(options.turns)]
    tpots: list[float] = []

    async def turn(number: int, index: int) -> None:
        tokens = conversations[index]
        async with slots:
            if number:
                tokens += [rng.randrange(10, 128000) for _ in range(options.add)]
            params = SamplingParams(temperature=0, max_tokens=options.gen, ignore_eos=True, detokenize=False)
            begin, first = time.perf_counter(), None
            async for output in engine.generate({"prompt_token_ids": tokens}, params, f"{index}-{number}"):
                first = first or time.perf_counter()
                said = output.outputs[0].token_ids
            assert first is not None
            ttfts[number].append(first - begin)
            tpots.append((time.perf_counter() - first) / (options.gen - 1))
            conversations[index] = tokens + list(said)

    warm_up = SamplingParams(max_tokens=4, detokenize=False, ignore_eos=True)
    async for _ in engine.generate({"prompt_token_ids": list(range(10, 3000))}, warm_up, "warm-up"):
        pass
    walls = []
    for number in range(options.turns):
        begin = time.perf_counter()
        await asyncio.gather(*(turn(number, i) for i in range(options.conversations)))
        walls.append(time.perf_counter() - begin)
    engine.shutdown()
    late = sorted(ttft for turns in ttfts[1:] for ttft in turns)
    return {
        "mode": options.one,
        "start_s": round(start_s, 1),
        "wall_s": [round(wall, 2) for wall in walls],
        "output_tokens_per_s": round(options.conversations * (options.turns - 1) * options.gen / sum(walls[1:]), 1),
        "ttft_p50_ms": round(late[len(late) // 2] * 1e3, 1),
        "ttft_p99_ms": round(late[min(len(late) - 1, int(0.99 * len(late)))] * 1e3, 1),
        "tpot_p50_ms": round(sorted(tpots)[len(tpots) // 2] * 1e3, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--one", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--first", type=int, default=8192, help="tokens of a first prompt")
    parser.add_argument("--add", type=int, default=512, help="tokens that a turn adds")
    parser.add_argument("--gen", type=int, default=128, help="tokens generated a turn")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--vram-gb", type=float, default=24, help="KV in VRAM, a GPU")
    parser.add_argument("--ram-gb", type=float, default=70, help="KV in RAM, in all")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--kv-cache", type=json.loads, default={}, help="JSON of kv_cache keys, for mode kvortex")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600, help="seconds a mode")
    options = parser.parse_args()
    if options.one:
        print("RESULT " + json.dumps(asyncio.run(play(options))), flush=True)
        return
    if unknown := set(options.modes) - set(MODES):
        parser.error(f"no such mode: {', '.join(sorted(unknown))}")
    for mode in options.modes:
        command = [sys.executable, __file__, "--one", mode, *(a for a in sys.argv[1:] if a not in options.modes)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout, check=False)
        except subprocess.TimeoutExpired:
            print(json.dumps({"mode": mode, "failed": f"not done after {options.timeout:g} s"}), flush=True)
            continue
        lines = (done.stdout + done.stderr).splitlines()
        results = [line for line in lines if line.startswith("RESULT ")]
        print(results[0][7:] if results else json.dumps({"mode": mode, "failed": lines[-30:]}), flush=True)


if __name__ == "__main__":
    main()
