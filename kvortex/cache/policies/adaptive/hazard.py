"""What is learnt of when blocks are asked for again: the hazard of each age, and what holding a block is worth.

    hazard(x, bin)    chance that a block with facts x, not asked for until this age bin, is asked for in it
    worth(x, age)     max over tau of P(asked for before age + tau) / E[seconds held until then or until age + tau]

The hazard is a logistic regression whose weights vary smoothly with age, corrected by counts in coarse classes. It is
learnt online, from the blocks that are no longer held too, so what was evicted does not bend what is learnt. The worth
is the Gittins index: hits a second of holding, over the best horizon (J. C. Gittins 1979; for caches: LHD, Beckmann
et al., NSDI 2018, which takes one horizon).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FIRST_BIN_S: Final = 8.0
"""Below this nobody has read an answer and written the next question."""
BIN_RATIO: Final = 1.25
"""Each age bin is wider by this; 1.15 to 1.5 differ by noise."""
HORIZON_S: Final = 3600.0
"""Older blocks are all in the last bin."""


def _edges() -> list[float]:
    edges, edge = [0.0], FIRST_BIN_S
    while edge < HORIZON_S:
        edges.append(edge)
        edge *= BIN_RATIO
    return [*edges, edges[-1] * BIN_RATIO]


EDGES_S: Final[list[float]] = _edges()
"""Bin b is from EDGES_S[b] to EDGES_S[b + 1]; what is older belongs to the last bin."""
NUM_BINS: Final = len(EDGES_S) - 1

_BUMPS: Final = 5
"""Shapes over age that each fact's weight is made of; more only add noise."""
_BINS_A_ZONE: Final = 4
_NUM_ZONES: Final = -(-NUM_BINS // _BINS_A_ZONE)
_MAX_CLASSES: Final = 2048
_FIRST_BASE: Final = -3.0
"""Logit of a hazard of 5 % a bin, before anything is known."""
_STEP: Final = 0.02
_BASE_STEP: Final = 0.2
_FIRST_SQUARES: Final = 1e-2
_PRIOR_HITS: Final = 20.0
"""Hits expected in a class before its own counts weigh as much as the regression."""
_MEMORY_S: Final = 1800.0
"""Class counts fade by e in this time."""
_FADE_EVERY_S: Final = 10.0
_MAX_HAZARD: Final = 0.95
_MAX_WEIGHT: Final = 8.0
"""Events weigh up to so many times the mean."""
_BATCH: Final = 64

_WIDTHS: Final[Floats] = np.diff(np.array(EDGES_S))
_CENTRES = np.linspace(0, NUM_BINS - 1, _BUMPS - 1)
_PHI: Final[Floats] = np.concatenate(
    [
        np.exp(-(((np.arange(NUM_BINS)[:, None] - _CENTRES) / (NUM_BINS / 8)) ** 2)),
        np.ones((NUM_BINS, 1)),
    ],
    axis=1,
)
_ZONE: Final = np.arange(NUM_BINS) // _BINS_A_ZONE
_FROM, _TO = np.triu_indices(NUM_BINS + 1, 1)
"""Of every stretch of ages, the edges where it begins and where it ends: by their begin, then by their end."""
_BEGINS: Final = np.flatnonzero(np.diff(_FROM, prepend=-1))
"""Where the stretches of each begin stand."""


def age_bin(age_s: float) -> int:
    """The bin of an age of zero or more."""
    return min(NUM_BINS - 1, bisect_right(EDGES_S, age_s) - 1)


def _logistic(logit: Floats) -> Floats:
    # Clipped: exp of a large number is a warning, and nothing beyond matters. Not by `np.clip`, which costs more than
    # all else on the few numbers of one prompt.
    return np.asarray(1 / (1 + np.exp(-np.minimum(np.maximum(logit, -30.0), 30.0))))


class HazardModel:
    """Learns from events, in batches; tells worths. One thread."""

    def __init__(self, num_facts: int) -> None:
        self._num_facts = num_facts
        self._base = np.full(NUM_BINS, _FIRST_BASE)
        self._base_squares = np.full(NUM_BINS, _FIRST_SQUARES)
        self._weights = np.zeros((num_facts, _BUMPS))
        self._squares = np.full((num_facts, _BUMPS), _FIRST_SQUARES)
        self._mean_weight = 4.0
        self._classes: dict[tuple[int, ...], int] = {}
        self._counts = np.zeros((2, _MAX_CLASSES, _NUM_ZONES))
        """Hits, and hits that the regression expected."""
        self._faded_at_s = -math.inf
        self._events: list[tuple[bytes, int, bool, float, int]] = []

    def class_of(self, traits: tuple[int, ...]) -> int:
        """The number of a coarse class; those beyond the first 2,047 share one."""
        number = self._classes.get(traits)
        if number is None:
            number = min(len(self._classes), _MAX_CLASSES - 1)
            if number < _MAX_CLASSES - 1:
                self._classes[traits] = number
        return number

    def saw(self, facts: bytes, bin_: int, *, hit: bool, blocks: int, class_: int) -> None:
        """Blocks with these facts (float32, as bytes) were asked for in this age bin, or lived through it unasked.

        Blocks of one run share their fate, so they weigh less than as many single ones.
        """
        self._events.append((facts, bin_, hit, math.sqrt(blocks), class_))

    def learn(self, now_s: float) -> None:
        """Takes in the events seen, once there are enough for a batch."""
        if len(self._events) < _BATCH:
            return
        events = self._events
        self._events = []
        facts = np.frombuffer(b"".join(event[0] for event in events), np.float32).reshape(-1, self._num_facts)
        facts = facts.astype(np.float64)
        bins = np.array([event[1] for event in events])
        hits = np.array([event[2] for event in events], np.float64)
        raw = np.array([event[3] for event in events], np.float64)
        classes = np.array([event[4] for event in events])
        weight = np.minimum(raw / self._mean_weight, _MAX_WEIGHT)
        self._mean_weight += (1 - 0.9995 ** len(events)) * (float(raw.mean()) - self._mean_weight)
        phi = _PHI[bins]
        chance = _logistic(self._base[bins] + ((facts @ self._weights) * phi).sum(1))
        self._fade(now_s)
        for counts, events_of in zip(self._counts, (hits, chance), strict=True):
            np.add.at(counts, (classes, _ZONE[bins]), events_of * raw)
        # AdaGrad in small batches: squares of single events' gradients, so the step is that of single events.
        slope = (chance - hits) * weight
        self._squares += (facts * facts).T @ ((slope * slope)[:, None] * phi * phi)
        self._weights -= _STEP * (facts.T @ (slope[:, None] * phi)) / np.sqrt(self._squares)
        self._base_squares += np.bincount(bins, slope * slope, NUM_BINS)
        self._base -= _BASE_STEP * np.bincount(bins, slope, NUM_BINS) / np.sqrt(self._base_squares)

    def _fade(self, now_s: float) -> None:
        passed = now_s - self._faded_at_s
        if passed > _FADE_EVERY_S:
            factor = math.exp(-passed / _MEMORY_S)
            self._counts *= factor
            self._faded_at_s = now_s

    def worth(self, facts: Sequence[Sequence[float]], classes: Sequence[int]) -> NDArray[np.float32]:
        """Expected hits a second of holding, one row for each row of facts, at each edge of the age bins."""
        hazard = _logistic(self._base + (np.array(facts, np.float64) @ self._weights) @ _PHI.T)
        hits, expected = self._counts.take(classes, 1).take(_ZONE, 2) + _PRIOR_HITS
        hazard = np.minimum(hazard * hits / expected, _MAX_HAZARD)
        lived = 1 - hazard / 2  # share of the bin, mean of the blocks that reach it
        edges = np.zeros((2, len(hazard), NUM_BINS + 1))
        alive, held = edges
        alive[:, 0] = 1
        np.multiply.accumulate(1 - hazard, axis=1, out=alive[:, 1:])
        reach = alive[:, :-1]
        np.add.accumulate(reach * _WIDTHS * lived, axis=1, out=held[:, 1:])
        lost, spent = edges.take(_TO, 2) - edges.take(_FROM, 2)
        best = -np.minimum.reduceat(lost / np.maximum(spent, 1e-9), _BEGINS, axis=1)
        # Where hardly any survive the differences cancel to noise; a horizon of one bin needs none.
        one_bin = hazard / (_WIDTHS * lived)
        np.maximum(best, one_bin, out=one_bin, where=reach > 1e-6)
        worth = np.empty((len(hazard), NUM_BINS + 1), np.float32)
        worth[:, :-1] = one_bin
        worth[:, -1] = worth[:, -2]
        return worth
