"""What steps took, by kind, from the files that `benchmarks/sessions.py --trace` leaves: medians, in milliseconds.

    python benchmarks/step_figures.py logs/vram.steps.jsonl logs/hints.steps.jsonl --begin 20 --end 105

A kind is what a step computes, and which copies were ordered with it:

decode  a token for each request      turn    a later turn's new tokens, too
prompt  most of a first prompt, too   part    anything else
+store, +step-load, +load

cpu is of the four parts together: much less than they took, and the model's thread waited; waits, how often.

Steps with copies come when the engine is busy, so a second line says what they took beyond the median of steps without,
of as many requests.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

PARTS = ("schedule", "execute", "sample", "update")
COLUMNS = (*PARTS, "cpu", "waits", "gpu_ms", "idle_ms")
COPIES = {"stores": "+store", "step_loads": "+step-load", "loads": "+load"}
LEAST_STEPS, LEAST_LIKE = 5, 3

Step = dict[str, Any]


class Kind(NamedTuple):
    computes: str
    copies: str


def read(path: Path) -> list[Step]:
    """The steps of a trace; its last line may have been cut off with its server."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def kind_of(step: Step, turn: tuple[int, int], prompt: int) -> Kind:
    new = step["tokens"] - step["requests"]
    if new == 0:
        computes = "decode"
    elif turn[0] <= new <= turn[1]:
        computes = "turn"
    else:
        computes = "prompt" if new >= prompt else "part"
    return Kind(computes, "".join(name for what, name in COPIES.items() if step[what]))


def took(step: Step) -> dict[str, float]:
    of_gpu = {name: step[name] for name in ("gpu_ms", "idle_ms") if name in step}
    of_core = {"cpu": sum(step["cpu_ms"].values()), "waits": sum(step["switches"])} if "cpu_ms" in step else {}
    return {part: step["host_ms"].get(part, 0.0) for part in PARTS} | of_core | of_gpu


def medians(rows: list[dict[str, float]]) -> str:
    columns = {name: [row[name] for row in rows if name in row] for name in COLUMNS}
    return "".join(f"{statistics.median(column):10.2f}" if column else f"{'-':>10}" for column in columns.values())


def beyond(some: list[Step], plain: list[Step]) -> list[dict[str, float]]:
    """What each of `some` took beyond those of `plain` with as many requests, where there are a few of these."""
    alike: dict[int, list[dict[str, float]]] = defaultdict(list)
    for step in plain:
        alike[step["requests"]].append(took(step))
    rows = []
    for step in some:
        others = alike[step["requests"]]
        if len(others) >= LEAST_LIKE:
            rows.append(
                {
                    name: value - statistics.median(other[name] for other in others if name in other)
                    for name, value in took(step).items()
                    if any(name in other for other in others)
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--begin", type=float, default=0.0, help="seconds after the first step")
    parser.add_argument("--end", type=float, default=float("inf"))
    parser.add_argument("--turn", type=int, nargs=2, default=(501, 699), help="tokens, from and to (%(default)s)")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens, at least (%(default)s)")
    options = parser.parse_args()
    for path in options.files:
        steps = read(path)
        kinds: dict[Kind, list[Step]] = defaultdict(list)
        for step in steps:
            if step["tokens"] and options.begin < step["at_s"] - steps[0]["at_s"] < options.end:
                kinds[kind_of(step, tuple(options.turn), options.prompt)].append(step)
        print(f"{str(path)[-30:]:32}{'steps':>6}" + "".join(f"{name:>10}" for name in COLUMNS))
        for kind, some in sorted(kinds.items()):
            if len(some) >= LEAST_STEPS:
                print(f"  {kind.computes + kind.copies:30}{len(some):6}" + medians([took(step) for step in some]))
            rows = beyond(some, kinds[Kind(kind.computes, "")]) if kind.copies else []
            if len(rows) >= LEAST_STEPS:
                print(f"  {'    beyond':30}{len(rows):6}" + medians(rows))


if __name__ == "__main__":
    main()
