"""Opens the engine of a trial's process, and plays a load on it step by step."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.e2e.engine import Engine
    from tests.gpu.watched_engine import WatchedEngine

MODES = ("plain", "through", "defaults", "zeros")
"""vLLM alone; KVortex that writes through; KVortex with its default thresholds; KVortex whose loads bring zeros."""

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
"""Of vLLM, in every process that plays or judges.

Without VLLM_BATCH_INVARIANT: on an H200, plain vLLM 0.26 disagreed with itself about 39 of 96 answers with it and 44
without, so that answers have to be judged anyway, and are, of the kernels that users run.
"""

VRAM_SHARE = 0.2
"""Of a GPU: several modes may share it."""

STALL_S = 60.0
"""Without a token for so long, an engine with work hangs."""


def trial_options(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("model", help="the model's folder")
    parser.add_argument("out", type=Path, help="JSON, written after each part")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser


class Trial:
    """A running engine under watch, and what its loads left behind so far."""

    def __init__(self, vllm: Engine, options: argparse.Namespace, opened: list[WatchedEngine]) -> None:
        self.vllm = vllm
        self.mode: str = options.mode
        self._out: Path = options.out
        self._opened = opened
        self._result: dict[str, Any] = {"mode": options.mode, "device": options.device}
        if self.mode != "plain":
            self._tell_of_new_blocks()

    def _tell_of_new_blocks(self) -> None:
        """The watcher hears which GPU blocks vLLM hands out: they are about to be computed, or loaded."""
        pool, watch = self.vllm.pool, self.watch
        get_new_blocks = pool.get_new_blocks

        def told(*args: Any, **kwargs: Any) -> Any:
            blocks = get_new_blocks(*args, **kwargs)
            watch.forget(block.block_id for block in blocks)
            return blocks

        pool.get_new_blocks = told

    def part(self, name: str, play: Any) -> dict[str, Any]:
        """Plays a load and writes its result, with the counters before and after."""
        before = self._counters()
        begin = time.perf_counter()
        result: dict[str, Any] = play()
        result["seconds"] = round(time.perf_counter() - begin, 1)
        after = self._counters()
        clean = None if after is None else self._clean_blocks()
        self.write(name, {**result, "before": before, "after": after, "clean": clean})
        return result

    @property
    def watch(self) -> WatchedEngine:
        (watch,) = self._opened
        return watch

    def _counters(self) -> dict[str, Any] | None:
        if self.mode == "plain":
            return None
        self.vllm.settle()
        watched = {"loaded": self.watch.num_loaded, "wrong": self.watch.num_wrong}
        return {**self.vllm.stats(), "watched": watched}

    def _clean_blocks(self) -> dict[str, int]:
        """Every GPU block whose key RAM holds, too, and how many of them have other bytes than RAM; the same of those
        that a copy last filled, or was made from; and how many vLLM has under another key than KVortex."""
        residency, index = self.vllm.side._residency, self.vllm.side._index
        blocks, keys = list(residency._key_of), list(residency._key_of.values())
        pairs = [(blocks[i], slot) for i, slot in index.ready_slots(keys).items()]
        copied = [pair for pair in pairs if self.watch.is_copy(*pair)]
        return {
            "blocks": len(pairs),
            "unequal": self.watch.num_unequal(pairs),
            "copied": len(copied),
            "copied_unequal": self.watch.num_unequal(copied),
            "misfiled": sum(block not in self._found_under(key) for block, key in residency._key_of.items()),
        }

    def _found_under(self, key: Any) -> set[int]:
        entry = self.vllm.pool.cached_block_hash_to_block._cache.get(key)
        blocks = entry.values() if isinstance(entry, dict) else () if entry is None else (entry,)
        return {block.block_id for block in blocks}

    def write(self, name: str, result: dict[str, Any]) -> None:
        self._result[name] = result
        part = self._out.with_suffix(".part")
        part.write_text(json.dumps(self._result))
        part.replace(self._out)
        print(f"{self.mode} {name}: {result.get('seconds')} s", flush=True)


@contextmanager
def trial_engine(
    options: argparse.Namespace, *, block: int, pool: int, ram_bytes: int, **engine_options: Any
) -> Iterator[Trial]:
    """vLLM in this process. What it was told is written, for the judge to be told the same."""
    os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0")  # the test looks into the engine
    from kvortex.vllm_plugin.register import register_connector
    from tests.e2e.engine import WRITE_THROUGH, arguments_of, engine
    from tests.gpu.watched_engine import watched

    register_connector()  # the package need not be installed
    kv_cache: dict[str, Any] | None = {"block_size": block, "ram_cache_size": ram_bytes}
    if options.mode == "plain":
        kv_cache = None
    elif options.mode != "defaults":
        kv_cache |= WRITE_THROUGH
    engine_options["block_size"] = block
    if options.device == "cuda":
        engine_options["gpu_memory_utilization"] = VRAM_SHARE
    begin = time.perf_counter()
    with (
        watched(zeros=options.mode == "zeros") as opened,
        engine(options.model, kv_cache, num_blocks=pool, **engine_options) as vllm,
    ):
        trial = Trial(vllm, options, opened)
        seconds = round(time.perf_counter() - begin, 1)
        trial.write("start", {"seconds": seconds, "engine": arguments_of(pool, **engine_options)})
        yield trial


# ---- a load --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Played:
    """Attributes:
    answers: token ids, in the order of the prompts.
    ttft_s: seconds from asking to the first token.
    """

    answers: list[tuple[int, ...]]
    ttft_s: list[float]
    wall_s: float

    def figures(self) -> dict[str, Any]:
        late = sorted(self.ttft_s)
        tokens = sum(map(len, self.answers))
        return {
            "wall_s": round(self.wall_s, 3),
            "output_tokens_per_s": round(tokens / self.wall_s, 1),
            "ttft_p50_ms": round(late[len(late) // 2] * 1e3, 1),
            "ttft_p95_ms": round(late[min(len(late) - 1, int(0.95 * len(late)))] * 1e3, 1),
        }


class StalledError(Exception):
    """The engine has requests and makes no progress."""


def play(
    vllm: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, at_once: int, *, stall_s: float = STALL_S
) -> Played:
    """Asks all prompts, in order, so many at a time.

    Raises:
        StalledError: no token came for `stall_s`.
    """
    from vllm import SamplingParams

    llm = vllm.llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    asked_at: list[float] = []
    ttft_s = [0.0] * len(prompts)
    answers: list[tuple[int, ...]] = [()] * len(prompts)
    num_done = 0
    begin = last_progress = time.perf_counter()
    while num_done < len(prompts):
        while len(asked_at) < len(prompts) and len(asked_at) - num_done < at_once:
            index = len(asked_at)
            asked_at.append(time.perf_counter())
            llm.add_request(f"r{index}x{time.monotonic_ns()}", {"prompt_token_ids": list(prompts[index])}, params)
        outputs = llm.step()
        now = time.perf_counter()
        for output in outputs:
            index = int(output.request_id[1:].split("x")[0])
            if not answers[index]:
                ttft_s[index] = now - asked_at[index]
            answers[index] = tuple(output.outputs[0].token_ids)
            num_done += output.finished
            last_progress = now
        if now - last_progress > stall_s:
            raise StalledError(f"no token for {stall_s:.0f} s, {len(asked_at) - num_done} requests wait")
    return Played(answers, ttft_s, time.perf_counter() - begin)
