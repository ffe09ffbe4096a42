"""Conversations of a 70B shape on two GPUs that outgrow the KV in VRAM: plain vLLM against KVortex, dummy weights.

    python benchmarks/tensor_parallel.py --json tp.json                       # both engines at once, half the depth
    python benchmarks/tensor_parallel.py --layers 80 --modes kvortex ...      # all layers, one engine a call
    python benchmarks/tensor_parallel.py --estimate                           # what to expect, no GPU

Needs as many GPUs as --tensor-parallel-size. With fewer layers a token costs less time and less KV in proportion, so
what is scaled down is the model's depth, not the relation between computing a token and moving its KV; the result
says by how much. Both engines of 40 layers fit two H200s together and play each turn one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dummy_engine import (
    LLAMA,
    SHAPES,
    EngineOptions,
    Load,
    add_engine_options,
    ask_all,
    engine_options,
    rest,
    save,
    start_engine,
)
from side_by_side import EngineFailedError, Engines, serve

MODES: dict[str, dict[str, Any] | None] = {"plain": None, "kvortex": {}}

PREFILL_FLOPS = 1.2e15
"""Of two H200s together, from an earlier run: 24 prompts of 8,192 tokens, 64 generated for each, took 29.1 s."""
READ_BYTES_PER_S = 2 * 3.5e12
"""Assumed: what decoding reads weights at, both GPUs."""
LINK_BYTES_PER_S = 100e9
"""Measured, both GPUs to one host at once: 107 to 110e9."""
STEP_S = 0.006
"""Assumed: what a step costs beside its arithmetic."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=4, help="the first, which all compute, is not counted")
    parser.add_argument("--first", type=int, default=16384, help="tokens of a first prompt")
    parser.add_argument("--add", type=int, default=256, help="tokens that a turn adds")
    parser.add_argument("--gen", type=int, default=32, help="tokens generated a turn")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start-timeout", type=float, default=240)
    parser.add_argument("--turn-timeout", type=float, default=120)
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs")
    parser.add_argument("--estimate", action="store_true", help="print what is expected, and end")
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    defaults = EngineOptions(
        shape="70b", layers=40, vram_gb=6, ram_gb=60, tensor_parallel_size=2, max_model_len=24576, vram_share=0.42
    )
    add_engine_options(parser, defaults)
    options = parser.parse_args()
    if options.estimate:
        print(json.dumps(estimate(options), indent=1))
    elif options.child:
        asyncio.run(child(options))
    else:
        sys.exit(compare(options))


# ---- what to expect ------------------------------------------------------------------------------------------------


