"""How fast requests take VRAM's blocks: what must stay free for them, and how long an unused block lasts.

A request that grows and finds no block is preempted, or preempts another: what such ones take within a short while must
stay free. One that begins waits a step, by when a load under way has given its blocks back; that it had to is seen, and
then more stays free.
"""

from __future__ import annotations

import math
from typing import Final

_LEAST_MARGIN: Final = 0.05
_SAFETY: Final = 1.5
_BURST_S: Final = 1.0
"""Blocks taken within about so long are one burst; a load under way is over by then."""

_MEMORY_S: Final = 30.0
_RATE_S: Final = 10.0
"""What was taken within about so long tells the rate; in the first second there is none."""

_SHORTAGE: Final = 0.25
"""Of VRAM: so much more stays free after requests found too little, less and less over the memory."""

_LONGEST_S: Final = 300.0


class Demand:
    """Blocks that requests take, seen once a step. Costs the same however many blocks there are."""

    def __init__(self, capacity_blocks: int, now: float) -> None:
        self._capacity = capacity_blocks
        self._seen_at = now
        self._in_use = 0
        self._burst = 0.0
        self._peak = 0.0
        self._began_at = now
        self._taken = 0.0
        self._shortage = 0.0

    def saw(self, in_use: int, begun: int, now: float) -> None:
        """Requests hold `in_use` blocks now, `begun` of them those of requests that began since the last call."""
        passed = max(0.0, now - self._seen_at)
        self._seen_at = now
        taken = max(0, in_use - self._in_use)
        self._in_use = in_use
        fade = math.exp(-passed / _MEMORY_S)
        self._burst = self._burst * math.exp(-passed / _BURST_S) + max(0, taken - begun)
        self._peak = max(self._peak * fade, self._burst)
        self._taken = self._taken * math.exp(-passed / _RATE_S) + taken
        self._shortage *= fade

    def ran_short(self) -> None:
        """A request found too few free blocks."""
        self._shortage = _SHORTAGE * self._capacity

    @property
    def margin_blocks(self) -> int:
        """Free blocks that running requests might miss."""
        least = _LEAST_MARGIN * self._capacity
        return math.ceil(max(least, _SAFETY * self._peak) + self._shortage)

    def lasts_s(self, free_blocks: int) -> float:
        """How long a block put at the warm end of so many free ones stays."""
        seen_s = max(1.0, self._seen_at - self._began_at)
        per_s = self._taken / (_RATE_S * -math.expm1(-seen_s / _RATE_S))
        return min(_LONGEST_S, free_blocks / per_s) if per_s > 0 else _LONGEST_S
