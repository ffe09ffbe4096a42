"""What each eviction policy hits on made-up traces of several seeds and shapes, against LRU and Belady's bound.

    python benchmarks/eviction.py --seeds 5 --json eviction.json

Needs no GPU. Sizes are blocks of 512 tokens; the hit rate is over the last half of the requests, without VRAM.
"""

from __future__ import annotations

import argparse
import json
import platform
from datetime import UTC, datetime
from pathlib import Path

import kvortex
from kvortex.replay.simulator import DEFAULT, replay
from kvortex.replay.synthesis import mixed_trace
from kvortex.replay.trace import BLOCK_TOKENS

SHAPES = {
    "mixed": (0.5, 0.1, 0.4),
    "documents": (0.2, 0.02, 0.78),
    "chats": (1.0, 0.0, 0.0),
    "agents": (0.2, 0.5, 0.3),
}
"""Shares of chats, agents and documents among the conversations."""
SIZES = (512, 4096)
POLICIES = ("lru", "belady", DEFAULT)


def measure(shape: str, seed: int, seconds: float) -> list[dict[str, str | int | float]]:
    chats, agents, documents = SHAPES[shape]
    requests = mixed_trace(seed, seconds=seconds, chats=chats, agents=agents, documents=documents)
    rows: list[dict[str, str | int | float]] = []
    for size in SIZES:
        hits = {
            policy: 100 * replay(requests, policy, ram_bytes=size * BLOCK_TOKENS, vram_bytes=0, token_bytes=1).hit_rate
            for policy in POLICIES
        }
        rows.append({"shape": shape, "seed": seed, "requests": len(requests), "ram_blocks": size, **hits})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="of each shape (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=600.0, help="of each trace (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    args = parser.parse_args()
    rows = []
    print(f"{'shape':<12}{'seed':>5}{'requests':>10}{'blocks':>8}{'lru':>8}{'belady':>8}{'default':>9}")
    for shape in SHAPES:
        for seed in range(1, args.seeds + 1):
            for row in measure(shape, seed, args.seconds):
                rows.append(row)
                print(
                    f"{row['shape']:<12}{row['seed']:>5}{row['requests']:>10,}{row['ram_blocks']:>8,}"
                    f"{row['lru']:>8.2f}{row['belady']:>8.2f}{row[DEFAULT]:>9.2f}",
                    flush=True,
                )
    result = {
        "benchmark": "eviction",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"kvortex": kvortex.__version__, "python": platform.python_version()},
        "workload": {"seconds": args.seconds, "block_tokens": BLOCK_TOKENS},
        "results": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