def estimate(options: argparse.Namespace) -> dict[str, Any]:
    """Sizes, and seconds of a later turn in which nothing of the conversations is left in VRAM."""
    shape = {**LLAMA, **SHAPES[options.shape]}
    layers = engine_options(options, None).num_layers
    hidden, heads, kv = shape["hidden_size"], shape["num_attention_heads"], shape["num_key_value_heads"]
    head, vocabulary = shape["head_dim"], shape["vocab_size"]
    a_layer = hidden * head * (2 * heads + 2 * kv) + 3 * hidden * shape["intermediate_size"]
    weights = layers * a_layer + 2 * vocabulary * hidden
    kv_token = 2 * layers * kv * head * 2
    length = options.first + (options.turns - 1) * (options.add + options.gen)
    pool = options.vram_gb * 1e9 * options.tensor_parallel_size / kv_token

    def compute_s(new: int, context: int) -> float:
        attention = 4 * layers * heads * head * (context + new / 2)
        return new * (2 * layers * a_layer + attention) / PREFILL_FLOPS + STEP_S

    waves = -(-options.conversations // options.concurrency)
    decode = waves * options.gen * (2 * weights / READ_BYTES_PER_S + STEP_S)
    loads = options.conversations * options.first * kv_token / LINK_BYTES_PER_S
    plain = options.conversations * compute_s(options.first + options.add, 0) + decode
    kvortex = options.conversations * compute_s(options.add, options.first) + decode + loads
    a_wave = waves and 1 / waves
    return {
        "weights_gb_a_gpu": round(2 * weights / options.tensor_parallel_size / 1e9, 1),
        "kv_kib_a_token": kv_token / 1024,
        "pool_tokens": round(pool),
        "conversation_tokens": options.conversations * length,
        "outgrows_vram_by": round(options.conversations * length / pool, 2),
        "kv_of_all_gb": round(options.conversations * length * kv_token / 1e9, 1),
        "first_turn_s": round(options.conversations * compute_s(options.first, 0) + decode, 1),
        "later_turn_s": {"plain": round(plain, 1), "kvortex": round(kvortex, 1)},
        "later_turn_parts_s": {"decode": round(decode, 1), "loads, if nothing is hidden": round(loads, 2)},
        "throughput_ratio": round(plain / kvortex, 2),
        "latency_s": {"plain": round(plain * a_wave, 1), "kvortex": round(kvortex * a_wave, 1)},
        "latency_of_plain": round(kvortex / plain, 2),
    }


# ---- one engine ----------------------------------------------------------------------------------------------------


async def child(options: argparse.Namespace) -> None:
    engine, start_s = start_engine(engine_options(options, MODES[options.child]))
    vocabulary = engine_options(options, None).vocabulary
    rng = random.Random(options.seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(10, vocabulary) for _ in range(count)]

    conversations = [tokens(options.first) for _ in range(options.conversations)]
    await ask_all(engine, [tokens(min(3000, options.first))], 4, 1)

    async def turn(order: dict[str, Any]) -> dict[str, Any]:
        if order["turn"]:
            for conversation in conversations:
                conversation += tokens(options.add)
        load = await ask_all(engine, conversations, options.gen, options.concurrency)
        for conversation, said in zip(conversations, load.answers, strict=True):
            conversation += said
        counters = await rest(engine)
        kept = ("tokens", "store", "load", "evicted", "failures", "refused", "tiers")
        return {
            "turn": order["turn"],
            **load.figures(),
            "ttft_s": load.ttft_s,
            "latency_s": load.latency_s,
            "num_output_tokens": load.num_output_tokens,
            "answers": load.answers,
            "counters": {name: counters[name] for name in kept} if counters else None,
        }

    try:
        await serve({"mode": options.child, "start_s": round(start_s, 1)}, turn)
    finally:
        engine.shutdown()


# ---- side by side --------------------------------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> int:
    depth = f"{engine_options(options, None).num_layers} of {SHAPES[options.shape]['num_hidden_layers']} layers"
    result: dict[str, Any] = {
        "options": {k: str(v) for k, v in vars(options).items()},
        "scaled": depth,
        "expected": estimate(options),
        "turns": [],
    }
    logs = options.logs or Path(tempfile.mkdtemp(prefix="kvortex-tensor-parallel-"))
    begin = time.monotonic()
    try:
        with Engines(__file__, options.modes, sys.argv[1:], logs) as engines:
            result["start"] = engines.started(options.start_timeout)
            print(f"{time.monotonic() - begin:5.0f} s  ready: {json.dumps(result['start'])}", flush=True)
            for number in range(options.turns):
                for mode in options.modes:
                    answer = engines.tell(mode, {"do": "turn", "turn": number}, options.turn_timeout)
                    result["turns"].append({"mode": mode, **answer})
                    result["summary"] = summary(result["turns"], options.modes)
                    save(options.json, result)
                    shown = {k: answer[k] for k in ("wall_s", "output_tokens_per_s", "ttft_p99_ms", "latency_p99_ms")}
                    print(f"{time.monotonic() - begin:5.0f} s  turn {number} {mode}: {json.dumps(shown)}", flush=True)
    except EngineFailedError as error:
        result["failed"] = str(error)
        save(options.json, result)
        print(error, file=sys.stderr)
        return 1
    print(json.dumps({"scaled": depth, **result["summary"]}, indent=1))
    return 0


def summary(turns: list[dict[str, Any]], modes: list[str]) -> dict[str, Any]:
    """All turns but the first as one; the ratios where both modes were played."""
    found: dict[str, Any] = {}
    for mode in modes:
        late = [turn for turn in turns if turn["mode"] == mode and turn["turn"]]
        if not late:
            continue
        load = Load(
            wall_s=sum(turn["wall_s"] for turn in late),
            num_output_tokens=sum(turn["num_output_tokens"] for turn in late),
            ttft_s=[s for turn in late for s in turn["ttft_s"]],
            latency_s=[s for turn in late for s in turn["latency_s"]],
        )
        found[mode] = load.figures()
    if {"plain", "kvortex"} <= found.keys():
        plain, ours = found["plain"], found["kvortex"]
        answers = {mode: {t["turn"]: t["answers"] for t in turns if t["mode"] == mode} for mode in modes}
        both = sorted(answers["plain"].keys() & answers["kvortex"].keys())
        found["ratio"] = {
            "throughput": round(ours["output_tokens_per_s"] / plain["output_tokens_per_s"], 3),
            "latency_p99": round(ours["latency_p99_ms"] / plain["latency_p99_ms"], 3),
            "ttft_p99": round(ours["ttft_p99_ms"] / plain["ttft_p99_ms"], 3),
            "equal_answers_by_turn": [
                sum(a == b for a, b in zip(answers["plain"][n], answers["kvortex"][n], strict=True)) for n in both
            ],
        }
    return found


if __name__ == "__main__":
    main()
