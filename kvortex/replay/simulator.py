"""Plays a trace through a tier, and counts.

The hit rate is the share of prompt tokens that lead their prompt and are held when it arrives, over the last half of
the requests: the first half fills the cache. Conventions are those of public simulators of such traces: a prompt's
last, partial block takes a place and may hit like others, and the tokens of an answer take none. A server's own log
has complete blocks only, and those of the answers, which take places too. vLLM computes a prompt's last token always:
a prompt that is held whole hits one block less there than here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvortex.config.settings import KVCacheSettings
from kvortex.replay.belady import BeladyTier
from kvortex.replay.prefill import PrefillCost
from kvortex.replay.tiers import IndexTier, Tier, VramTier
from kvortex.replay.trace import TracedRequest
from kvortex.replay.two_tiers import TwoTiers

BELADY: Final = "belady"
DEFAULT: Final = "default"
WARM_UP: Final = 0.5
"""Share of the requests that fill the cache before hits are counted."""
_ROOM: Final = 1024
"""Slots beyond, for a batch of stores in a trace of next to nothing."""
SERVER_DEFAULTS: Final = {name: field.default for name, field in KVCacheSettings.model_fields.items()}


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """One policy at one size. All but `seconds` are over the requests after the warm-up.

    Attributes:
        policy: as asked for.
        eviction_policy: what that stands for.
        hit_rate: hit_tokens of queried_tokens.
        bytes_stored, bytes_loaded: copied to RAM and back.
        prefill_s: what all prompts take without any hit; None where it is not known.
        prefill_saved_s: of that, what the tokens found in RAM take; the loads are not subtracted.
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
    prefill_s: float | None
    prefill_saved_s: float | None
    seconds: float


def replay(
    requests: Sequence[TracedRequest],
    policy: str,
    *,
    ram_bytes: int,
    vram_bytes: int,
    token_bytes: int,
    idle_after_s: float = SERVER_DEFAULTS["idle_after"],
    prefill: PrefillCost | None = None,
    warm_up: float = WARM_UP,
) -> ReplayResult:
    """One policy, by its name in the configuration, `belady`, or `default`, which is the server's.

    Args:
        requests: at least one, in blocks of one size.
        ram_bytes: at least one block.
        vram_bytes: 0 for none.
        token_bytes: KV of one token.
        warm_up: share of the requests that is played before hits are counted.
    """
    block_tokens = requests[0].block_tokens
    block_bytes = block_tokens * token_bytes
    ram_blocks = ram_bytes // block_bytes
    assert ram_blocks > 0, f"{ram_bytes} bytes of RAM for blocks of {block_bytes}"
    eviction_policy = SERVER_DEFAULTS["eviction_policy"] if policy == DEFAULT else policy
    started = time.perf_counter()
    vram_blocks = vram_bytes // block_bytes
    # More than the trace could ever half fill plays the same, and would only take time and memory to lay out.
    slots = min(ram_blocks, 2 * sum(len(request.all_blocks) for request in requests) + _ROOM)
    tier: Tier
    vram: VramTier | TwoTiers = VramTier(vram_blocks)
    if eviction_policy == BELADY:
        # What both tiers hold together is the bound of policies that keep no block twice.
        tier = BeladyTier(requests, slots + vram_blocks)
    elif vram_blocks:
        tier = vram = TwoTiers(
            eviction_policy, slots, vram_blocks, block_tokens=block_tokens, idle_after_s=idle_after_s
        )
    else:
        tier = IndexTier(eviction_policy, slots, idle_after_s=idle_after_s)
    first = int(len(requests) * warm_up)
    queried = vram_hit = ram_hit = loaded = stored = 0
    all_s = saved_s = 0.0
    for number, request in enumerate(requests):
        in_vram = vram.prefix(request.blocks)
        moved = tier.play(request, in_vram)
        vram.put(request.all_blocks)
        if number < first:
            continue
        vram_tokens = min(in_vram * block_tokens, request.input_tokens)
        held_tokens = min((in_vram + moved.loaded) * block_tokens, request.input_tokens)
        queried += request.input_tokens
        vram_hit += vram_tokens
        ram_hit += held_tokens - vram_tokens
        loaded += moved.loaded
        stored += moved.stored
        if prefill is not None:
            all_s += prefill.seconds(0, request.input_tokens)
            saved_s += prefill.seconds(vram_tokens, held_tokens)
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
        prefill_s=None if prefill is None else all_s,
        prefill_saved_s=None if prefill is None else saved_s,
        seconds=time.perf_counter() - started,
    )
