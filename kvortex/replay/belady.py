"""The bound: a RAM tier that knows the future and gives up the block whose next use is farthest (Belady 1966).

It is the best for single blocks. For prefixes another order could be better still, by little: tails go before heads.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

from kvortex.replay.tiers import Moved
from kvortex.replay.trace import TracedRequest

_NEVER: Final = 1 << 62


class BeladyTier:
    """Plays the requests it was made for, in their order."""

    def __init__(self, requests: Sequence[TracedRequest], num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._next_uses = next_uses(requests)
        self._played = 0
        self._held: dict[int, int] = {}  # block -> its next use
        self._farthest: list[tuple[int, int]] = []  # (-next use, block); entries that are out of date stay in it

    def play(self, request: TracedRequest, in_vram: int) -> Moved:
        held = self._held
        loaded = 0
        for block in request.blocks[in_vram:]:
            if block not in held:
                break
            loaded += 1
        blocks = request.all_blocks
        new = [block for block in blocks if block not in held]
        for block, next_use in zip(blocks, self._next_uses[self._played], strict=True):
            held[block] = next_use
            heapq.heappush(self._farthest, (-next_use, block))
        self._played += 1
        while len(held) > self._num_blocks:
            next_use, block = heapq.heappop(self._farthest)
            if held.get(block) == -next_use:
                del held[block]
        # A block that goes at once, its next use being the farthest, was never stored.
        return Moved(loaded, sum(block in held for block in new))


def next_uses(requests: Sequence[TracedRequest]) -> list[list[int]]:
    """For each block of each request, its next use, as a place in the row of all blocks of all requests."""
    following: dict[int, int] = {}
    answer: list[list[int]] = []
    place = sum(len(request.all_blocks) for request in requests)
    for request in reversed(requests):
        blocks = request.all_blocks
        answer.append([following.get(block, _NEVER) for block in blocks])
        place -= len(blocks)
        following.update({block: place + depth for depth, block in enumerate(blocks)})
    answer.reverse()
    return answer
