"""Which way a load goes, by what runs, what the step computes and what it loads already."""

from __future__ import annotations

import pytest

from kvortex.cache.costs import PromptWork, StepCosts, prompt_work
from kvortex.cache.load_choice import LoadChoice, Way
from kvortex.messages import LinkFacts
from tests.fakes.clock import FakeClock

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
        choice.heard_of(0, link)
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
    both.heard_of(1, LinkFacts(10e9, by_layer=False))
    assert both.way(GB // 10, HIT, WORK, 1) is Way.BEFORE_STEP
    slow = choice(costs)
    slow.heard_of(1, LinkFacts(10e9, by_layer=True))
    assert slow.way(GB, HIT, WORK, 1) is Way.BEFORE_STEP


ALL_AT_ONCE = LinkFacts(50e9, by_layer=False)
RUN = prompt_work(9_000, 9_640)  # as a hit: 20 ms


def takes(seconds: float) -> int:
    """Bytes that take the link so long."""
    return int(seconds * 50e9)


def test_what_is_quicker_computed_is_not_loaded(costs: StepCosts) -> None:
    assert choice(costs, ALL_AT_ONCE).way(takes(0.019), RUN, WORK, 0) is Way.WITH_STEP
    assert choice(costs, ALL_AT_ONCE).way(takes(0.022), RUN, WORK, 0) is Way.COMPUTE
    assert choice(costs, ALL_AT_ONCE).way(takes(0.022), RUN, WORK, 4) is Way.COMPUTE
    assert choice(StepCosts(), ALL_AT_ONCE).way(takes(0.022), RUN, WORK, 0) is Way.WITH_STEP
    assert choice(costs, None).way(takes(0.022), RUN, WORK, 0) is Way.BEFORE_STEP


def test_what_hides_behind_the_step_costs_nothing(costs: StepCosts) -> None:
    step = choice(costs)
    assert step.way(takes(0.039), RUN, WORK, 0) is Way.WITH_STEP
    assert step.way(takes(0.042), RUN, WORK, 0) is Way.COMPUTE
    step.goes_with_step(takes(0.039), WORK)
    assert step.way(takes(0.022), RUN, PromptWork(1, 9_000), 0) is Way.COMPUTE, "the first load takes that room"


def test_what_is_computed_keeps_all_waiting_and_a_load_its_own_request(costs: StepCosts) -> None:
    step = choice(costs, ALL_AT_ONCE)
    assert step.way(takes(0.028), RUN, WORK, 1, 2) is Way.BEFORE_STEP  # 28 and 10 ms against twice 20
    assert step.way(takes(0.032), RUN, WORK, 1, 2) is Way.COMPUTE
    assert step.way(takes(0.032), RUN, WORK, 2, 3) is Way.BEFORE_STEP
    assert step.way(takes(0.045), RUN, WORK, 30, 31) is Way.COMPUTE, "twice as long is too long for anyone"


def test_a_load_waits_for_those_before_it_until_the_link_has_brought_them(costs: StepCosts) -> None:
    clock = FakeClock()
    step = LoadChoice(costs, clock)
    step.heard_of(0, ALL_AT_ONCE)
    assert step.way(takes(0.020), RUN, WORK, 2, 3) is Way.BEFORE_STEP
    step.goes_before_step(takes(0.040))
    assert step.way(takes(0.020), RUN, WORK, 2, 3) is Way.COMPUTE
    clock.advance(0.015)
    assert step.way(takes(0.020), RUN, WORK, 2, 3) is Way.BEFORE_STEP
    clock.advance(10)
    assert step.way(takes(0.020), RUN, WORK, 2, 3) is Way.BEFORE_STEP
    step.goes_before_step(takes(0.040))
    assert step.way(takes(0.020), RUN, WORK, 2, 3) is Way.COMPUTE, "time in which it was free is not saved up"


def test_requests_that_come_together_count_for_the_first_of_them_until_they_stay_away(costs: StepCosts) -> None:
    clock = FakeClock()
    step = LoadChoice(costs, clock)
    step.heard_of(0, ALL_AT_ONCE)
    for _ in range(1000):
        clock.advance(0.02)
        step.begin_step(4)
    clock.advance(0.02)
    assert step.way(takes(0.035), RUN, WORK, 0, 1) is Way.BEFORE_STEP
    clock.advance(10)
    assert step.way(takes(0.035), RUN, WORK, 0, 1) is Way.COMPUTE


def test_where_loads_cannot_go_with_steps_none_does(costs: StepCosts) -> None:
    assert choice(costs).way(takes(0.010), RUN, WORK, 0, may_go_with_step=False) is Way.BEFORE_STEP
    assert choice(costs).way(takes(0.022), RUN, WORK, 0, may_go_with_step=False) is Way.COMPUTE


def test_a_link_that_was_told_anew_counts_as_it_is_now(costs: StepCosts) -> None:
    step = choice(costs, LinkFacts(1e9, by_layer=False))
    assert step.way(takes(0.010), RUN, WORK, 0) is Way.COMPUTE
    step.heard_of(0, ALL_AT_ONCE)
    assert step.way(takes(0.010), RUN, WORK, 0) is Way.WITH_STEP
