"""Conversations in turn, more than VRAM or RAM hold alone: the two tiers together keep nearly all of them."""

from __future__ import annotations

from typing import Any

from tests.e2e.engine import BLOCK_BYTES, BLOCK_SIZE, Engine, engine, greedy, prompt

CONVERSATIONS, TURNS, AT_A_TIME = 12, 4, 4
FIRST, ADDED, ANSWER = 8 * BLOCK_SIZE, 12, 4
VRAM_BLOCKS, RAM_BLOCKS = 48, 60
"""As 24 GB to 30 GB; the conversations grow from 96 blocks to 108, as from 42 GB to 54 GB."""


def play(vllm: Engine) -> tuple[list[Any], list[float]]:
    """All conversations a turn, in the same order. The answers, and what each turn hit of its prompts' tokens."""
    talks = [prompt(number, FIRST) for number in range(CONVERSATIONS)]
    answers, shares = [], []
    for turn in range(TURNS):
        before = vllm.stats()["tokens"] if vllm.scheduler.connector else None
        turn_answers = vllm.ask_all(talks, greedy(ANSWER))
        answers.append(turn_answers)
        if before is not None:
            after = vllm.stats()["tokens"]
            gained = {name: after[name] - before[name] for name in after}
            shares.append((gained["vram_hit"] + gained["ram_hit"]) / gained["queried"])
        for number, (talk, (tokens, _)) in enumerate(zip(talks, turn_answers, strict=True)):
            talk += [*tokens, *prompt(1000 * turn + number, ADDED)]
    return answers, shares


def test_conversations_in_turn_are_found_in_vram_and_ram_together_and_answered_as_without_offload(tiny_llama):
    limits: dict[str, Any] = {"num_blocks": VRAM_BLOCKS + 1, "max_num_seqs": AT_A_TIME, "max_num_batched_tokens": 256}
    with engine(tiny_llama, None, **limits) as vllm:
        expected, _ = play(vllm)
    with engine(tiny_llama, {"ram_cache_size": RAM_BLOCKS * BLOCK_BYTES}, **limits) as vllm:
        answers, shares = play(vllm)
        snapshot = vllm.stats()
    assert [[text for text, _ in turn] for turn in answers] == [[text for text, _ in turn] for turn in expected]
    assert shares[0] == 0
    late = sum(shares[1:]) / (TURNS - 1)
    assert late >= 0.8, shares
    assert snapshot["admission"]["overdue"] == 0
    assert snapshot["store"]["blocks"] <= 2 * snapshot["load"]["blocks"] + RAM_BLOCKS + VRAM_BLOCKS
