"""What the scheduler side remembers of each live request; forgotten when vLLM says that it finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvortex.cache.misses import Explanation
from kvortex.cache.prefix import GroupShape, PrefixHit
from kvortex.cache.stats import Ledger
from kvortex.keys import BlockKey
from kvortex.vllm_plugin import compat

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class RequestState:
    """One request between its arrival and its end.

    Attributes:
        hit: the last answer given to vLLM, used if it allocates for it.
        with_step: that answer said that the load goes with the request's step.
        declined: blocks of its hit that are quicker computed than loaded.
        explanation: why what that hit does not cover is computed.
        found_share: of its prompt, in VRAM or RAM when it first asked; None before.
        counted: its prompt tokens are in the ledger, or will be when its load ends.
        load_failed: a load failed it once; it is computed from then on.
        prompted: the eviction policy has heard of its prompt, and is to hear of its answer.
        admitted_s: when that was, in seconds since 1970.
    """

    hit: PrefixHit | None = None
    with_step: bool = False
    declined: int = 0
    explanation: Explanation = field(default_factory=Explanation)
    found_share: float | None = None
    counted: bool = False
    load_failed: bool = False
    prompted: bool = False
    admitted_s: float = 0.0
    _keys: dict[int, list[BlockKey]] = field(default_factory=dict)

    def keys(self, request: Request, group: GroupShape, hash_block_size: int) -> Sequence[BlockKey]:
        """The group's keys of the request's complete blocks; made once, added to as the request grows."""
        known = self._keys.setdefault(group.group_id, [])
        num_complete = len(request.block_hashes) * hash_block_size // group.block_size
        if len(known) > num_complete:  # a streaming session rewrote its tail
            known.clear()
        if len(known) < num_complete:
            known.extend(compat.request_keys(request, group, hash_block_size, start=len(known)))
        return known

    def count(self, ledger: Ledger, *, vram_hit: int, ram_hit: int, computed: int, failed_tokens: int = 0) -> None:
        """Where its prompt's tokens came from, `failed_tokens` of the computed ones because their load failed."""
        ledger.count_tokens(
            vram_hit=vram_hit,
            ram_hit=ram_hit,
            missed=self.explanation.settled(computed, load_failed=failed_tokens),
            seen_tokens=self.explanation.seen_tokens,
        )
