"""What may be prefetched, by what became of it; what must stay free for requests."""

from __future__ import annotations

import random

import pytest

from kvortex.cache.prefetch.budget import WASTE_SHARE, Cause, PrefetchBudget
from kvortex.cache.prefetch.demand import Demand


def play(p_used: float, *, rounds: int = 400, request_blocks: int = 20, seed: int = 3) -> PrefetchBudget:
    """Rounds in each of which requests load, as much is guessed as may be, and the fate of it all is decided."""
    rng = random.Random(seed)
    budget = PrefetchBudget(1000)
    for _ in range(rounds):
        budget.requests_loaded(request_blocks)
        count = budget.allowed(Cause.GUESS)
        budget.issued(Cause.GUESS, count)
        used = sum(rng.random() < p_used for _ in range(count))
        budget.used(Cause.GUESS, used)
        budget.wasted(Cause.GUESS, count - used)
    return budget


@pytest.mark.parametrize("p_used", [0.0, 0.1, 0.3, 0.5, 0.7, 0.85])
def test_no_more_is_wasted_than_the_bound_however_wrong_the_guesses(p_used: float) -> None:
    budget = play(p_used)
    loaded = 400 * 20 + budget.count.issued
    assert budget.count.wasted <= 1.1 * WASTE_SHARE * loaded + 0.02 * 1000
    assert budget.count.issued > 0


def test_good_guesses_are_hardly_bounded_and_bad_ones_hardly_made() -> None:
    good, bad = play(0.97), play(0.0)
    assert good.count.issued > 20 * bad.count.issued
    assert good.share(Cause.GUESS) > 0.45
    assert bad.share(Cause.GUESS) < 0.05


def test_nothing_loaded_leaves_the_credit_only() -> None:
    budget = PrefetchBudget(1000)
    while count := budget.allowed(Cause.GUESS):
        budget.issued(Cause.GUESS, count)
        budget.wasted(Cause.GUESS, count)
    assert 0 < budget.count.wasted <= 2 * 0.02 * 1000


def test_blocks_whose_fate_is_open_take_room() -> None:
    budget = PrefetchBudget(1000)
    first = budget.allowed(Cause.QUEUED)
    budget.issued(Cause.QUEUED, first)
    assert first <= 500
    assert budget.allowed(Cause.QUEUED) == 0
    budget.used(Cause.QUEUED, first)
    assert budget.allowed(Cause.QUEUED) >= first


def test_even_sure_guesses_leave_half_of_vram_alone() -> None:
    budget = PrefetchBudget(1000)
    budget._rates[Cause.GUESS].saw(2000, used=True)
    first = budget.allowed(Cause.GUESS)
    assert 480 < first <= 500
    budget.issued(Cause.GUESS, first)
    assert budget.allowed(Cause.GUESS) == 0


def test_hints_that_are_worth_nothing_do_not_spoil_the_guesses_rate() -> None:
    budget = PrefetchBudget(1000)
    budget.requests_loaded(10_000)
    rate = budget.use_rate(Cause.GUESS)
    budget.issued(Cause.HINT, 400)
    budget.wasted(Cause.HINT, 400)
    assert budget.use_rate(Cause.GUESS) == rate
    assert budget.use_rate(Cause.HINT) < 0.1


def waste(budget: PrefetchBudget, cause: Cause) -> int:
    """Issues what may be, all of it for nothing, until no more may be."""
    total = 0
    while count := budget.allowed(cause):
        budget.issued(cause, count)
        budget.wasted(cause, count)
        total += count
    return total


@pytest.mark.parametrize(("wrong", "other"), [(Cause.GUESS, Cause.HINT), (Cause.HINT, Cause.GUESS)])
@pytest.mark.parametrize("capacity_blocks", [39, 1000])
def test_hints_and_guesses_leave_each_other_a_part(capacity_blocks: int, wrong: Cause, other: Cause) -> None:
    budget = PrefetchBudget(capacity_blocks)
    for _ in range(20):
        budget.requests_loaded(30)
        waste(budget, wrong)
        assert budget.allowed(other) > 0
    first = budget.allowed(other)
    budget.issued(other, first)
    budget.used(other, first)
    assert budget.allowed(other) > first, "what was used makes room for more, whatever the others wasted"


def test_both_wrong_waste_no_more_than_one() -> None:
    budget = PrefetchBudget(1000)
    for _ in range(400):
        budget.requests_loaded(20)
        waste(budget, Cause.GUESS)
        waste(budget, Cause.HINT)
    loaded = 400 * 20 + budget.count.issued
    assert budget.count.wasted <= 1.1 * WASTE_SHARE * loaded + 0.02 * 1000


def test_the_margin_follows_the_largest_burst_and_comes_down_again() -> None:
    demand = Demand(1000, 0.0)
    assert demand.margin_blocks == 50
    now, in_use = 0.0, 0
    for _ in range(10):  # 100 blocks within a fifth of a second
        now, in_use = now + 0.02, in_use + 10
        demand.saw(in_use, 0, now)
    assert 120 <= demand.margin_blocks <= 150
    demand.saw(in_use, 0, now + 300)
    assert demand.margin_blocks == 50


def test_requests_that_begin_are_no_reason_to_keep_blocks_free() -> None:
    demand = Demand(1000, 0.0)
    demand.saw(700, 700, 0.1)
    assert demand.margin_blocks == 50
    demand.saw(720, 0, 0.2)
    assert demand.margin_blocks == 50
    demand.saw(800, 0, 0.3)
    assert demand.margin_blocks > 100
    assert demand.lasts_s(100) < 10


def test_what_is_given_back_is_no_demand() -> None:
    demand = Demand(1000, 0.0)
    demand.saw(500, 0, 1000.0)
    margin = demand.margin_blocks
    demand.saw(0, 0, 1000.1)
    assert demand.margin_blocks <= margin


def test_a_shortage_keeps_more_free_for_a_while() -> None:
    demand = Demand(1000, 0.0)
    demand.ran_short()
    assert demand.margin_blocks == 300
    demand.saw(0, 0, 200.0)
    assert demand.margin_blocks <= 51


def test_a_block_lasts_as_long_as_the_free_ones_before_it() -> None:
    demand = Demand(1000, 0.0)
    assert demand.lasts_s(500) == 300
    in_use = 0
    for second in range(1, 200):
        in_use += 10
        demand.saw(in_use, 0, float(second))
    assert demand.lasts_s(100) == pytest.approx(10.0, rel=0.1)
