"""A soak's near ties are told from what is wrong by plain vLLM's own disagreements."""

from __future__ import annotations

from collections.abc import Sequence

from tests.e2e.soak import Differing, Played, Right, prompt_of, tell_near_ties
from tests.near_ties import FLOOR, MARGIN, Question

RIGHT: Right = {(talk, 0): [talk, 1, 2, 3] for talk in range(3)}
AGAIN: Right = RIGHT | {(1, 0): [1, 1, 7, 7]}
PROMPTS = {tuple(prompt_of(*which)): which for which in RIGHT}
NEAR = Differing((0, 0), "whole", (0, 1, 8), (0, 1, 2))
CUT = Differing((0, 0), "stream", (0, 1, 8), (0, 1, 2, 3))
"""Its tokens are as likely as those of `NEAR`."""
WRONG = Differing((2, 0), "whole", (9,), (2,))


def judge(questions: Sequence[Question]) -> list[float]:
    """Answers to other conversations' prompts are far off."""
    gaps = {(1, 1, 7, 7): 0.3, (0, 1, 8): 0.5, (9,): 0.7}
    return [gaps.get(one.answer, 0.0 if list(one.answer) == RIGHT[PROMPTS[one.prompt]] else 8.0) for one in questions]


def test_near_ties_are_told_and_what_is_wrong_stays() -> None:
    played = Played(checked=9, wrong=[NEAR, WRONG, NEAR, CUT])
    assert tell_near_ties(played, RIGHT, AGAIN, judge) == []
    assert played.wrong == [WRONG, CUT]
    assert played.near_ties is not None
    assert played.near_ties["tolerance"] == MARGIN * 0.3
    assert played.near_ties["count"] == 2
    assert played.near_ties["plain_vllm"] == {"asked": 3, "differing": 1, "worst_gap": 0.3}


def test_where_plain_vllm_agrees_with_itself_the_floor_decides() -> None:
    played = Played(checked=9, wrong=[NEAR, WRONG])
    assert tell_near_ties(played, RIGHT, RIGHT, judge) == []
    assert played.near_ties is not None
    assert played.near_ties["tolerance"] == FLOOR
    assert played.wrong == [NEAR, WRONG]


def test_a_tolerance_that_lets_anything_pass_is_a_fault() -> None:
    played = Played(checked=9, wrong=[WRONG])
    (fault,) = tell_near_ties(played, RIGHT, AGAIN, lambda questions: [4.0] * len(questions))
    assert "do not stand far above the tolerance" in fault
