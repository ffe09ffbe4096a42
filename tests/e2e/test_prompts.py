"""What a prompt may hit. One engine for all: vLLM keeps its connector in a global, so no other may run beside it."""

from __future__ import annotations

import pytest

from tests.e2e.engine import BLOCK_SIZE, WRITE_THROUGH, engine, greedy, prompt


@pytest.fixture(scope="module")
def shared_engine(tiny_llama):
    with engine(tiny_llama, WRITE_THROUGH) as vllm:
        yield vllm


@pytest.mark.parametrize("num_tokens", [31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 257, 300])
def test_prompts_that_end_at_and_beside_block_edges(tiny_llama, shared_engine, num_tokens):
    """Field trials B26, B32: matched tokens end on a block edge and leave at least one token to compute."""
    tokens = prompt(num_tokens, num_tokens)
    first = shared_engine.ask(tokens, greedy(2))
    assert shared_engine.ask(tokens, greedy(2)) == first
    shared_engine.evict_vram()
    before = shared_engine.stats()["tokens"]
    assert shared_engine.ask(tokens, greedy(2)) == first
    after = shared_engine.stats()["tokens"]
    hit = after["ram_hit"] - before["ram_hit"]
    assert hit == (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert after["computed"] - before["computed"] == num_tokens - hit


def test_a_request_that_needs_every_position_computed_hits_nothing(shared_engine):
    tokens = prompt(77, 200)
    shared_engine.ask(tokens)
    shared_engine.evict_vram()
    before = shared_engine.stats()["tokens"]
    shared_engine.ask(tokens, greedy(2, prompt_logprobs=1))
    after = shared_engine.stats()["tokens"]
    assert after["ram_hit"] == before["ram_hit"]
    assert after["computed"] - before["computed"] == 200


def test_the_same_tokens_under_another_salt_are_another_prompt(shared_engine):
    tokens = prompt(78, 200)
    shared_engine.ask(tokens)
    shared_engine.evict_vram()
    before = shared_engine.stats()["tokens"]["ram_hit"]
    shared_engine.llm.generate({"prompt_token_ids": tokens, "cache_salt": "tenant"}, greedy(2), use_tqdm=False)
    assert shared_engine.stats()["tokens"]["ram_hit"] == before
    shared_engine.ask(tokens, greedy(2))
    assert shared_engine.stats()["tokens"]["ram_hit"] > before, "the right tenant's blocks are there"
