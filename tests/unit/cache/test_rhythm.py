"""What the life table learns, and what it says of a conversation that is silent now."""

from __future__ import annotations

import math
import random

import pytest

from kvortex.cache.sessions.rhythm import EDGES_S, NUM_BINS, NUM_TURNS, PRIOR, Habit, Rhythms, bin_of, habit_of, pace_of


def pace(number: int) -> Habit:
    """Of conversations that have had two turns."""
    return Habit(number, 2)


def live_through(rhythms: Rhythms, habit: Habit, gap_s: float) -> None:
    """One silence: the bins that it lasts through, then its end; infinity never ends."""
    for bin_ in range(min(bin_of(gap_s) if math.isfinite(gap_s) else NUM_BINS, NUM_BINS)):
        rhythms.stayed_silent(habit, bin_)
    if math.isfinite(gap_s):
        rhythms.returned(habit, gap_s)


def test_bins_double_and_cover_every_silence() -> None:
    assert [bin_of(0.0), bin_of(0.249), bin_of(0.25), bin_of(0.5), bin_of(20.0)] == [0, 0, 1, 2, 7]
    assert all(bin_of(edge) == i + 1 for i, edge in enumerate(EDGES_S))
    assert bin_of(1e9) == NUM_BINS


def test_paces_follow_the_recent_gaps() -> None:
    assert [pace_of([]), pace_of([0.2]), pace_of([2.0]), pace_of([5.0]), pace_of([20.0]), pace_of([900.0])] == [
        *(0, 1, 2, 3, 4, 5)
    ]
    assert pace_of([1.5, 900.0]) == 4  # the geometric mean is 37 s


def test_before_anything_was_seen_half_come_back() -> None:
    assert Rhythms().p_return_within(pace(0), 0.0, math.inf) == pytest.approx(0.5, abs=0.01)
    assert all(0 <= share < 1 for share in PRIOR)


def test_a_probability_grows_with_the_horizon_and_is_one_of_a_product() -> None:
    rhythms = Rhythms()
    grown = [rhythms.p_return_within(pace(0), 3.0, h) for h in (0.0, 0.1, 1.0, 10.0, 100.0, 1e6)]
    assert grown == sorted(grown)
    assert grown[0] == 0
    near, far = rhythms.p_return_within(pace(0), 3.0, 4.0), rhythms.p_return_within(pace(0), 7.0, 11.0)
    assert 1 - (1 - near) * (1 - far) == pytest.approx(rhythms.p_return_within(pace(0), 3.0, 15.0))


def test_it_learns_the_share_that_comes_back_from_those_that_are_still_silent() -> None:
    rhythms = Rhythms()
    for i in range(400):
        live_through(rhythms, pace(4), 20.0 if i % 4 else math.inf)
    assert rhythms.p_return_within(pace(4), 0.0, 60.0) == pytest.approx(0.75, abs=0.04)
    assert rhythms.p_return_within(pace(4), 60.0, 1000.0) < 0.05


def test_who_never_comes_back_is_not_expected_long_before_it_is_forgotten() -> None:
    """A thousand sessions of one request: those still silent count as soon as they pass a bin."""
    rhythms = Rhythms()
    for _ in range(1000):
        for bin_ in range(bin_of(30.0)):
            rhythms.stayed_silent(pace(0), bin_)
    assert rhythms.p_return_within(pace(0), 1.0, 15.0) < 0.02


def test_tools_and_people_are_told_apart_by_their_pace() -> None:
    rhythms = Rhythms()
    rng = random.Random(1)
    for _ in range(300):
        live_through(rhythms, pace(2), rng.uniform(1, 4))
        live_through(rhythms, pace(4), rng.lognormvariate(math.log(20), 0.5))
    assert rhythms.p_return_within(pace(2), 1.0, 3.0) > 0.9
    assert rhythms.p_return_within(pace(4), 1.0, 3.0) < 0.1
    assert rhythms.p_return_within(pace(4), 1.0, 60.0) > 0.9
    assert rhythms.expected_in_s(pace(2), 0.0) == pytest.approx(4.0, abs=2.0)
    assert 8 <= rhythms.expected_in_s(pace(4), 0.0) <= 32


def test_a_pace_never_seen_leans_on_the_others() -> None:
    rhythms = Rhythms()
    for _ in range(300):
        live_through(rhythms, pace(2), 2.0)
    assert rhythms.p_return_within(pace(3), 0.0, 4.0) > 0.9


def test_conversations_that_end_after_so_many_turns_are_not_expected_then() -> None:
    """All go on twice and then never again, as quickly as ever: only their turns tell."""
    rhythms = Rhythms()
    for _ in range(200):
        for turns in (1, 2, 3):
            live_through(rhythms, habit_of(2, turns), 2.5 if turns < 3 else math.inf)
    assert rhythms.p_return_within(habit_of(2, 2), 0.0, 8.0) > 0.9
    assert rhythms.p_return_within(habit_of(2, 3), 0.0, math.inf) < 0.1
    assert rhythms.p_return_within(habit_of(2, 5), 0.0, math.inf) == pytest.approx(2 / 3, abs=0.1), "as all of its pace"
    assert habit_of(2, NUM_TURNS + 9) == habit_of(2, NUM_TURNS)


def test_habits_change() -> None:
    rhythms = Rhythms()
    for _ in range(3000):
        live_through(rhythms, pace(2), math.inf)
    for _ in range(3000):
        live_through(rhythms, pace(2), 2.0)
    assert rhythms.p_return_within(pace(2), 0.0, 4.0) > 0.9


def test_nobody_is_expected_after_the_last_bin() -> None:
    assert Rhythms().p_return_within(pace(0), 2 * EDGES_S[-1], math.inf) == 0
    assert Rhythms().expected_in_s(pace(0), 2 * EDGES_S[-1]) == math.inf


@pytest.mark.parametrize("silent_s", [0.0, 0.6, 1.5, 3.0])
def test_half_are_back_when_half_of_those_still_silent_were(silent_s: float) -> None:
    """Tools that take 1 to 5 s, any time of it as likely."""
    rhythms, dice = Rhythms(), random.Random(0)
    gaps = [dice.uniform(1.0, 5.0) for _ in range(400)]
    for gap_s in gaps:
        live_through(rhythms, pace(2), gap_s)
    longer = sorted(gap_s - silent_s for gap_s in gaps if gap_s > silent_s)
    assert rhythms.half_back_in_s(pace(2), silent_s) == pytest.approx(longer[len(longer) // 2], rel=0.35)
    p = rhythms.p_return_within(pace(2), silent_s, rhythms.half_back_in_s(pace(2), silent_s))
    assert p == pytest.approx(0.5)


def test_where_more_than_half_never_are_back_it_is_never() -> None:
    rhythms = Rhythms()
    for i in range(400):
        live_through(rhythms, pace(2), 2.0 if i % 4 == 0 else math.inf)
    assert rhythms.half_back_in_s(pace(2), 0.0) == math.inf
