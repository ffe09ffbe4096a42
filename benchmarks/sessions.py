"""Is the conversation back before its user? Sessions with think times on servers over HTTP, one after another.

    python benchmarks/sessions.py --json sessions.json                     # all modes, a GPU, dummy weights of 8B
    python benchmarks/sessions.py off prefetch --think agents --rate 0.8 --seed 1 2 3
    VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 TORCH_COMPILE_DISABLE=1 \\
        python benchmarks/sessions.py off prefetch --tiny                  # to try it out on vLLM's CPU build

vram      no offload, and room in VRAM for every session: KV that never leaves
simple    vLLM's SimpleCPUOffloadConnector
off       KVortex without prefetch
prefetch  KVortex with it
hints     the same, and each session is announced --hint seconds before it goes on: somebody types, a tool will end

Each plays the same open load (`kvortex bench serve --think`); with several seeds one after the other on the same
server, the first of which also meets what a server does at its start, such as pinning its RAM. What is wanted: the
first token of later turns nearly as soon as with `vram`, most of what comes back there before its request, little
brought for nothing, and the time between tokens that `off` has.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm
from dummy_model import make_model
from step_trace import FILE_VARIABLE

from kvortex.bench.figures import percentile
from kvortex.bench.request import Endpoint, Good
from kvortex.bench.server_facts import read_server_facts
from kvortex.bench.server_process import ServerFailedError, ServerProcess
from kvortex.bench.session_figures import Goal, measure_sessions
from kvortex.bench.session_load import PlayedSessions, SessionLoad, play_sessions
from kvortex.bench.think import Think
from kvortex.bench.vocabulary import Vocabulary
from kvortex.bench.workload import Workload
from kvortex.config.command_line import OWN_PLUGINS, PLUGINS_VARIABLE

MODES = ("vram", "simple", "off", "prefetch", "hints")
START_WITHIN_S, REQUEST_WITHIN_S = 240.0, 120.0
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 48, 64]}


@dataclass(frozen=True, slots=True)
class Shape:
    """Attributes:
    vram_gb: KV in VRAM, half of what the sessions of the load hold while they live.
    all_gb: KV in VRAM for all sessions.
    """

    name: str
    workload: Workload
    vram_gb: float
    ram_gb: float
    all_gb: float
    block_size: int
    options: tuple[str, ...]


def shape_of(options: argparse.Namespace) -> Shape:
    sessions = options.sessions or (12 if options.tiny else 60)
    if options.tiny:
        load = Workload(sessions, 4, 480, 32, 8, sessions, options.seed[0], Vocabulary(128, 512))
        eager = ("--enforce-eager", "--max-model-len", "1152")
        return Shape("tiny", load, 0.0012, 0.1, 0.04, 32, eager)
    load = Workload(sessions, 4, 8192, 512, 128, sessions, options.seed[0], Vocabulary(1000, 30000))
    graphs = ("--compilation-config", json.dumps(GRAPHS), "--max-num-batched-tokens", "8192")
    return Shape(
        "8b", load, options.vram_gb, options.ram_gb, options.all_gb, 128, ("--max-model-len", "16384", *graphs)
    )


def arguments_of(mode: str, shape: Shape, model: Path) -> list[str]:
    """What follows `vllm serve`."""
    vram_gb = shape.all_gb if mode == "vram" else shape.vram_gb
    arguments = [str(model), "--load-format", "dummy", "--block-size", str(shape.block_size), *shape.options]
    arguments += ["--kv-cache-memory-bytes", str(int(vram_gb * 1e9)), "--enable-prefix-caching"]
    transfer: dict[str, Any] = {"kv_role": "kv_both"}
    match mode:
        case "vram":
            return arguments
        case "simple":
            extra: dict[str, Any] = {"cpu_bytes_to_use": int(shape.ram_gb * 1e9), "lazy_offload": False}
            transfer |= {"kv_connector": "SimpleCPUOffloadConnector"}
        case _:
            extra = {"ram_cache_size": int(shape.ram_gb * 1e9), "block_size": shape.block_size}
            extra["prefetch_enabled"] = mode in ("prefetch", "hints")
            transfer |= {"kv_connector": "KVortexConnector", "kv_load_failure_policy": "recompute"}
    return [*arguments, "--kv-transfer-config", json.dumps({**transfer, "kv_connector_extra_config": extra})]


def times_of(plays: Sequence[PlayedSessions]) -> dict[str, float | None]:
    """Milliseconds, of the plays together: to the first token where a session goes on; between tokens, of all requests
    and of first turns alone, which nobody can bring anything back for; of whole answers where a session goes on."""
    first = [result for played in plays for result in played.turns[0] if isinstance(result, Good)]
    later = [result for played in plays for turn in played.turns[1:] for result in turn if isinstance(result, Good)]
    of_first = [result.tpot_s for result in first if result.tpot_s is not None]
    of_all = of_first + [result.tpot_s for result in later if result.tpot_s is not None]
    figures = {
        "ttft_p50_ms": percentile([r.ttft_s for r in later], 0.5),
        "ttft_p99_ms": percentile([r.ttft_s for r in later], 0.99),
        "tpot_p50_ms": percentile(of_all, 0.5),
        "tpot_p99_ms": percentile(of_all, 0.99),
        "first_tpot_p50_ms": percentile(of_first, 0.5),
        "first_tpot_p99_ms": percentile(of_first, 0.99),
        "latency_p50_ms": percentile([r.latency_s for r in later], 0.5),
        "latency_p99_ms": percentile([r.latency_s for r in later], 0.99),
    }
    return {name: None if seconds is None else seconds * 1e3 for name, seconds in figures.items()}


def run(
    mode: str, shape: Shape, load: SessionLoad, seeds: Sequence[int], model: Path, logs: Path, *, trace: bool
) -> dict[str, Any]:
    """One server's figures, of each seed's play; what failed, where it did."""
    server_program = [str(Path(__file__).with_name("step_trace.py"))] if trace else ["-m", "kvortex.vllm_plugin.server"]
    command = [sys.executable, *server_program, *arguments_of(mode, shape, model)]
    ours = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", PLUGINS_VARIABLE: ",".join(OWN_PLUGINS)}
    environment = {**os.environ, **ours}
    if trace:
        environment[FILE_VARIABLE] = str((logs / f"{mode}.steps.jsonl").resolve())
    server = ServerProcess(command, environment, log=logs / f"{mode}.log", ready_within_s=START_WITHIN_S, say=say)
    load = load if mode == "hints" else dataclasses.replace(load, hint_s=None)
    played: list[PlayedSessions] = []
    plays: list[dict[str, Any]] = []
    try:
        with server:
            say(f"{mode}: ready after {server.start_s:.0f} s")
            endpoint = Endpoint(server.url, read_server_facts(server.url, None).model, None)
            for seed in seeds:
                seeded = dataclasses.replace(load, workload=dataclasses.replace(load.workload, seed=seed))
                played.append(asyncio.run(play_sessions(endpoint, seeded, timeout_s=REQUEST_WITHIN_S, say=say)))
                plays.append(figures_of(seed, played[-1]))
                say(f"{mode}, seed {seed}: {json.dumps(plays[-1]['times'])}")
    except ServerFailedError as failed:
        return {"mode": mode, "plays": plays, "failed": failed.message, "log_tail": failed.log_tail[-20:]}
    over_plays = {"medians": medians(plays), "together": times_of(played)}
    return {"mode": mode, "start_s": round(server.start_s, 1), "plays": plays, **over_plays}


def figures_of(seed: int, played: PlayedSessions) -> dict[str, Any]:
    measured, sessions = measure_sessions(played, Goal(1.0, 0.1))
    return {
        "seed": seed,
        "requests": dataclasses.asdict(measured.requests),
        "times": times_of([played]),
        "ttft_ms": [[round(r.ttft_s * 1e3, 1) for r in turn if isinstance(r, Good)] for turn in played.turns],
        "tpot_ms": [[round((r.tpot_s or 0.0) * 1e3, 2) for r in turn if isinstance(r, Good)] for turn in played.turns],
        "sessions": dataclasses.asdict(sessions),
        "sources": None if measured.sources is None else dataclasses.asdict(measured.sources),
        "notes": measured.notes,
    }


def medians(plays: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Over the plays."""
    figures = [
        {name: play["sessions"][name] for name in ("prefetched_share", "wasted_share")} | play["times"]
        for play in plays
    ]
    return {name: percentile([f[name] for f in figures if f[name] is not None], 0.5) for name in figures[0]}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", metavar="MODE", help=f"of {', '.join(MODES)}; all if none is named")
    parser.add_argument("--think", type=Think, choices=list(Think), default=Think.MIXED)
    parser.add_argument("--rate", type=float, default=0.9, help="sessions that begin a second")
    parser.add_argument("--hint", type=float, default=2.0, help="seconds, of mode hints (%(default)s)")
    parser.add_argument("--sessions", type=int, help="that play")
    parser.add_argument("--for", type=float, dest="for_s", help="seconds after which no turn begins; all turns")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="a play each")
    parser.add_argument("--vram-gb", type=float, default=24.0)
    parser.add_argument("--ram-gb", type=float, default=70.0)
    parser.add_argument("--all-gb", type=float, default=90.0, help="of KV in VRAM, mode vram (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    parser.add_argument("--logs", type=Path, help="where the servers' output goes")
    parser.add_argument("--trace", action="store_true", help="each engine's steps, beside its output: step_trace.py")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # its server ends with it
    modes = options.modes or list(MODES)
    if unknown := set(modes) - set(MODES):
        parser.error(f"there is no mode {sorted(unknown)[0]!r}: {', '.join(MODES)}")
    shape = shape_of(options)
    load = SessionLoad(shape.workload, options.think, options.rate, options.hint, options.for_s)
    folder = Path(tempfile.mkdtemp(prefix="kvortex-sessions-"))
    logs = options.logs or folder
    logs.mkdir(parents=True, exist_ok=True)
    model = make_model(folder / "model", shape.name)
    results: list[dict[str, Any]] = []
    for mode in modes:
        results.append(run(mode, shape, load, options.seed, model, logs, trace=options.trace))
        plays = [{k: v for k, v in play.items() if k not in ("ttft_ms", "tpot_ms")} for play in results[-1]["plays"]]
        print(json.dumps(results[-1] | {"plays": plays}, default=str), flush=True)
        document = {
            "load": dataclasses.asdict(load),
            "vram_gb": shape.vram_gb,
            "ram_gb": shape.ram_gb,
            "vllm": vllm.__version__,
            "python": platform.python_version(),
            "results": results,
        }
        if options.json:  # what there is so far: a later server may fail
            options.json.write_text(json.dumps(document, indent=2, default=str) + "\n")
    if any("failed" in result for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
