"""Plays a trace through a tier, and counts.

The hit rate is the share of prompt tokens that lead their prompt and are held when it arrives, over the last half of
the requests: the first half fills the cache. Conventions are those of public simulators of such traces: a prompt's
last, partial block takes a place and may hit like others, and the tokens of an answer take none.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvortex.config.settings import KVCacheSettings
from kvortex.replay.belady import BeladyTier
from kvortex.replay.tiers import IndexTier, Tier, VramTier
from kvortex.replay.trace import BLOCK_TOKENS, TracedRequest
from kvortex.replay.two_tiers import TwoTiers

BELADY: Final = "belady"
DEFAULT: Final = "default"
SERVER_DEFAULTS: Final = {name: field.default for name, field in KVCacheSettings.model_fields.items()}


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """One policy at one size. All but `seconds` are over the last half of the requests.

    Attributes:
        policy: as asked for.
        eviction_policy: what that stands for.
        hit_rate: hit_tokens of queried_tokens.
        bytes_stored, bytes_loaded: copied to RAM and back.
        seconds: the whole replay took.
    """

    policy: str
    eviction_policy: str
    ram_bytes: int
    ram_blocks: int
    vram_bytes: int
    requests: int
    hit_rate: float
    queried_tokens: int
    hit_tokens: int
    vram_hit_tokens: int
    ram_hit_tokens: int
    bytes_stored: int
    bytes_loaded: int
    seconds: float


def replay(
    requests: Sequence[TracedRequest],
    policy: str,
    *,
    ram_bytes: int,
    vram_bytes: int,
    token_bytes: int,
    idle_after_s: float = SERVER_DEFAULTS["idle_after"],
) -> ReplayResult:
    """One policy, by its name in the configuration, `belady`, or `default`, which is the server's.

    Args:
        ram_bytes: at least one block of 512 tokens.
        vram_bytes: 0 for none.
        token_bytes: KV of one token.
    """
    block_bytes = BLOCK_TOKENS * token_bytes
    ram_blocks = ram_bytes // block_bytes
    assert ram_blocks > 0, f"{ram_bytes} bytes of RAM for blocks of {block_bytes}"
    eviction_policy = SERVER_DEFAULTS["eviction_policy"] if policy == DEFAULT else policy
    started = time.perf_counter()
    vram_blocks = vram_bytes // block_bytes
    tier: Tier
    vram: VramTier | TwoTiers = VramTier(vram_blocks)
    if eviction_policy == BELADY:
        tier = BeladyTier(requests, ram_blocks)
    elif vram_blocks:
        tier = vram = TwoTiers(eviction_policy, ram_blocks, vram_blocks, idle_after_s=idle_after_s)
    else:
        tier = IndexTier(eviction_policy, ram_blocks, idle_after_s=idle_after_s)
    first = len(requests) // 2
    queried = vram_hit = ram_hit = loaded = stored = 0
    for number, request in enumerate(requests):
        in_vram = vram.prefix(request.blocks)
        moved = tier.play(request, in_vram)
        vram.put(request.blocks)
        if number < first:
            continue
        vram_tokens = min(in_vram * BLOCK_TOKENS, request.input_tokens)
        queried += request.input_tokens
        vram_hit += vram_tokens
        ram_hit += min((in_vram + moved.loaded) * BLOCK_TOKENS, request.input_tokens) - vram_tokens
        loaded += moved.loaded
        stored += moved.stored
    return ReplayResult(
        policy=policy,
        eviction_policy=eviction_policy,
        ram_bytes=ram_bytes,
        ram_blocks=ram_blocks,
        vram_bytes=vram_bytes,
        requests=len(requests) - first,
        hit_rate=(vram_hit + ram_hit) / queried if queried else 0.0,
        queried_tokens=queried,
        hit_tokens=vram_hit + ram_hit,
        vram_hit_tokens=vram_hit,
        ram_hit_tokens=ram_hit,
        bytes_stored=stored * block_bytes,
        bytes_loaded=loaded * block_bytes,
        seconds=time.perf_counter() - started,
    )
