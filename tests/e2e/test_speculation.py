"""Tokens that are drafted and not kept leave KV behind, and a drafting model has KV of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from kvortex.transfer.cpu import CpuCopyEngine
from tests.e2e.engine import BLOCK_SIZE, WRITE_THROUGH, Answer, Engine, engine, greedy, prompt
from tests.fakes.copy_engines import ZeroLoadMover

NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
FEW_WORDS = list(range(10, 14))
"""All that is said to the second prompt: n-grams are right now and then, a model that may say more seldom is."""
FREE = prompt(1, 300)
BOUND = [*prompt(2, 200), *(FEW_WORDS[number % 4] for number in prompt(3, 110))]
SAID = 10
"""Tokens; they end in the prompt's last block, so it is full, and was written by drafts that were not kept."""


def ask_all(vllm: Engine, *, evict: bool = False) -> list[Answer]:
    """Two prompts, and the second again with what was said as a part of it; that may have to be loaded then."""
    free = vllm.ask(FREE, greedy(SAID))
    bound = vllm.ask(BOUND, greedy(SAID, allowed_token_ids=FEW_WORDS))
    if evict:
        vllm.evict_vram()
    return [free, bound, vllm.ask(BOUND + list(bound[0]) + prompt(9, 20), greedy(4))]


@contextmanager
def counted(vllm: Engine) -> Iterator[dict[str, int]]:
    """Tokens drafted and kept meanwhile."""
    counts: dict[str, int] = {}
    make_stats = vllm.scheduler.make_spec_decoding_stats
    with patch.object(vllm.scheduler, "make_spec_decoding_stats", wraps=make_stats) as drafts:
        yield counts
    for name in ("num_draft_tokens", "num_accepted_tokens"):
        counts[name] = sum(call.kwargs[name] for call in drafts.call_args_list)


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_drafted_answers_are_equal_through_eviction_and_load(tiny_llama, method):
    if method == "ngram" and os.environ.get("KVORTEX_TEST_ALL_MODELS") != "1":
        pytest.skip("KVORTEX_TEST_ALL_MODELS=1 runs it")
    own = {"method": method, "num_speculative_tokens": 3, "model": tiny_llama}
    options: dict[str, Any] = {"speculative_config": NGRAMS if method == "ngram" else own}
    with engine(tiny_llama, None, **options) as plain, counted(plain) as right_counts:
        right = ask_all(plain)
    assert 0 < right_counts["num_accepted_tokens"] < right_counts["num_draft_tokens"]

    movers: list[ZeroLoadMover] = []

    def make_engine(layout, slab):
        movers.append(ZeroLoadMover(layout, slab, zeros=False))
        return CpuCopyEngine(layout, slab, 2, mover=movers[0])

    with engine(tiny_llama, WRITE_THROUGH, make_engine=make_engine, **options) as vllm:
        assert ask_all(vllm) == right
        vllm.evict_vram()
        before = vllm.stats()
        with counted(vllm) as counts:
            assert ask_all(vllm, evict=True) == right
        assert counts == right_counts, "the drafting model's KV is as it was"
        after = vllm.stats()
        hit = after["tokens"]["ram_hit"] - before["tokens"]["ram_hit"]
        assert hit == sum(tokens // BLOCK_SIZE for tokens in (len(FREE), len(BOUND), len(BOUND) + SAID)) * BLOCK_SIZE
        assert after["load"]["with_step_blocks"] == 0, "a drafting model does not wait for a step's loads"
        vllm.evict_vram()
        movers[0].zeros = True
        assert all(answer != same for answer, same in zip(ask_all(vllm), right, strict=True))
