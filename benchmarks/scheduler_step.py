"""What the scheduler side costs a step of vLLM's, with a full index and a large block pool.

    python benchmarks/scheduler_step.py --blocks 1000000 --json step.json

Needs vLLM for its block pool, and no GPU. An idle step has nothing to store; a storing step gives out a batch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import vllm
from vllm.v1.core.block_pool import BlockPool

from kvortex.cache.index import BlockIndex, Reservation
from kvortex.cache.planner import Watermarks
from kvortex.cache.policies import make_policy
from kvortex.cache.prefix import GroupShape
from kvortex.keys import BlockKey
from kvortex.vllm_plugin.scheduler import SchedulerSide

BATCH = 1000
STORING_STEPS = 9


def full_side(num_blocks: int, vram_blocks: int) -> tuple[SchedulerSide, BlockPool]:
    """A scheduler side whose RAM has `num_blocks` READY blocks, over a pool of `vram_blocks` complete ones."""
    index = BlockIndex(num_blocks, make_policy("lru", num_blocks))
    for _ in range(num_blocks // BATCH):
        reservation = index.reserve([BlockKey(os.urandom(32) + bytes(4)) for _ in range(BATCH)])
        assert isinstance(reservation, Reservation)
        index.publish(reservation.slots)
    facts = SimpleNamespace(
        settings=SimpleNamespace(transfer_timeout=30.0, prefetch_enabled=False, verify="off"),
        watermarks=Watermarks(0.85, 0.75, BATCH, idle_after_s=30.0, ahead_blocks=BATCH),
        num_ranks=1,
        server_block_bytes=1 << 20,
    )
    pool = BlockPool(vram_blocks, enable_caching=True, hash_block_size=128)
    side = SchedulerSide(facts, index, [GroupShape(0, 128)], drop_last_block=False)  # type: ignore[arg-type]
    side.bind_pool(pool)
    return side, pool


def fill(pool: BlockPool, num_blocks: int) -> None:
    """Takes that many blocks, makes them complete, as vLLM does, and lets go of them."""
    blocks = pool.get_new_blocks(num_blocks)
    for block in blocks:
        pool._insert_block_hash(os.urandom(32) + bytes(4), block, 128)
    pool.free_blocks(blocks)


def seconds_of_step(side: SchedulerSide) -> float:
    output = SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0)
    start = time.perf_counter()
    side.plan_step(output)  # type: ignore[arg-type]
    return time.perf_counter() - start


def storing_steps(side: SchedulerSide, pool: BlockPool) -> list[float]:
    """Seconds of steps that each store a batch: what VRAM takes next, now that all of it is taken."""
    fill(pool, pool.get_num_free_blocks())
    seconds = []
    for step in range(STORING_STEPS):
        seconds.append(seconds_of_step(side))
        assert side.planner.in_flight_blocks == (step + 1) * BATCH, side.planner.in_flight_blocks
        fill(pool, BATCH)
    return seconds


def in_us(seconds: list[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds) * 1e6, "worst": max(seconds) * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks held in RAM")
    parser.add_argument("--vram-blocks", type=int, default=100_000, help="blocks of vLLM's pool")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    side, pool = full_side(options.blocks, options.vram_blocks)
    fill(pool, options.vram_blocks * 8 // 10)
    idle = [seconds_of_step(side) for _ in range(options.runs)]
    storing = storing_steps(side, pool)
    result = {
        "blocks": options.blocks,
        "vram_blocks": options.vram_blocks,
        "idle_step_us": in_us(idle),
        "storing_step_of_1000_us": in_us(storing),
        "vllm": vllm.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
