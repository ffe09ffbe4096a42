"""Estimates against steps whose true cost is known."""

from __future__ import annotations

import random

import pytest

from kvortex.cache.costs import PromptWork, StepCosts, prompt_work

TOKEN_S, PAIR_S, DECODE_S = 28e-6, 1.2e-9, 8e-3


def truth(work: PromptWork) -> float:
    return TOKEN_S * work.tokens + PAIR_S * work.pairs


def taught(works: list[PromptWork], noise: float = 0.0) -> StepCosts:
    rng = random.Random(1)
    costs = StepCosts()
    costs.saw(PromptWork(), DECODE_S)
    for work in works:
        costs.saw(work, (DECODE_S + truth(work)) * rng.uniform(1 - noise, 1 + noise))
    return costs


def test_pairs_are_counted_as_attention_does() -> None:
    assert prompt_work(0, 3) == PromptWork(3, 1 + 2 + 3)
    assert prompt_work(10, 12) == PromptWork(2, 11 + 12)
    assert prompt_work(0, 5) + prompt_work(5, 9) == prompt_work(0, 9)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_what_was_never_seen_is_estimated_from_what_was(noise: float) -> None:
    rng = random.Random(2)
    works = [prompt_work(begin := rng.randrange(20_000), begin + rng.randrange(64, 8192)) for _ in range(200)]
    costs = taught(works, noise)
    for begin, end in ((0, 8192), (9_000, 9_640), (60_000, 60_500)):
        assert costs.seconds(prompt_work(begin, end)) == pytest.approx(truth(prompt_work(begin, end)), rel=0.02 + noise)
    assert costs.decode_s == DECODE_S


def test_steps_that_are_all_alike_are_estimated_as_they_were() -> None:
    work = prompt_work(0, 8192)
    costs = taught([work] * 50)
    assert costs.seconds(work) == pytest.approx(truth(work), rel=1e-3)
    smaller = costs.seconds(prompt_work(9_000, 9_640))
    assert smaller is not None
    assert 0.2 * truth(prompt_work(9_000, 9_640)) < smaller < 5 * truth(prompt_work(9_000, 9_640))


def test_there_is_no_estimate_before_enough_was_seen() -> None:
    costs = taught([prompt_work(0, 1000)] * 3)
    assert costs.seconds(prompt_work(0, 1000)) is None
    costs.saw(PromptWork(8, 36), 1.0)  # too short to tell
    assert costs.seconds(prompt_work(0, 1000)) is None


def test_a_machine_that_becomes_slower_is_noticed() -> None:
    costs = taught([prompt_work(0, 500 * i) for i in range(1, 17)] * 10)
    for i in range(200):
        work = prompt_work(0, 500 * (1 + i % 16))
        costs.saw(work, DECODE_S + 2 * truth(work))
    assert costs.seconds(prompt_work(0, 4000)) == pytest.approx(2 * truth(prompt_work(0, 4000)), rel=0.05)


def test_an_estimate_is_never_negative() -> None:
    costs = StepCosts()
    for i in range(20):
        costs.saw(prompt_work(0, 100 * (i + 1)), 1.0 / (i + 1))
    assert (costs.seconds(prompt_work(100_000, 100_064)) or 0.0) >= 0


def test_the_few_tokens_behind_a_hit_do_not_teach_that_tokens_are_dear() -> None:
    start_s = 5e-3
    rng = random.Random(4)
    costs = StepCosts()
    costs.saw(PromptWork(), DECODE_S)
    for work in [prompt_work(0, 500 * (1 + i % 8)) for i in range(40)]:
        costs.saw(work, DECODE_S + start_s + truth(work))
    for _ in range(300):
        work = prompt_work(begin := rng.randrange(500, 4000), begin + 48)
        costs.saw(work, (DECODE_S + start_s + truth(work)) * rng.uniform(0.8, 1.2))
    assert costs.seconds(prompt_work(0, 4000)) == pytest.approx(truth(prompt_work(0, 4000)), rel=0.15)


@pytest.mark.parametrize("at", [0, 2, 3, 4, 10, 39])
def test_one_absurd_step_teaches_little(at: int) -> None:
    costs = StepCosts()
    costs.saw(PromptWork(), DECODE_S)
    for i in range(40):
        work = prompt_work(0, 500 * (1 + i % 8))
        costs.saw(work, 20.0 if i == at else DECODE_S + truth(work))
    assert costs.seconds(prompt_work(0, 4000)) == pytest.approx(truth(prompt_work(0, 4000)), rel=0.05)


def test_one_absurd_step_without_prompts_teaches_little() -> None:
    costs = taught([])
    costs.saw(PromptWork(), 20.0)
    assert costs.decode_s < 1.1 * DECODE_S
