"""Why a real vLLM computed prompt tokens, as the scheduler side tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm import SamplingParams

from kvortex.cache.planner import NOTHING
from tests.e2e.engine import BLOCK_BYTES, WRITE_THROUGH, Engine, engine, greedy, prompt


def missed_by(running: Engine, do: Callable[[], object]) -> dict[str, int]:
    """The reasons counted meanwhile, those that were."""
    before = running.stats()["missed"]
    do()
    after = running.stats()["missed"]
    return {reason: after[reason] - before[reason] for reason in after if after[reason] != before[reason]}


def test_new_prompts_their_continuation_and_the_last_block(tiny_llama):
    with engine(tiny_llama, WRITE_THROUGH) as running:
        first = prompt(1, 330)
        assert missed_by(running, lambda: running.ask(first)) == {"new_prompt": 320, "last_block": 10}
        longer = [*first, *prompt(2, 330)]
        # Ten blocks hit, and the answer's first tokens are not these: the eleventh block is new.
        assert missed_by(running, lambda: running.ask(longer)) == {"new_tail": 320, "last_block": 20}
        prompts = running.stats()["prompts"]
        assert prompts == {"counted": 2, "new": 1, "seen_tokens": 320}


def test_a_hit_from_ram_misses_the_last_block_only(tiny_llama):
    with engine(tiny_llama, WRITE_THROUGH) as running:
        tokens = prompt(1, 330)
        running.ask(tokens)
        running.evict_vram()
        assert missed_by(running, lambda: running.ask(tokens)) == {"last_block": 10}
        assert running.stats()["tokens"]["ram_hit"] == 320


def test_blocks_that_a_small_ram_gave_up_are_evicted(tiny_llama):
    with engine(tiny_llama, {**WRITE_THROUGH, "ram_cache_size": 12 * BLOCK_BYTES}) as running:
        tokens = prompt(1, 330)
        running.ask(tokens)
        running.evict_vram()
        assert missed_by(running, lambda: running.ask(tokens)) == {"evicted": 320, "last_block": 10}


def test_blocks_that_were_never_copied_are_not_stored(tiny_llama, monkeypatch):
    with engine(tiny_llama, {"offload_threshold": 1.0, "offload_target": 1.0}) as running:
        # As where copies are too slow: none is made, and nobody waits for one.
        monkeypatch.setattr(running.side.planner, "plan", lambda *_: NOTHING)
        monkeypatch.setattr(running.side._gate, "must_wait", lambda *_: False)
        tokens = prompt(1, 330)
        running.ask(tokens)
        running.ask_all([prompt(seed, 600) for seed in (2, 3)], greedy(1))
        reasons = missed_by(running, lambda: running.ask(tokens))
        assert reasons["not_stored"] > 0
        assert reasons["last_block"] == 10


def test_a_salt_is_told_from_a_new_prompt(tiny_llama):
    with engine(tiny_llama, WRITE_THROUGH) as running:
        tokens = prompt(1, 330)
        running.ask(tokens)
        salted: Any = {"prompt_token_ids": tokens, "cache_salt": "someone else"}
        ask = lambda: running.llm.generate([salted], greedy(), use_tqdm=False)  # noqa: E731
        assert missed_by(running, ask) == {"salt": 320, "last_block": 10}
        assert missed_by(running, ask) == {"last_block": 10}


def test_a_request_that_must_not_use_the_cache(tiny_llama):
    with engine(tiny_llama, WRITE_THROUGH) as running:
        tokens = prompt(1, 330)
        running.ask(tokens)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        assert missed_by(running, lambda: running.ask(tokens, params)) == {"not_asked": 330}


def test_requests_that_wait_for_room_are_explained_once_and_right(tiny_llama):
    with engine(tiny_llama, WRITE_THROUGH, num_blocks=40) as running:
        prompts = [prompt(seed, 600) for seed in range(6)]
        ask = lambda: running.ask_all(prompts)  # noqa: E731
        first = missed_by(running, ask)
        assert first == {"new_prompt": 6 * 576, "last_block": 6 * 24}
        again = missed_by(running, ask)
        assert again["last_block"] == 6 * 24
        assert "new_prompt" not in again
