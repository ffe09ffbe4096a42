"""What offload costs where it cannot help: every prompt is new, and the KV pool overflows.

    python benchmarks/no_hits.py --json no_hits.json
    python benchmarks/no_hits.py --shared 3          # and what it costs, or gains, where 200 requests share a prefix
    python benchmarks/no_hits.py --modes kvortex prefetch     # and what prefetch adds to it: no session returns

Needs a GPU with room for all engines (8B: 16 GB of weights, 16 GB of KV and some 5 GB each). They live at the same
time and take turns, in another order each round; a ratio compares the two plays of one round. Prompts and answers are
of mixed lengths: those of one length fall into waves, and whether a wave's last prompt comes a step later decides more
than what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dummy_engine import EngineOptions, add_engine_options, ask_all, engine_options, rest, save, start_engine
from side_by_side import EngineFailedError, Engines, serve

MODES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "kvortex": {},
    "write-through": {"offload_threshold": 0},
    "prefetch": {"prefetch_enabled": True},
}
FIGURES = ("output_tokens_per_s", "ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms")
START_TIMEOUT_S, PLAY_TIMEOUT_S = 150.0, 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=160, help="new prompts a play")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a prompt, half of it more or less")
    parser.add_argument("--gen", type=int, default=64, help="tokens generated for each, half of it more or less")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--shared", type=int, default=0, metavar="ROUNDS", help="rounds of the shared prefix too")
    parser.add_argument("--shared-prompts", type=int, default=200)
    parser.add_argument("--shared-prefix", type=int, default=8192, help="tokens")
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs")
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    add_engine_options(parser, EngineOptions(vram_gb=16, ram_gb=40, vram_share=0.3))
    options = parser.parse_args()
    if options.child:
        asyncio.run(child(options))
        return
    sys.exit(compare(options))


# ---- one engine ----------------------------------------------------------------------------------------------------


async def child(options: argparse.Namespace) -> None:
    mode = options.child
    engine, start_s = start_engine(engine_options(options, MODES[mode]))

    async def handle(order: dict[str, Any]) -> dict[str, Any]:
        prompts, gen, at_once = load_of(order, options)
        before = await rest(engine)
        load = await ask_all(engine, prompts, gen, at_once)
        after = await rest(engine)
        return {**load.figures(), "grown": growth(before, after) if before and after else None}

    try:
        await serve({"mode": mode, "start_s": round(start_s, 1)}, handle)
    finally:
        engine.shutdown()


def growth(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    """What KVortex did in one play."""
    names = [
        ("tokens", "vram_hit"),
        ("tokens", "ram_hit"),
        ("store", "blocks"),
        ("load", "blocks"),
        ("admission", "waited"),
        ("admission", "seconds"),
    ]
    return {f"{kind}_{name}": after[kind][name] - before[kind][name] for kind, name in names}


def load_of(order: dict[str, Any], options: argparse.Namespace) -> tuple[list[list[int]], int | list[int], int]:
    """Prompts, tokens to generate, requests at once. Every mode gets the same."""
    vocabulary = engine_options(options, None).vocabulary
    rng = random.Random(order["seed"])

    def tokens(count: int) -> list[int]:
        return [rng.randrange(10, vocabulary) for _ in range(count)]

    if order["do"] == "new":
        lengths, answers = (
            [rng.randint(n // 2, n + n // 2) for _ in range(options.prompts)] for n in (options.length, options.gen)
        )
        return [tokens(length) for length in lengths], answers, options.concurrency
    prefix = tokens(options.shared_prefix)
    if order["do"] == "prefix":
        return [prefix], 1, 1
    return [prefix + tokens(64) for _ in range(options.shared_prompts)], options.gen // 2, 50


# ---- side by side --------------------------------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> int:
    result: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}, "new": [], "shared": []}
    logs = options.logs or Path(tempfile.mkdtemp(prefix="kvortex-no-hits-"))
    begin = time.monotonic()

    def tell(kind: str, mode: str, seed: int, number: int) -> None:
        answer = engines.tell(mode, {"do": kind, "seed": seed}, PLAY_TIMEOUT_S)
        if number >= 0 and kind != "prefix":
            result[kind].append({"round": number, "mode": mode, **answer})
            result["summary"] = summary(result, options.modes)
            save(options.json, result)
        shown = {name: answer[name] for name in ("wall_s", *FIGURES, "grown")}
        grown = answer["grown"] or {}
        if kind == "new" and grown.get("tokens_vram_hit", 0) + grown.get("tokens_ram_hit", 0):
            result.setdefault("void", []).append(f"round {number} of {mode} had hits: {grown}")
        print(f"{time.monotonic() - begin:5.0f} s  {kind} {number} {mode}: {json.dumps(shown)}", flush=True)

    try:
        with Engines(__file__, options.modes, sys.argv[1:], logs) as engines:
            result["start"] = engines.started(START_TIMEOUT_S)
            print(f"{time.monotonic() - begin:5.0f} s  all engines are ready", flush=True)
            for mode in options.modes:  # graphs, and a pool that is full when the first round begins
                tell("new", mode, 1_000_000, -1)
            for number in range(options.rounds):
                turn = options.modes[number % len(options.modes) :] + options.modes[: number % len(options.modes)]
                shared = number < options.shared
                for mode in turn if shared else []:
                    tell("prefix", mode, 10_000 + number, number)
                for mode in turn:
                    tell("new", mode, number, number)
                for mode in turn if shared else []:
                    tell("shared", mode, 10_000 + number, number)
    except EngineFailedError as error:
        result["failed"] = str(error)
        save(options.json, result)
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(result["summary"], indent=1))
    for line in result.get("void", []):
        print(f"VOID: {line}", file=sys.stderr)
    return 1 if "void" in result else 0


def summary(result: dict[str, Any], modes: list[str]) -> dict[str, Any]:
    """For each load: every mode's median and spread, and its ratio to plain vLLM and to KVortex in the same round."""
    text: dict[str, Any] = {}
    for kind in ("new", "shared"):
        plays = {(play["mode"], play["round"]): play for play in result[kind]}
        for mode in modes:
            mine = [number for played, number in plays if played == mode]
            if not mine:
                continue
            figures: dict[str, Any] = {name: spread([plays[mode, number][name] for number in mine]) for name in FIGURES}
            for base in ("plain", "kvortex"):
                both = [number for number in mine if (base, number) in plays]
                if base == mode or not both:
                    continue
                for name in FIGURES:
                    ratios = [plays[mode, number][name] / plays[base, number][name] for number in both]
                    figures[name][f"of_{base}"] = spread(ratios)
            text[f"{kind} {mode}"] = figures
    return text


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "least": round(min(values), 4),
        "most": round(max(values), 4),
    }


if __name__ == "__main__":
    main()
