"""What a step costs, learnt from the steps that were run: how long computing prompts takes.

    seconds of a step = seconds of a step without prompts + START + TOKEN * tokens + PAIR * pairs

`tokens` are those computed for prompts; `pairs` counts, for each of them, the tokens that it attends to; START is what
any prompt in a step costs. Without it, steps that compute the few tokens behind a hit would teach, one by one, that
tokens are dear. The factors are fitted by recursive least squares with forgetting (Ljung, System Identification, 1999,
section 11.2), each in its own scale, never below zero. Nothing is assumed of the machine: before enough steps were
seen, there is no estimate.

Steps are late for many reasons and early for none, so a step counts at most as half as much again as was expected of
it, and the dearest of the first few not at all: that one may have compiled kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

_FORGET: Final = 0.98
"""A step counts half after 35 others: clocks, batch sizes and graphs change, the model does not."""

_MIN_STEPS: Final = 4
_MIN_TOKENS: Final = 16
"""A step with fewer prompt tokens says nothing about what one costs."""

_TOKENS: Final = 1e3
_PAIRS: Final = 1e7
_START: Final = 1e-2
"""Steps that are all alike do not tell the factors apart; then a thousand tokens and ten million pairs share evenly,
and START is what ten tokens cost."""

_MOST: Final = 1.5
"""A step counts as no more than so many times what was expected: one that swapped, or waited, must not teach much."""

_DOUBT: Final = 1e6
_DECODE_WEIGHT: Final = 0.1


@dataclass(frozen=True, slots=True)
class PromptWork:
    """What a step computes of prompts. Work adds up.

    Attributes:
        tokens: of prompts, computed in the step.
        pairs: for each of these tokens, how many it attends to, in all.
    """

    tokens: int = 0
    pairs: int = 0

    def __add__(self, other: PromptWork) -> PromptWork:
        return PromptWork(self.tokens + other.tokens, self.pairs + other.pairs)


def prompt_work(begin: int, end: int) -> PromptWork:
    """The tokens `begin .. end` of a prompt whose first `begin` tokens have their KV."""
    tokens = end - begin
    return PromptWork(tokens, tokens * begin + tokens * (tokens + 1) // 2)


class StepCosts:
    """Estimates the seconds that prompts add to a step, and those of a step without any."""

    def __init__(self) -> None:
        self._factors = np.zeros(3)
        self._doubt = np.eye(3) * _DOUBT
        self._first: list[tuple[PromptWork, float]] | None = []
        self._decode_s: float | None = None

    @property
    def decode_s(self) -> float:
        """Seconds of a step that computes no prompt; 0 until one was seen."""
        return self._decode_s or 0.0

    def saw(self, work: PromptWork, seconds: float) -> None:
        """A step took so long. Not for steps that waited for a load."""
        if work.tokens == 0:
            known = self._decode_s
            if known is None:
                self._decode_s = seconds
            else:
                self._decode_s = known + _DECODE_WEIGHT * (min(seconds, _MOST * known) - known)
        elif work.tokens >= _MIN_TOKENS:
            self._saw_prompts(work, seconds)

    def _saw_prompts(self, work: PromptWork, seconds: float) -> None:
        if self._first is None:
            expected = self.decode_s + float(_features(work) @ np.maximum(self._factors, 0.0))
            self._fit(work, min(seconds, _MOST * expected) if expected > 0 else seconds)
            return
        self._first.append((work, seconds))
        if len(self._first) == _MIN_STEPS:
            first, self._first = self._first, None
            for one in sorted(first, key=lambda seen: seen[1] / seen[0].tokens)[:-1]:
                self._fit(*one)

    def _fit(self, work: PromptWork, seconds: float) -> None:
        features = _features(work)
        error = max(0.0, seconds - self.decode_s) - float(features @ self._factors)
        gain = self._doubt @ features
        gain /= _FORGET + float(features @ gain)
        self._factors = self._factors + gain * error
        self._doubt = (self._doubt - np.outer(gain, features @ self._doubt)) / _FORGET
        # Where all steps are alike, doubt in what they do not show would grow without bound.
        self._doubt *= min(1.0, len(features) * _DOUBT / float(np.trace(self._doubt)))

    def seconds(self, work: PromptWork) -> float | None:
        """Seconds that this work adds to a step with prompts; None until enough was seen."""
        if self._first is not None:
            return None
        return float(_features(work)[1:] @ np.maximum(self._factors[1:], 0.0))


def _features(work: PromptWork) -> npt.NDArray[np.float64]:
    return np.array([_START, work.tokens / _TOKENS, work.pairs / _PAIRS])
