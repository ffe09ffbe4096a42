"""Whether prompts come back at all."""

from __future__ import annotations

import pytest

from kvortex.cache.returns import AT_FIRST, Returns


def test_before_the_first_prompt_half_is_expected_to_come_back() -> None:
    assert Returns(1000).share == AT_FIRST


def test_what_never_comes_back_is_known_when_vram_was_asked_for_a_few_times_over() -> None:
    returns = Returns(1000)
    shares = []
    for _ in range(50):
        returns.saw(0, 100)
        shares.append(returns.share)
    assert shares == sorted(shares, reverse=True)
    assert shares[9] > 0.15
    assert shares[29] < 0.03


def test_a_share_that_is_always_found_is_the_share() -> None:
    returns = Returns(1000)
    for _ in range(100):
        returns.saw(30, 100)
    assert returns.share == pytest.approx(0.3, abs=0.02)


def test_prompts_that_begin_to_come_back_are_seen_at_once() -> None:
    returns = Returns(1000)
    for _ in range(100):
        returns.saw(0, 100)
    returns.saw(100, 100)
    assert returns.share > 0.05


def test_a_prompt_longer_than_vram_counts_for_itself() -> None:
    returns = Returns(1000)
    returns.saw(4000, 5000)
    assert returns.share == pytest.approx(0.8, abs=0.01)
