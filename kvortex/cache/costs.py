"""What a step costs, learnt from the steps that were run: how long computing prompts takes.

    seconds of a step = seconds of a step without prompts + TOKEN * tokens + PAIR * pairs

`tokens` are those computed for prompts; `pairs` counts, for each of them, the tokens that it attends to. Both factors
are fitted by recursive least squares with forgetting (Ljung, System Identification, 1999, section 11.2), each in its
own scale, never below zero. Nothing is assumed of the machine: before enough steps were seen, there is no estimate.
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
"""Steps that are all alike do not tell the factors apart; then a thousand tokens and ten million pairs share evenly."""

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
        self._factors = np.zeros(2)
        self._doubt = np.eye(2) * _DOUBT
        self._num_steps = 0
        self._decode_s: float | None = None

    @property
    def decode_s(self) -> float:
        """Seconds of a step that computes no prompt; 0 until one was seen."""
        return self._decode_s or 0.0

    def saw(self, work: PromptWork, seconds: float) -> None:
        """A step took so long. Not for steps that waited for a load."""
        if work.tokens == 0:
            known = self._decode_s
            self._decode_s = seconds if known is None else known + _DECODE_WEIGHT * (seconds - known)
            return
        if work.tokens < _MIN_TOKENS:
            return
        features = _features(work)
        error = max(0.0, seconds - self.decode_s) - float(features @ self._factors)
        gain = self._doubt @ features
        gain /= _FORGET + float(features @ gain)
        self._factors = self._factors + gain * error
        self._doubt = (self._doubt - np.outer(gain, features @ self._doubt)) / _FORGET
        # Where all steps are alike, doubt in what they do not show would grow without bound.
        self._doubt *= min(1.0, len(features) * _DOUBT / float(np.trace(self._doubt)))
        self._num_steps += 1

    def seconds(self, work: PromptWork) -> float | None:
        """Seconds that this work adds to a step; None until enough was seen."""
        if self._num_steps < _MIN_STEPS:
            return None
        return float(_features(work) @ np.maximum(self._factors, 0.0))


def _features(work: PromptWork) -> npt.NDArray[np.float64]:
    return np.array([work.tokens / _TOKENS, work.pairs / _PAIRS])
