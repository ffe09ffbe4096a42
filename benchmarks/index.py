"""How long the RAM tier's index takes for what a scheduler step asks of it, when it is full.

    python benchmarks/index.py --blocks 1000000 --json index.json

Keys that are looked up are other objects than the stored ones, as in vLLM, where each request hashes anew.
The blocks of one operation were stored far from each other.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import kvortex
from kvortex.cache.index import BlockIndex, Reservation
from kvortex.cache.policies import EVICTION_POLICIES, make_policy
from kvortex.keys import BlockKey

BATCH = 1000
"""Blocks of one operation."""
PROMPT = 100
"""Blocks of one prompt."""


class Stopwatch:
    """Milliseconds of every run of every operation."""

    def __init__(self) -> None:
        self.times_ms: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timing(self, operation: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.times_ms[operation].append((time.perf_counter() - start) * 1e3)

    def rows(self) -> list[dict[str, str | int | float]]:
        return [
            {"operation": name, "runs": len(ms), "median_ms": statistics.median(ms), "worst_ms": max(ms)}
            for name, ms in self.times_ms.items()
        ]


def new_keys(count: int = BATCH) -> list[BlockKey]:
    return [BlockKey(os.urandom(32) + bytes(4)) for _ in range(count)]


def full_index(batches: list[list[BlockKey]], policy: str) -> BlockIndex:
    """An index with as many slots as there are keys, all READY."""
    num_slots = BATCH * len(batches)
    index = BlockIndex(num_slots, make_policy(policy, num_slots))
    for keys in batches:
        ask(index, keys)
        store(index, keys)
    return index


def ask(index: BlockIndex, keys: list[BlockKey]) -> None:
    """One prompt after another, with an answer of 200 tokens each."""
    for start in range(0, len(keys), PROMPT):
        index.prompt(keys[start : start + PROMPT], 128 * PROMPT)
        index.answered(keys[start : start + PROMPT], 200)


def store(index: BlockIndex, keys: list[BlockKey]) -> Reservation:
    reservation = index.reserve(keys)
    assert isinstance(reservation, Reservation), reservation
    index.publish(reservation.slots)
    return reservation


def measure(num_batches: int, policy: str, runs: int, seed: int) -> list[dict[str, str | int | float]]:
    batches = [new_keys() for _ in range(num_batches)]
    index = full_index(batches, policy)
    shuffled = [key for keys in batches for key in keys]
    random.Random(seed).shuffle(shuffled)
    watch = Stopwatch()
    for run in range(runs):
        start = run * BATCH % len(shuffled)
        keys = [BlockKey(bytes(bytearray(key))) for key in shuffled[start : start + BATCH]]
        absent = new_keys()
        with watch.timing("match, all found"):
            slots = index.match(keys)
        assert len(slots) == BATCH, len(slots)
        with watch.timing("match, none found"):
            index.match(absent)
        with watch.timing("absent, all absent"):
            index.absent(absent)
        with watch.timing("ready_slots, all found"):
            index.ready_slots(keys)
        with watch.timing("touch"):
            index.touch(slots)
        with watch.timing("pin"):
            index.pin(slots)
        with watch.timing("unpin"):
            index.unpin(slots)
    for run in range(runs):
        start = run % len(batches)
        prompt = [BlockKey(bytes(bytearray(key))) for key in batches[start][:PROMPT]]
        with watch.timing(f"prompt of {PROMPT} blocks, all found"):
            index.prompt(prompt, 128 * PROMPT)
        with watch.timing(f"answer to a prompt of {PROMPT} blocks"):
            index.answered(prompt, 100)
        absent = new_keys(PROMPT)
        with watch.timing(f"prompt of {PROMPT} blocks, all new"):
            index.prompt(absent, 128 * PROMPT)
        with watch.timing(f"make_room for {PROMPT} blocks"):
            room = index.make_room(absent)
        store(index, list(room.keys))
    for _ in range(2 * num_batches):  # everything is replaced twice, to meet what happens seldom
        keys = new_keys()
        ask(index, keys)
        with watch.timing("reserve, evicting all"):
            reservation = index.reserve(keys)
        assert isinstance(reservation, Reservation), reservation
        with watch.timing("publish"):
            index.publish(reservation.slots)
        assert len(reservation.evicted) == BATCH, len(reservation.evicted)
    with watch.timing("reset of the whole index"):
        index.reset()
    return watch.rows()


def bytes_per_block(num_batches: int, policy: str) -> float:
    """Of a full index in which every block was replaced once, without the bytes of the keys."""
    first, second = ([new_keys() for _ in range(num_batches)] for _ in range(2))
    gc.collect()
    tracemalloc.start()
    index = full_index(first, policy)
    for keys in second:
        ask(index, keys)
        store(index, keys)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.ready == index.num_slots, (index.ready, index.num_slots)
    return held / index.num_slots


def cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the index of the RAM tier, full.")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="multiple of 1000 (default: %(default)s)")
    parser.add_argument("--policy", choices=sorted(EVICTION_POLICIES), default="lru")
    parser.add_argument("--runs", type=int, default=200, help="of each operation (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the order of blocks (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    args = parser.parse_args()
    if args.blocks < BATCH or args.blocks % BATCH:
        parser.error(f"--blocks {args.blocks}: must be a multiple of {BATCH}")
    num_batches = args.blocks // BATCH

    operations = measure(num_batches, args.policy, args.runs, args.seed)
    held = bytes_per_block(num_batches, args.policy)
    result = {
        "benchmark": "index",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"kvortex": kvortex.__version__, "python": platform.python_version()},
        "hardware": {"cpu": cpu_model(), "cores": os.cpu_count(), "machine": platform.machine()},
        "workload": {"blocks": args.blocks, "batch_blocks": BATCH, "policy": args.policy, "seed": args.seed},
        "operations": operations,
        "bytes_per_block": held,
    }
    print(
        f"{args.blocks:,} blocks, {BATCH} an operation, {args.policy}; "
        f"{cpu_model()}, Python {platform.python_version()}"
    )
    print(f"{'operation':<36}{'runs':>6}{'median ms':>12}{'worst ms':>12}")
    for row in operations:
        print(f"{row['operation']:<36}{row['runs']:>6}{row['median_ms']:>12.3f}{row['worst_ms']:>12.3f}")
    print(f"memory: {held:.0f} bytes a block, without the keys' own")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
