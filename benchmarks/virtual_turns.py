"""What of `multi_turn.py`'s load VRAM and RAM hold together, without a GPU.

vLLM's own scheduler and block pool, KVortex's own scheduler side, and a worker that only keeps time.

    python benchmarks/virtual_turns.py --vram-gb 24 --ram-gb 30
    python benchmarks/virtual_turns.py --vram-gb 24 --ram-gb 30 --kv-cache '{"eviction_policy": "lru"}'
    python benchmarks/virtual_turns.py --vram-gb 24 --ram-gb 0          # no offload

A step takes `--step-ms`, and `--token-us` for each prompt token in it; a link each way moves one order after the other.
The defaults are an H200's with the Llama-3.1-8B shape. Hit shares are vLLM's and KVortex's doing; times, an estimate.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import tempfile
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import vllm
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvortex.cache.policies import make_deferred
from kvortex.messages import CopyOrder, Direction, JobResult, Outcome, StepPlan, StepReport
from kvortex.vllm_plugin import connector as plugin
from kvortex.vllm_plugin.scheduler import SchedulerSide

LAYERS, KV_HEADS, HEAD_DIM = 32, 8, 128
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
LOST = "vram_uncopied_blocks"


class Worker:
    """Takes a step's plan, and answers each order once the link has had time for it."""

    def __init__(self, block_bytes: int, bytes_a_second: float, lag_steps: int) -> None:
        self._ends_seen = deque([0.0] * lag_steps)
        self.block_s = block_bytes / bytes_a_second
        self._free_at = {Direction.STORE: 0.0, Direction.LOAD: 0.0}
        self._orders: deque[tuple[float, JobResult, str | None, bool]] = deque()
        self._late_stores: list[CopyOrder] = []

    def take(self, plan: StepPlan, now_s: float) -> float:
        """When the loads that go with the step have ended; the step's kernels wait for them."""
        last_s = now_s
        of_step = {order.job_id for order in plan.step_loads}
        # Of what this very step computes, a store begins behind it.
        self._late_stores = [order for order in plan.stores if order.written_by == plan.number]
        early_stores = [order for order in plan.stores if order.written_by != plan.number]
        for order in [*plan.loads, *plan.step_loads, *plan.prefetches, *early_stores]:
            goes_with_step = order.job_id in of_step
            request = plan.requests.get(order.job_id)
            end_s = self._begin(order, now_s, None if goes_with_step else request, at_once=request is None)
            if goes_with_step:
                last_s = max(last_s, end_s)
        return last_s

    def _begin(self, order: CopyOrder, now_s: float, request: str | None, *, at_once: bool) -> float:
        seconds = len(order.slots) * self.block_s
        end_s = self._free_at[order.direction] = max(now_s, self._free_at[order.direction]) + seconds
        result = JobResult(order.job_id, order.direction, Outcome.DONE, seconds, 0)
        self._orders.append((end_s, result, request, at_once))
        return end_s

    def moving_s(self, begin_s: float, end_s: float) -> float:
        """Seconds of a step's time in which each link moves bytes, both directions added."""
        return sum(min(max(0.0, free_s - begin_s), end_s - begin_s) for free_s in self._free_at.values())

    def timed(self, number: int, seconds: float) -> None:
        """A step that the scheduler asked to be timed; 0 is one that it did not."""

    def answers(self, now_s: float) -> KVConnectorOutput:
        for order in self._late_stores:
            self._begin(order, now_s, None, at_once=True)
        self._late_stores = []
        self._ends_seen.append(now_s)
        seen_s = self._ends_seen.popleft()
        # Stores and prefetches are told at once, see `take_late_report`.
        seen = [end_s <= (now_s if at_once else seen_s) for end_s, _, _, at_once in self._orders]
        ended = [order for order, is_seen in zip(self._orders, seen, strict=True) if is_seen]
        self._orders = deque(order for order, is_seen in zip(self._orders, seen, strict=True) if not is_seen)
        report = StepReport({0: [result for _, result, _, _ in ended]}) if ended else None
        return KVConnectorOutput(
            finished_recving={request for _, _, request, _ in ended if request is not None} or None,
            kv_connector_worker_meta=None if report is None else plugin.KVortexWorkerMetadata(report),
        )


