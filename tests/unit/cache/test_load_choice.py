"""Which way a load goes, by what runs, what the step computes and what it loads already."""

from __future__ import annotations

import pytest

from kvortex.cache.costs import PromptWork, StepCosts, prompt_work
from kvortex.cache.load_choice import LoadChoice, Way
from kvortex.messages import LinkFacts

GB = 10**9
LINK = LinkFacts(50e9, by_layer=True)
DECODE_S = 0.01
HIT = prompt_work(0, 9_000)  # 280 ms
WORK = prompt_work(9_000, 9_640)  # 20 ms, as taught below


@pytest.fixture
def costs() -> StepCosts:
    costs = StepCosts()
    costs.saw(PromptWork(), DECODE_S)
    for count in (640, 1280, 1920, 2560, 3200, 3840) * 10:
        costs.saw(prompt_work(9_000, 9_000 + count), DECODE_S + count * 20e-3 / 640)
    return costs


def choice(costs: StepCosts, link: LinkFacts | None = LINK) -> LoadChoice:
    choice = LoadChoice(costs)
    if link is not None:
        choice.heard_of(link)
    choice.begin_step()
    return choice


def test_with_nobody_beside_it_a_load_goes_with_its_step(costs: StepCosts) -> None:
    assert choice(costs).way(10 * GB, HIT, WORK, 0) is Way.WITH_STEP
    assert choice(StepCosts()).way(10 * GB, HIT, WORK, 0) is Way.WITH_STEP
    assert choice(costs, LinkFacts(50e9, by_layer=False)).way(10 * GB, HIT, WORK, 0) is Way.WITH_STEP


def test_beside_others_only_what_hides_behind_the_step(costs: StepCosts) -> None:
    hidden, too_much = int(0.030 * 1.1 * 50e9) - GB // 10, int(0.030 * 1.1 * 50e9) + GB // 10
    assert choice(costs).way(hidden, HIT, WORK, 5) is Way.WITH_STEP
    assert choice(costs).way(too_much, HIT, WORK, 5) is Way.BEFORE_STEP


def test_without_an_estimate_or_layers_that_wait_others_are_not_kept_waiting(costs: StepCosts) -> None:
    assert choice(StepCosts()).way(1, HIT, WORK, 1) is Way.BEFORE_STEP
    assert choice(costs, LinkFacts(50e9, by_layer=False)).way(1, HIT, WORK, 1) is Way.BEFORE_STEP


def test_before_the_link_is_known_loads_come_before(costs: StepCosts) -> None:
    assert choice(costs, None).way(1, HIT, WORK, 0) is Way.BEFORE_STEP


def test_what_the_step_has_taken_counts(costs: StepCosts) -> None:
    step = choice(costs)
    assert step.way(GB, HIT, WORK, 3) is Way.WITH_STEP
    for _ in range(3):
        step.goes_with_step(GB, WORK)  # 20 ms of link and of compute each
    assert step.way(GB, HIT, WORK, 3) is Way.WITH_STEP
    assert step.way(3 * GB, HIT, PromptWork(1, 9_000), 3) is Way.BEFORE_STEP
    step.begin_step()
    assert step.way(3 * GB, HIT, PromptWork(1, 9_000), 3) is Way.BEFORE_STEP


def test_a_step_that_loads_for_long_takes_no_more(costs: StepCosts) -> None:
    step = choice(costs)
    taken = 0
    while step.way(GB, HIT, WORK, 3) is Way.WITH_STEP:
        step.goes_with_step(GB, WORK)
        taken += 1
    assert taken == 8  # 160 ms, sixteen decode steps
    assert step.way(GB, HIT, WORK, 0) is step.way(GB, HIT, WORK, 3) is Way.NEXT_STEP
    step.begin_step()
    assert step.way(GB, HIT, WORK, 3) is Way.WITH_STEP


def test_one_load_that_is_longer_than_that_is_not_put_off_for_ever(costs: StepCosts) -> None:
    hit = prompt_work(0, 200_000)
    assert choice(costs).way(100 * GB, hit, WORK, 0) is Way.WITH_STEP
    assert choice(costs).way(100 * GB, hit, WORK, 1) is Way.BEFORE_STEP


def test_the_slowest_rank_counts(costs: StepCosts) -> None:
    both = choice(costs)
    both.heard_of(LinkFacts(10e9, by_layer=False))
    assert both.way(GB // 10, HIT, WORK, 1) is Way.BEFORE_STEP
    slow = choice(costs)
    slow.heard_of(LinkFacts(10e9, by_layer=True))
    assert slow.way(GB, HIT, WORK, 1) is Way.BEFORE_STEP


def test_what_is_quicker_computed_is_not_loaded(costs: StepCosts) -> None:
    hit = prompt_work(9_000, 9_640)
    assert choice(costs).way(int(0.019 * 50e9), hit, WORK, 0) is Way.WITH_STEP
    assert choice(costs).way(int(0.022 * 50e9), hit, WORK, 0) is Way.COMPUTE
    assert choice(costs).way(int(0.022 * 50e9), hit, WORK, 4) is Way.COMPUTE
    assert choice(StepCosts()).way(int(0.022 * 50e9), hit, WORK, 0) is Way.WITH_STEP
    assert choice(costs, None).way(int(0.022 * 50e9), hit, WORK, 0) is Way.BEFORE_STEP
