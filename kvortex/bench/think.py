"""When sessions begin, and how long their users think between two turns: the same for the same seed."""

from __future__ import annotations

import itertools
import math
import random
from enum import StrEnum
from typing import Final

PEOPLE_MEDIAN_S: Final = 20.0
PEOPLE_SIGMA: Final = 0.8
"""Of the logarithm: nine of ten people are back between 5 and 75 seconds."""

AGENTS_S: Final = (1.0, 5.0)


class Think(StrEnum):
    """Who the sessions are."""

    PEOPLE = "people"
    AGENTS = "agents"
    MIXED = "mixed"
    """Half of the sessions are people, half agents."""


def think_s(who: Think, seed: int, session: int, turn: int) -> float:
    """Seconds from the end of turn `turn` (from 1) to the next."""
    rng = random.Random(f"think/{seed}/{session}/{turn}")
    if who is Think.MIXED:
        who = random.Random(f"who/{seed}/{session}").choice((Think.PEOPLE, Think.AGENTS))
    if who is Think.AGENTS:
        return rng.uniform(*AGENTS_S)
    return rng.lognormvariate(math.log(PEOPLE_MEDIAN_S), PEOPLE_SIGMA)


def arrivals_s(count: int, rate: float, seed: int) -> list[float]:
    """When each of `count` sessions begins, from the first on: at random, `rate` a second on average, however slow the
    server is."""
    rng = random.Random(f"arrivals/{seed}")
    gaps = [0.0, *(rng.expovariate(rate) for _ in range(count - 1))] if count else []
    return list(itertools.accumulate(gaps))
