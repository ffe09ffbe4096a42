"""An engine in virtual time over links around and far from break-even: what is decided against always and never."""

from __future__ import annotations

import itertools

import pytest

from kvortex.cache.costs import PromptWork, prompt_work
from tests.fakes.engine_play import BYTES_A_TOKEN, Ask, Machine, Play

SMALL = Machine(decode_s=8e-3, start_s=3e-3, token_s=80e-6, pair_s=30e-9)
LARGE = Machine(decode_s=10e-3, start_s=1e-3, token_s=28e-6, pair_s=1.2e-9)
LOADS = {
    "a small model": (SMALL, (256, 512, 1024, 1536), 48, 8),
    "long conversations": (LARGE, (4000, 8000, 12000), 640, 128),
    "short conversations": (LARGE, (128, 256, 512, 4000), 640, 16),
    "long questions": (LARGE, (4000, 8000, 12000), 4000, 16),
}
RATIOS = (0.3, 0.6, 1.05, 1.3, 2.0, 10.0)
"""How long the link takes for the hits, over how long computing them takes."""

NUM_ASKS = 200
NUM_BEFORE = 80
"""Requests from which it learns how many come together."""


def seconds(load: str, ratio: float, at_once: int, *, by_layer: bool, forced: str = "") -> float:
    machine, told, new, gen = LOADS[load]
    other_s = machine.decode_s + machine.start_s
    hits_s = sum(machine.seconds(prompt_work(0, tokens)) - other_s for tokens in told)
    play = Play(machine, sum(told) * BYTES_A_TOKEN / (ratio * hits_s), by_layer, forced)
    play.costs.saw(PromptWork(), machine.decode_s)
    for tokens in told * 2:
        play.costs.saw(prompt_work(0, tokens), machine.seconds(prompt_work(0, tokens)))
    for num_asks in (NUM_BEFORE, NUM_ASKS):
        lengths = itertools.islice(itertools.cycle(told), num_asks)
        took_s = play.run([Ask(tokens, new, gen) for tokens in lengths], at_once)
    return took_s


@pytest.mark.parametrize("by_layer", [True, False], ids=["by layer", "at once"])
@pytest.mark.parametrize("at_once", [1, 4, 16])
@pytest.mark.parametrize("load", LOADS)
def test_never_slower_than_the_better_of_always_and_never(load: str, at_once: int, by_layer: bool) -> None:
    for ratio in RATIOS:
        always = seconds(load, ratio, at_once, by_layer=by_layer, forced="always")
        never = seconds(load, ratio, at_once, by_layer=by_layer, forced="never")
        decided = seconds(load, ratio, at_once, by_layer=by_layer)
        assert decided <= 1.05 * min(always, never), f"at {ratio}: {decided:.2f} s, {always:.2f} and {never:.2f}"


def test_where_link_and_model_both_are_busy_it_is_quicker_than_either() -> None:
    always = seconds("long questions", 1.3, 16, by_layer=False, forced="always")
    never = seconds("long questions", 1.3, 16, by_layer=False, forced="never")
    assert seconds("long questions", 1.3, 16, by_layer=False) < 0.85 * min(always, never)
