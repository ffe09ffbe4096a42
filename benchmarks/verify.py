"""What `kv_cache.verify` costs on the CPU engine: the checksum alone, and stores and loads with it off, sampled and on.

    python benchmarks/verify.py [--rounds N] [--threads N] [--megabytes N]

Modes take turns, so that they share what else the machine does. Medians over the rounds; "best" is of the same. Needs
xxhash.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import xxhash

from kvortex.keys import SAMPLE_EVERY
from kvortex.messages import CopyOrder, Direction, JobId, Outcome
from kvortex.transfer.base import CopyEngine, KVLayout
from kvortex.transfer.cpu import CpuCopyEngine
from kvortex.transfer.slab import HostSlab
from kvortex.transfer.verifying import VerifyingEngine

SHAPES: Final = {"12 KiB, 3 layers": [4 << 10] * 3, "2 MiB, 32 layers": [64 << 10] * 32}
MODES: Final = ("off", "sample", "all")
ORDER_BYTES: Final = 16 << 20
POLL_S: Final = 0.001
"""Between two looks at the engine where it is kept busy."""
STEP_S: Final = 0.020
"""Between two looks where one order is waited for, as a server with a step of so long looks."""


def checksums(num_bytes: int, rounds: int) -> None:
    """GB/s of each function over blocks of one size, one thread, and of XXH3 in two."""
    functions: dict[str, Callable[[Any], Any]] = {
        "XXH3-64": xxhash.xxh3_64_intdigest,
        "zlib.crc32": zlib.crc32,
    }
    try:
        import blake3

        functions["BLAKE3"] = lambda row: blake3.blake3(row).digest(8)
    except ImportError:
        pass  # it comes with vLLM
    print(f"{'checksum, GB/s':24}" + "".join(f"{name:>15}" for name in [*functions, "in two threads"]))
    for block_bytes in (12 << 10, 512 << 10, 2 << 20, 16 << 20):
        rows = np.random.default_rng(0).integers(0, 256, (num_bytes // block_bytes, block_bytes), np.uint8)
        rates: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds):
            for name, digest in functions.items():
                rates[name].append(rows.nbytes / seconds(partial(run_over, digest, rows)) / 1e9)
            rates["two"].append(rows.nbytes / seconds(partial(in_two_threads, rows)) / 1e9)
        shown = "".join(f"{statistics.median(values):>15.2f}" for values in rates.values())
        print(f"  {block_bytes >> 10:>6,} KiB blocks     " + shown)


def run_over(digest: Callable[[Any], Any], rows: Any) -> None:
    for row in rows:
        digest(row)


def in_two_threads(rows: Any) -> None:
    halves = np.array_split(rows, 2)
    threads = [threading.Thread(target=run_over, args=(xxhash.xxh3_64_intdigest, half)) for half in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def seconds(run: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    run()
    return time.perf_counter() - begin_s


class Bench:
    """One engine, and orders for all of its blocks."""

    def __init__(self, fragments: Sequence[int], num_bytes: int, threads: int, mode: str) -> None:
        self.num_blocks = num_bytes // sum(fragments)
        layout = KVLayout(tuple(torch.zeros(self.num_blocks, size, dtype=torch.uint8) for size in fragments))
        for region in layout.regions:
            region.random_(0, 256)
        self.block_bytes = layout.block_bytes
        slab = HostSlab(self.num_blocks, layout.block_bytes)
        slab.tensor.zero_()
        self.engine: CopyEngine = CpuCopyEngine(layout, slab, threads)
        self.mode = mode
        if mode != "off":
            share = 1.0 if mode == "all" else 1 / SAMPLE_EVERY
            self.engine = VerifyingEngine(self.engine, layout, slab, threads, share=share)
        self._next_id = 0

    def orders(self, direction: Direction, order_blocks: int) -> list[CopyOrder]:
        made = []
        for begin in range(0, self.num_blocks, order_blocks):
            slots = np.arange(begin, min(begin + order_blocks, self.num_blocks))
            self._next_id += 1
            order = CopyOrder(JobId(self._next_id), direction, slots, slots, 600.0)
            if self.mode == "sample" and direction is Direction.STORE:
                order = replace(order, sampled=slots % SAMPLE_EVERY == 0)
            made.append(order)
        return made

    def run(self, orders: list[CopyOrder], look_s: float) -> float:
        """Seconds until all are answered."""
        begin_s = time.perf_counter()
        self.engine.submit(orders)
        left = len(orders)
        while left:
            time.sleep(look_s)
            answers = self.engine.poll()
            assert all(answer.outcome is Outcome.DONE for answer in answers), answers
            left -= len(answers)
        return time.perf_counter() - begin_s


def transfers(num_bytes: int, threads: int, rounds: int) -> None:
    """Stores and loads of all blocks by mode, and one load of 16 MiB that is looked at once a step, as in a server."""
    for name, fragments in SHAPES.items():
        benches = [Bench(fragments, num_bytes, threads, mode) for mode in MODES]
        order_blocks = max(1, ORDER_BYTES // sum(fragments))
        measured: dict[tuple[str, str], list[float]] = defaultdict(list)
        for _ in range(rounds):
            for bench in benches:
                total = bench.num_blocks * bench.block_bytes / 1e9
                for direction in Direction:
                    rate = total / bench.run(bench.orders(direction, order_blocks), POLL_S)
                    measured[bench.mode, direction.value].append(rate)
                one = bench.orders(Direction.LOAD, order_blocks)[:1]
                measured[bench.mode, "one"].append(bench.run(one, STEP_S) * 1e3)
        threads_of = f"{threads} threads, {threads} more for checksums"
        print(f"\nblocks of {name}; {threads_of}\n{'':18} store GB/s, best    load GB/s, best    one load ms, best")
        for mode in MODES:
            store, load, one_ms = (measured[mode, what] for what in ("store", "load", "one"))
            print(
                f"  verify: {mode:<8}"
                f"{statistics.median(store):>12.2f}{max(store):>6.2f}"
                f"{statistics.median(load):>13.2f}{max(load):>6.2f}"
                f"{statistics.median(one_ms):>15.0f}{min(one_ms):>6.0f}"
            )
        for bench in benches:
            assert bench.engine.close(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=128, help="of blocks, a mode")
    arguments = parser.parse_args()
    num_bytes = arguments.megabytes << 20
    checksums(num_bytes, arguments.rounds)
    transfers(num_bytes, arguments.threads, arguments.rounds)


if __name__ == "__main__":
    main()
