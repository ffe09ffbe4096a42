"""What a replay plays requests through: the server's own index as the RAM tier, and a VRAM tier in front of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvortex.cache.index import BlockIndex, Refused
from kvortex.cache.policies import make_policy
from kvortex.keys import BlockKey, block_key
from kvortex.replay.trace import TracedRequest


class Moved(NamedTuple):
    """What a tier did for one request, in blocks: copied to VRAM, copied from it."""

    loaded: int
    stored: int


class Tier(Protocol):
    """Blocks behind VRAM."""

    def play(self, request: TracedRequest, in_vram: int) -> Moved:
        """One request, of which VRAM has the first `in_vram` blocks: loads what follows them, stores what is left."""
        ...


class TraceClock:
    """The time of the request that is being played, in seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class IndexTier:
    """The server's index with one of its policies; every block is stored once it is computed."""

    def __init__(self, policy: str, num_slots: int, *, idle_after_s: float = 30.0) -> None:
        self._clock = TraceClock()
        self.index = BlockIndex(num_slots, make_policy(policy, num_slots, clock=self._clock, idle_after_s=idle_after_s))
        self._keys: dict[int, BlockKey] = {}

    def play(self, request: TracedRequest, in_vram: int) -> Moved:
        index = self.index
        self._clock.now_s = request.arrival_s
        keys = self.keys_of(request.blocks)
        index.prompt(keys, request.input_tokens)
        loaded = index.match(keys[in_vram:])
        index.pin(loaded)
        grown = [*keys, *self.keys_of(request.output_blocks)]
        stored = self._store(index.absent(grown))
        index.unpin(loaded)
        index.touch(index.match(grown))
        # Last: how long an answer will be is not known while its prompt is stored.
        index.answered(grown, request.output_tokens)
        return Moved(len(loaded), stored)

    def _store(self, keys: Sequence[BlockKey]) -> int:
        answer = self.index.reserve(self.index.make_room(keys).keys)
        assert not isinstance(answer, Refused), answer
        self.index.publish(answer.slots)
        return len(answer.slots)

    def keys_of(self, blocks: Sequence[int]) -> list[BlockKey]:
        """The keys of a trace's blocks."""
        made = self._keys
        for block in blocks:
            if block not in made:
                made[block] = block_key(block.to_bytes(32, "little"), 0)
        return [made[block] for block in blocks]


class VramTier:
    """vLLM's prefix cache as an LRU of whole prompts; a size of 0 holds nothing."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._held: OrderedDict[int, None] = OrderedDict()

    def prefix(self, blocks: Sequence[int]) -> int:
        """Leading blocks held."""
        for count, block in enumerate(blocks):
            if block not in self._held:
                return count
        return len(blocks)

    def put(self, blocks: Sequence[int]) -> None:
        """A request used these blocks; the tail goes first."""
        if not self._num_blocks:
            return
        for block in reversed(blocks):
            self._held[block] = None
            self._held.move_to_end(block)
        while len(self._held) > self._num_blocks:
            self._held.popitem(last=False)
