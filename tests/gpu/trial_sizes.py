"""How much the trials play, on a GPU and on vLLM's CPU build."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """How much is played; lengths in tokens.

    Attributes:
        block: tokens a block.
        pool: GPU blocks.
        seqs: requests that run at once, at most.
        same: prompts that come again and again: how many, their length, the answer's, rounds.
        pressure: requests that outgrow the pool while they run: how many, prompt, answer.
        returns: rounds in which two sessions of half the pool come back together.
        shared: requests with one prefix: how many, at once, its length, each one's own, answer.
        fresh: prompts that never come again: how many, at once, length, answer.
    """

    block: int
    pool: int
    seqs: int
    same: tuple[int, int, int, int]
    pressure: tuple[int, int, int]
    returns: int
    shared: tuple[int, int, int, int, int]
    fresh: tuple[int, int, int, int]

    @property
    def pool_tokens(self) -> int:
        return self.pool * self.block


GPU = Size(
    block=16,
    pool=2048,
    seqs=96,
    same=(80, 1500, 64, 10),
    pressure=(200, 200, 256),
    returns=20,
    shared=(200, 50, 8192, 64, 32),
    fresh=(500, 32, 2000, 32),
)
CPU = Size(
    block=32,
    pool=80,
    seqs=16,
    same=(24, 500, 16, 4),
    pressure=(48, 100, 96),
    returns=6,
    shared=(48, 16, 640, 24, 4),
    fresh=(48, 8, 200, 8),
)
