"""What tells a near tie from a wrong answer, where plain vLLM does not always agree with itself.

Plain vLLM is the judge: it is given a prompt and an answer and asked how likely each token was at its place. The gap is
what the likeliest token's log-probability is above that of the token said. Rounding swaps tokens whose gap is next to
nothing, and from there on the answer may be another one: its later tokens are judged behind its own earlier ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

FLOOR: Final = 0.25
"""Of every tolerance. Logits are bfloat16, of 8 significant bits: from 16 to 32, and those of likely tokens seldom lie
higher, two that are neighbours are 1/8 apart. Of two equal ones, rounding may move each by one, to opposite sides."""

MARGIN: Final = 2.0
"""Plain vLLM's own worst gap is that of a sample; others may lie somewhat above it."""

ROUNDING: Final = 1e-5
"""Of a gap: the difference of two float32 log-probabilities. On an H200 a gap of 0.50000006 met a tolerance of 0.5."""

FAR: Final = 2.0
"""Times the tolerance: half of a control's answers lie above, or the tolerance tells nothing."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the judge is asked: token ids of a prompt, and of an answer to it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.answer]


Judge = Callable[[Sequence[Question]], list[float]]
"""Plain vLLM: the worst gap of each question."""


def worst_gap(question: Question, logprobs: Sequence[Mapping[int, float] | None]) -> float:
    """The largest gap of the answer's tokens; 0 where each was the likeliest.

    Args:
        logprobs: for each place of prompt and answer, those of the token that stands there and of the likeliest one.
    """
    assert len(logprobs) == len(question.tokens), f"{len(logprobs)} places of {len(question.tokens)} were judged"
    worst = 0.0
    for place, token in zip(logprobs[len(question.prompt) :], question.answer, strict=True):
        assert place is not None, "the judge says nothing about the first token of all"
        gap = max(place.values()) - place[token]
        assert gap >= 0, f"the judge's log-probabilities are {dict(place)}"  # not a number, too
        worst = max(worst, gap)
    return worst


def tolerance_of(own_gaps: Iterable[float]) -> float:
    """The largest gap of a near tie.

    Args:
        own_gaps: worst gaps of plain vLLM's answers where it disagrees with itself.
    """
    return max([FLOOR, *(MARGIN * gap for gap in own_gaps)])


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of answers.

    Attributes:
        gaps: the worst one of each answer that is not plain vLLM's; infinite where it is shorter or longer.
        compared: all answers.
    """

    gaps: tuple[float, ...]
    compared: int
    tolerance: float

    @property
    def ties(self) -> list[float]:
        return [gap for gap in self.gaps if gap <= self.tolerance + ROUNDING]

    @property
    def wrong(self) -> list[float]:
        return [gap for gap in self.gaps if not gap <= self.tolerance + ROUNDING]

    def __str__(self) -> str:
        said = (
            f"of {self.compared} answers {self.compared - len(self.gaps)} are plain vLLM's, {len(self.ties)} near ties"
        )
        if self.ties:
            said += f" (worst gap {max(self.ties):.3f})"
        said += f", {len(self.wrong)} wrong"
        if self.wrong:
            said += f" (gaps {min(self.wrong):.3f} to {max(self.wrong):.3f})"
        return f"{said}; tolerance {self.tolerance:.3f}"


def check_control(verdict: Verdict) -> None:
    """Of answers that are known to be spoiled: most are judged wrong, and far above the tolerance."""
    assert verdict.gaps, f"the control controls nothing, nothing of it differs: {verdict}"
    middle = statistics.median(verdict.gaps)
    assert middle >= FAR * verdict.tolerance, (
        "spoiled answers do not stand far above the tolerance, so it tells nothing: "
        f"half of them have a gap of at most {middle:.3f}, {FAR * verdict.tolerance:.3f} is asked; {verdict}"
    )
