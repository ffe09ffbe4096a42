"""A vLLM engine with dummy weights of a Llama shape, with or without KVortex, for the benchmarks beside this file."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from multi_turn import LLAMA
from multi_turn import SHAPES as FULL_SHAPES

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 512,
}
"""For trying a benchmark out on vLLM's CPU build."""

SHAPES: dict[str, dict[str, int]] = {**FULL_SHAPES, "tiny": TINY}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Attributes:
    layers: instead of the shape's own, to start faster; None keeps them.
    vram_gb: KV on each GPU.
    ram_gb: KV in host RAM, in all; used with `kv_cache`.
    vram_share: of a GPU's memory that this engine may take; two engines on one GPU need less than half each.
    kv_cache: KVortex's settings beside the sizes; None is plain vLLM.
    """

    shape: str = "8b"
    layers: int | None = None
    vram_gb: float = 24.0
    ram_gb: float = 70.0
    block_size: int = 128
    tensor_parallel_size: int = 1
    max_model_len: int = 32768
    vram_share: float = 0.9
    kv_cache: dict[str, Any] | None = None

    @property
    def num_layers(self) -> int:
        return self.layers or SHAPES[self.shape]["num_hidden_layers"]

    @property
    def vocabulary(self) -> int:
        return {**LLAMA, **SHAPES[self.shape]}["vocab_size"]


def start_engine(options: EngineOptions) -> tuple[Any, float]:
    """vLLM's AsyncLLM, ready, and the seconds that making it took."""
    from vllm import AsyncEngineArgs
    from vllm.config import KVTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    model = Path(tempfile.mkdtemp(prefix="kvortex-benchmark-"))
    shape = {**LLAMA, **SHAPES[options.shape], "num_hidden_layers": options.num_layers}
    (model / "config.json").write_text(json.dumps(shape))
    transfer = None
    if options.kv_cache is not None:
        transfer = KVTransferConfig(
            kv_connector="KVortexConnector",
            kv_connector_module_path="kvortex.vllm_plugin.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "ram_cache_size": int(options.ram_gb * 1e9),
                "block_size": options.block_size,
                **options.kv_cache,
            },
        )
    tiny = options.shape == "tiny"
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
    begin = time.perf_counter()
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=options.max_model_len,
            tensor_parallel_size=options.tensor_parallel_size,
            gpu_memory_utilization=options.vram_share,
            kv_cache_memory_bytes=int(options.vram_gb * 1e9),
            block_size=options.block_size,
            enable_prefix_caching=True,
            max_num_batched_tokens=1024 if tiny else 8192,
            enforce_eager=tiny,
            **({} if tiny else {"compilation_config": graphs}),
            kv_transfer_config=transfer,
            disable_log_stats=True,
        )
    )
    return engine, time.perf_counter() - begin


def read_counters(engine: Any) -> dict[str, Any] | None:
    """KVortex's statistics; None for plain vLLM."""
    transfer = engine.vllm_config.kv_transfer_config
    if transfer is None:
        return None
    from kvortex.vllm_plugin.stats_socket import ask_engine

    return ask_engine(str(transfer.engine_id), "stats")


async def rest(engine: Any, within_s: float = 10.0) -> dict[str, Any] | None:
    """Waits until no copy is under way, so that what is measured next has the machine alone; then the counters."""
    end = time.monotonic() + within_s
    counters = read_counters(engine)
    while counters and (counters["store"]["in_flight"] or counters["load"]["in_flight"]) and time.monotonic() < end:
        await asyncio.sleep(0.05)
        counters = read_counters(engine)
    return counters


@dataclass(slots=True)
class Load:
    """What one play of requests took; seconds, in the order in which requests ended."""

    wall_s: float = 0.0
    num_output_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    """In the order of the prompts."""

    def figures(self) -> dict[str, float]:
        return {
            "wall_s": round(self.wall_s, 3),
            "output_tokens_per_s": round(self.num_output_tokens / self.wall_s, 2),
            "ttft_p50_ms": quantile_ms(self.ttft_s, 0.5),
            "ttft_p95_ms": quantile_ms(self.ttft_s, 0.95),
            "ttft_p99_ms": quantile_ms(self.ttft_s, 0.99),
            "latency_p50_ms": quantile_ms(self.latency_s, 0.5),
            "latency_p99_ms": quantile_ms(self.latency_s, 0.99),
        }


def quantile_ms(seconds: Sequence[float], share: float) -> float:
    """The nearest rank."""
    ordered = sorted(seconds)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 2)


async def ask_all(engine: Any, prompts: Sequence[list[int]], num_tokens: int | Sequence[int], at_once: int) -> Load:
    """Asks every prompt for exactly so many tokens, each for its own number of them or all for one."""
    from vllm import SamplingParams

    wanted = [num_tokens] * len(prompts) if isinstance(num_tokens, int) else num_tokens
    slots = asyncio.Semaphore(at_once)
    load = Load(answers=[[] for _ in prompts])

    async def ask(index: int) -> None:
        async with slots:
            begin, first = time.perf_counter(), None
            name = f"{index}-{time.monotonic_ns()}"
            params = SamplingParams(temperature=0, max_tokens=wanted[index], ignore_eos=True, detokenize=False)
            async for output in engine.generate({"prompt_token_ids": prompts[index]}, params, name):
                first = first or time.perf_counter()
                load.answers[index] = list(output.outputs[0].token_ids)
            assert first is not None, f"no answer to prompt {index}"
            load.ttft_s.append(first - begin)
            load.latency_s.append(time.perf_counter() - begin)

    begin = time.perf_counter()
    await asyncio.gather(*(ask(i) for i in range(len(prompts))))
    load.wall_s = time.perf_counter() - begin
    load.num_output_tokens = sum(map(len, load.answers))
    return load


def add_engine_options(parser: argparse.ArgumentParser, defaults: EngineOptions) -> None:
    """The options that every benchmark of an engine has."""
    parser.add_argument("--shape", choices=SHAPES, default=defaults.shape)
    parser.add_argument("--layers", type=int, default=defaults.layers, help="instead of the shape's own")
    parser.add_argument("--vram-gb", type=float, default=defaults.vram_gb, help="KV in VRAM, a GPU")
    parser.add_argument("--ram-gb", type=float, default=defaults.ram_gb, help="KV in RAM, in all, an engine")
    parser.add_argument("--block-size", type=int, default=defaults.block_size)
    parser.add_argument("--tensor-parallel-size", type=int, default=defaults.tensor_parallel_size)
    parser.add_argument("--max-model-len", type=int, default=defaults.max_model_len)
    parser.add_argument("--vram-share", type=float, default=defaults.vram_share, help="of a GPU, an engine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after each part")


def engine_options(options: argparse.Namespace, kv_cache: dict[str, Any] | None) -> EngineOptions:
    names = [name for name in asdict(EngineOptions()) if name != "kv_cache"]
    return EngineOptions(**{name: getattr(options, name) for name in names}, kv_cache=kv_cache)


def save(path: Path | None, document: dict[str, Any]) -> None:
    """Replaces the file, so that it is whole whenever the process ends."""
    if path is None:
        return
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.replace(path)
