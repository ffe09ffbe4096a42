"""Whether the cache is helping, in words."""

from __future__ import annotations

from typing import Any

import pytest

from kvortex.cache.misses import Miss
from kvortex.cache.stats import Ledger
from kvortex.cache.verdict import State, judge


def stats(
    *, vram_hit: int = 0, ram_hit: int = 0, missed: dict[Miss, int] | None = None, seen: int = 0
) -> dict[str, Any]:
    ledger = Ledger()
    if vram_hit or ram_hit or missed:
        ledger.count_tokens(vram_hit=vram_hit, ram_hit=ram_hit, missed=missed or {}, seen_tokens=seen)
    ledger.ram_evicted = 777
    return {**ledger.as_dict(), "block_size": 128, "tiers": {"ram": {"capacity_blocks": 1234}}}


def test_without_traffic_nothing_is_claimed():
    verdict = judge(stats())
    assert verdict.state is State.NO_TRAFFIC
    assert verdict.reasons == ()


def test_a_cache_that_helps_is_measured_against_one_without_limit():
    verdict = judge(stats(ram_hit=500, vram_hit=100, missed={Miss.NEW_TAIL: 100, Miss.EVICTED: 300}, seen=800))
    assert verdict.state is State.HELPING
    assert "RAM gave 50.0% and VRAM 10.0%" in verdict.text
    assert "80.0% in all" in verdict.text
    assert [(r.miss, r.tokens, r.share) for r in verdict.reasons] == [
        (Miss.EVICTED, 300, 0.75),
        (Miss.NEW_TAIL, 100, 0.25),
    ]


def test_a_ram_that_is_too_small_is_named_with_its_counts():
    verdict = judge(stats(missed={Miss.EVICTED: 900, Miss.NEW_PROMPT: 1000}, seen=900))
    assert verdict.state is State.NOT_HELPING
    assert "900 tokens were in RAM and were given up" in verdict.text
    assert "1,234 blocks" in verdict.text
    assert "777" in verdict.text
    assert "ram_cache_size" in verdict.text


@pytest.mark.parametrize(
    ("miss", "word"),
    [
        (Miss.NOT_STORED, "offload_threshold"),
        (Miss.LOAD_FAILED, "log"),
        (Miss.QUICKER_COMPUTED, "less time than loading"),
        (Miss.UNUSABLE, "comes before"),
    ],
)
def test_each_loss_that_can_be_mended_is_named(miss, word):
    verdict = judge(stats(missed={miss: 900, Miss.LAST_BLOCK: 100}, seen=900))
    assert verdict.state is State.NOT_HELPING
    assert word in verdict.text


def test_a_vram_that_holds_all_needs_no_ram():
    verdict = judge(stats(vram_hit=900, missed={Miss.NEW_TAIL: 100}, seen=900))
    assert verdict.state is State.VRAM_SUFFICES
    assert "first differ at token 900" in verdict.reasons[0].text


def test_one_off_traffic_is_not_the_caches_fault():
    verdict = judge(stats(missed={Miss.NEW_PROMPT: 900, Miss.SALT: 90, Miss.NOT_STORED: 5}))
    assert verdict.state is State.NOTHING_REPEATS
    assert [r.miss for r in verdict.reasons] == [Miss.NEW_PROMPT, Miss.SALT], "under one in a hundred is left out"
    assert "1 of 1 prompts" in verdict.reasons[0].text
    assert "128 tokens" in verdict.reasons[0].text


@pytest.mark.parametrize("miss", Miss)
def test_every_reason_has_words(miss):
    reasons = judge(stats(missed={miss: 10})).as_dict()["reasons"]
    assert [(r["reason"], r["tokens"], r["share"]) for r in reasons] == [(miss.value, 10, 1.0)]
    assert len(reasons[0]["text"]) > 20