class Play:
    """One engine's scheduler under the load of `multi_turn.py`, on a clock that only steps move."""

    make_worker = Worker

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.now_s = 0.0
        # Of this machine, not of the model: seconds of the steps that admit nobody, and of those that admit somebody.
        self.schedule_s: tuple[list[float], list[float]] = ([], [])
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(MODEL))
            config = self._engine_args(folder).create_engine_config()
        spec = FullAttentionSpec(
            block_size=options.block_size, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=torch.bfloat16
        )
        config.cache_config.kv_cache_layout = "LBNHC"
        specs = {f"model.layers.{i}.self_attn.attn": spec for i in range(LAYERS)}
        (kv_cache,) = get_kv_cache_configs(config, [specs], [int(options.vram_gb * 1e9)])
        config.cache_config.num_gpu_blocks = kv_cache.num_blocks
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(options.block_size, sha256)
        self.num_blocks = kv_cache.num_blocks
        clock = lambda: self.now_s  # noqa: E731
        with (
            patch.object(plugin, "SchedulerSide", partial(SchedulerSide, clock=clock)),
            patch.object(plugin, "make_deferred", partial(make_deferred, clock=clock)),
            patch.object(plugin, "end_with_parent"),
            patch.object(plugin, "StatsServer"),
        ):
            self.scheduler = Scheduler(config, kv_cache, StructuredOutputManager(config), block_size=options.block_size)
        block_bytes = options.block_size * 2 * LAYERS * KV_HEADS * HEAD_DIM * 2
        self._worker = self.make_worker(block_bytes, options.link_gb_s * 1e9, options.lag_steps)

    def _engine_args(self, folder: str) -> EngineArgs:
        options = self._options
        offload: dict[str, Any] = {}
        if options.ram_gb:
            offload["kv_transfer_config"] = KVTransferConfig(
                kv_connector="KVortexConnector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"ram_cache_size": int(options.ram_gb * 1e9), **options.kv_cache},
            )
        return EngineArgs(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=32768,
            block_size=options.block_size,
            kv_cache_memory_bytes=int(options.vram_gb * 1e9),
            enable_prefix_caching=True,
            max_num_batched_tokens=8192,
            **offload,
        )

    def run(self) -> list[dict[str, Any]]:
        """One row a turn."""
        options = self._options
        dice = random.Random(0)
        talks = [[dice.randrange(10, 128000) for _ in range(options.first)] for _ in range(options.conversations)]
        rows = []
        for turn in range(options.turns):
            before, start_s = self._totals(), self.now_s
            prompts = 0
            waits = []
            due = deque(range(options.conversations))
            live: dict[int, tuple[Request, float]] = {}
            first_s: dict[int, float] = {}
            while due or live:
                while due and len(live) < options.concurrency:
                    talk = due.popleft()
                    if turn:
                        talks[talk] += [dice.randrange(10, 128000) for _ in range(options.added)]
                    prompts += len(talks[talk])
                    live[talk] = (self._request(f"{talk}-{turn}", talks[talk]), self.now_s)
                    self.scheduler.add_request(live[talk][0])
                self._step()
                for talk, (request, asked_s) in list(live.items()):
                    if request.num_output_tokens and talk not in first_s:
                        first_s[talk] = self.now_s
                        waits.append(self.now_s - asked_s)
                    if request.is_finished():
                        talks[talk] += request.output_token_ids
                        del live[talk]
            after, seconds = self._totals(), self.now_s - start_s
            waits.sort()
            rows.append(
                {
                    "turn": turn + 1,
                    "prompt_tokens": prompts,
                    "seconds": round(seconds, 2),
                    "output_tokens_s": round(options.conversations * options.answer / seconds),
                    "ttft_p50_ms": round(waits[len(waits) // 2] * 1e3),
                    "ttft_p99_ms": round(waits[-1] * 1e3),
                    **{name: after[name] - before.get(name, 0) for name in after},
                }
            )
        return rows

    def _request(self, name: str, tokens: list[int]) -> Request:
        params = SamplingParams(temperature=0, max_tokens=self._options.answer, ignore_eos=True)
        return Request(name, list(tokens), params, None, arrival_time=self.now_s, block_hasher=self._hasher)

    def _step(self) -> None:
        scheduler, options = self.scheduler, self._options
        begin = time.perf_counter()
        order = scheduler.schedule()
        self.schedule_s[bool(order.scheduled_new_reqs)].append(time.perf_counter() - begin)
        counts = order.num_scheduled_tokens
        prefilled = sum(n for n in counts.values() if n > 1)
        seconds = (options.step_ms * 1e-3 if counts else 1e-3) + prefilled * options.token_us * 1e-6
        ends_s = self.now_s + seconds
        if order.kv_connector_metadata is not None:
            plan = order.kv_connector_metadata.plan
            # All layers but the last compute while the next one's bytes come.
            ends_s = max(ends_s, self._worker.take(plan, self.now_s) + seconds / LAYERS)
            self._worker.timed(plan.timed_as, seconds)
        self.now_s = ends_s + self._more_s(ends_s)
        sampled = []
        for name in counts:
            request = scheduler.requests[name]
            sampled.append([7] if request.num_computed_tokens >= request.num_tokens else [])
        moved = self._worker.answers(self.now_s) if options.ram_gb else None
        output = ModelRunnerOutput(list(counts), {n: i for i, n in enumerate(counts)}, sampled)
        output.kv_connector_output = moved
        scheduler.update_from_output(order, output)

    def _more_s(self, ends_s: float) -> float:  # noqa: ARG002
        """What else the step that began now and ends at `ends_s` is charged with."""
        return 0.0

    def _totals(self) -> dict[str, int]:
        if not self._options.ram_gb:
            return {}
        side = self.scheduler.connector._scheduler_side
        snapshot = side.snapshot()
        side._index.check()
        side._residency.check()
        tokens = snapshot["tokens"]
        return {
            **{name: tokens[name] for name in ("queried", "vram_hit", "ram_hit", "computed")},
            "stored_blocks": snapshot["store"]["blocks"],
            "loaded_blocks": snapshot["load"]["blocks"],
            "lost_blocks": snapshot["evicted"][LOST],
            "ram_evicted_blocks": snapshot["evicted"]["ram_blocks"],
            **{f"refused_{reason}": count for reason, count in sorted(side._ledger.refused.items(), key=str)},
        }


def add_options(parser: argparse.ArgumentParser, *, ram_gb: float) -> None:
    parser.add_argument("--vram-gb", type=float, default=24.0)
    parser.add_argument("--ram-gb", type=float, default=ram_gb, help="0: no offload")
    parser.add_argument("--kv-cache", type=json.loads, default={}, metavar="JSON", help="further kv_cache keys")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--first", type=int, default=8192, help="tokens of the first prompt")
    parser.add_argument("--added", type=int, default=512, help="tokens added a turn")
    parser.add_argument("--answer", type=int, default=128, help="tokens generated a turn")
    parser.add_argument("--step-ms", type=float, default=8.0)
    parser.add_argument("--token-us", type=float, default=28.0)
    parser.add_argument("--link-gb-s", type=float, default=47.0)
    parser.add_argument(
        "--lag-steps", type=int, default=1, help="steps a load's answer is late; 1 with async scheduling"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, ram_gb=30.0)
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=16)
    options = parser.parse_args()
    logging.getLogger("vllm").setLevel(logging.WARNING)
    rows = Play(options).run()
    late = rows[1:]
    total = {
        "output_tokens_s": round(options.conversations * options.answer * len(late) / sum(r["seconds"] for r in late))
    }
    if options.ram_gb:
        hits = sum(row["vram_hit"] + row["ram_hit"] for row in late)
        total["hit_share"] = round(hits / sum(row["queried"] for row in late), 3)
    for row in rows:
        print(json.dumps(row))
    print(json.dumps(total))
    if options.json:
        shown = {name: value for name, value in vars(options).items() if name != "json"}
        document = {
            "benchmark": "virtual_turns",
            "vllm": vllm.__version__,
            "options": shown,
            "turns": rows,
            "late": total,
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
