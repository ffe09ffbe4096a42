"""How much can be in VRAM before silent sessions are back, by whoever knows only for how long each has been silent.

    python benchmarks/prefetch_limit.py

VRAM holds a share of the silent sessions; the best that can be held are those whose silence is between two ages. From
the distribution of `kvortex bench serve --think`: whose silences end between them (there before their request), and
whose outlast the second (brought for nothing, as a share of all that is brought). Every session returns.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

from kvortex.bench.think import AGENTS_S, PEOPLE_MEDIAN_S, PEOPLE_SIGMA

STEP_S = 0.01
LONGEST_S = 2000.0


def best_window(still_silent: np.ndarray, held: float) -> tuple[float, float, float, float]:
    """(from, to, there before its request, for nothing): ages in seconds, then shares.

    Args:
        still_silent: of the silences, the share longer than 0, STEP_S, 2 STEP_S, ...
        held: of the silent sessions, the share that VRAM holds.
    """
    passed = np.concatenate([[0.0], np.cumsum(still_silent) * STEP_S])
    best = (0.0, 0.0, 0.0, 0.0)
    for begin in range(0, len(still_silent), 10):
        end = int(np.searchsorted(passed, passed[begin] + held * passed[-1]))
        end = min(end, int(np.argmin(still_silent)))  # nobody is silent for longer
        there, late = float(still_silent[begin] - still_silent[end]), float(still_silent[end])
        if there > best[2]:
            asked = 1 - there  # by the requests themselves
            best = (begin * STEP_S, end * STEP_S, there, late / (there + late + asked))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held", type=float, default=0.5, help="of the silent sessions, what VRAM holds (%(default)s)")
    held = parser.parse_args().held
    ages_s = np.arange(0, LONGEST_S, STEP_S)
    spread = np.log(np.maximum(ages_s, 1e-9) / PEOPLE_MEDIAN_S) / (PEOPLE_SIGMA * math.sqrt(2))
    people = np.array([0.5 * math.erfc(x) for x in spread])
    first_s, last_s = AGENTS_S
    agents = np.clip((last_s - ages_s) / (last_s - first_s), 0.0, 1.0)
    for name, still_silent in (("people", people), ("agents", agents)):
        begin_s, end_s, there, wasted = best_window(still_silent, held)
        window = f"hold silences of {begin_s:.1f} to {end_s:.1f} s"
        print(f"{name}: {window}: {there:.0%} there before, {wasted:.0%} for nothing")


if __name__ == "__main__":
    main()
