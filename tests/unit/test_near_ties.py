"""Near ties pass, wrong answers do not, and an oracle that cannot tell them says so."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from tests.gpu.oracle import Oracle
from tests.near_ties import FAR, FLOOR, MARGIN, Question, Verdict, check_control, tolerance_of, worst_gap

PROMPTS = [(1, 2), (3, 4), (5, 6)]
RIGHT = [(10, 11), (12, 13), (14, 15)]
OTHER = (12, 99)
"""Plain vLLM's other answer to the second prompt."""


class MadeUp:
    """A judge with these gaps, and none for what it is not asked."""

    def __init__(self, gaps: dict[tuple[int, ...], float]) -> None:
        self._gaps = gaps
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, questions: Sequence[Question]) -> list[float]:
        self.asked += [question.answer for question in questions]
        return [self._gaps[question.answer] for question in questions]


def unsure(gaps: dict[tuple[int, ...], float], own_gap: float = 0.2) -> Oracle:
    """Plain vLLM disagrees with itself about the second prompt."""
    judge = MadeUp({RIGHT[1]: 0.0, OTHER: own_gap, **gaps})
    return Oracle(PROMPTS, [RIGHT, [RIGHT[0], OTHER, RIGHT[2]]], judge, exact=False)


def sure(judge: MadeUp, *, exact: bool = False) -> Oracle:
    return Oracle(PROMPTS, [RIGHT, RIGHT], judge, exact=exact)


# ---- gaps


def test_a_gap_is_what_the_likeliest_token_is_above_the_one_that_was_said() -> None:
    question = Question((1, 2), (7, 8))
    places = [None, {2: -9.0, 3: -0.1}, {7: -0.5}, {8: -1.5, 9: -0.25}]
    assert worst_gap(question, places) == 1.25


def test_a_gap_at_the_tolerance_is_a_near_tie_however_it_is_rounded() -> None:
    verdict = Verdict((0.5000000596046448, 0.5001), 2, 0.5)
    assert verdict.ties == [0.5000000596046448]
    assert verdict.wrong == [0.5001]


def test_the_prompt_is_not_judged() -> None:
    assert worst_gap(Question((1, 2), (7,)), [None, {2: -9.0, 3: -0.1}, {7: -0.5}]) == 0


def test_places_that_were_not_judged_are_no_zeros() -> None:
    question = Question((1, 2), (7, 8))
    with pytest.raises(AssertionError, match="3 places of 4"):
        worst_gap(question, [None, {2: 0.0}, {7: 0.0}])
    with pytest.raises(KeyError):
        worst_gap(question, [None, {2: 0.0}, {7: 0.0}, {9: 0.0}])
    with pytest.raises(AssertionError, match="nan"):
        worst_gap(question, [None, {2: 0.0}, {7: 0.0}, {8: math.nan, 9: 0.0}])


# ---- tolerance


def test_the_tolerance_is_measured_by_plain_vllms_own_disagreements() -> None:
    assert tolerance_of([0.1, 0.4, 0.0]) == MARGIN * 0.4


def test_without_disagreements_the_tolerance_is_the_floor() -> None:
    assert tolerance_of([]) == tolerance_of([0.01]) == FLOOR
    assert sure(MadeUp({})).verdict([RIGHT]).tolerance == FLOOR


# ---- answers


def test_plain_vllms_answers_are_right_and_not_judged() -> None:
    judge = MadeUp({})
    sure(judge, exact=True).check([RIGHT, RIGHT])
    assert judge.asked == []
    unsure({}).check([RIGHT, [RIGHT[0], OTHER, RIGHT[2]]])


def test_a_near_tie_passes_and_a_wrong_answer_does_not() -> None:
    tolerance = MARGIN * 0.2
    near, wrong = (10, 98), (10, 97)
    oracle = unsure({near: tolerance, wrong: tolerance + 0.01})
    oracle.check([[near, RIGHT[1], RIGHT[2]]])
    with pytest.raises(AssertionError, match=r"1 near ties .* 1 wrong"):
        oracle.check([[near, RIGHT[1], RIGHT[2]], [wrong, RIGHT[1], RIGHT[2]]])


def test_another_prompts_answer_is_judged() -> None:
    with pytest.raises(AssertionError, match="1 wrong"):
        sure(MadeUp({RIGHT[2]: 5.0})).check([[RIGHT[2], RIGHT[1], RIGHT[2]]])


def test_where_equality_is_asked_a_near_tie_does_not_pass() -> None:
    with pytest.raises(AssertionError, match=r"answers differ where none should: .* 1 near ties"):
        sure(MadeUp({(10, 98): 0.0}), exact=True).check([[(10, 98), RIGHT[1], RIGHT[2]]])


def test_where_equality_is_asked_plain_vllm_has_to_agree_with_itself() -> None:
    with pytest.raises(AssertionError, match="agree with itself"):
        Oracle(PROMPTS, [RIGHT, [RIGHT[0], OTHER, RIGHT[2]]], MadeUp({}), exact=True)


def test_an_answer_that_was_cut_is_wrong_however_likely_its_tokens() -> None:
    with pytest.raises(AssertionError, match="1 wrong"):
        sure(MadeUp({RIGHT[0][:1]: 0.0})).check([[RIGHT[0][:1], RIGHT[1], RIGHT[2]]])


def test_an_answer_that_is_missing_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="missing"):
        sure(MadeUp({})).check([[RIGHT[0], None, RIGHT[2]]])


# ---- controls


def test_a_control_far_above_the_tolerance_passes() -> None:
    spoiled = [(10, 90), (12, 90), (14, 90)]
    unsure(dict(zip(spoiled, [4.0, 0.1, 3.0], strict=True))).check_spoiled([spoiled])


def test_a_control_that_is_not_far_above_the_tolerance_fails() -> None:
    spoiled = [(10, 90), (12, 90), (14, 90)]
    oracle = unsure(dict(zip(spoiled, [4.0, 0.1, 3.0], strict=True)), own_gap=2.0)
    with pytest.raises(AssertionError, match=r"do not stand far above the tolerance.* most 3.000, 8.000 is asked"):
        oracle.check_spoiled([spoiled])


def test_most_answers_of_a_control_that_passes_are_wrong() -> None:
    check_control(Verdict((0.1, FAR, 9.0), 3, 1.0))
    with pytest.raises(AssertionError, match="far above"):
        check_control(Verdict((0.1, 0.1, 9.0), 3, 1.0))


def test_a_control_in_which_nothing_differs_fails() -> None:
    with pytest.raises(AssertionError, match="controls nothing"):
        unsure({}).check_spoiled([[None, RIGHT[1], RIGHT[2]]])


def test_plain_vllms_own_answers_have_to_be_right() -> None:
    gaps = {RIGHT[0]: 0.3, RIGHT[2]: 0.0}
    unsure(gaps).check_own()
    with pytest.raises(AssertionError, match="answers of its own wrong"):
        unsure(gaps | {RIGHT[0]: 0.5}).check_own()
