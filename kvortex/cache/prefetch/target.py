"""What is to be brought back, a part of it, and the VRAM that it goes to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvortex.cache.prefetch.budget import Cause
from kvortex.cache.sessions.session import Scope, Session
from kvortex.keys import BlockKey


class Vram(Protocol):
    """VRAM as the planner sees it."""

    @property
    def free_blocks(self) -> int: ...

    def holds(self, key: BlockKey) -> bool: ...

    def takeable(
        self, count: int, p_return: Callable[[Session], float], below: float, own: Collection[BlockKey]
    ) -> int:
        """How many of the next `count` free blocks may be taken: nothing is lost with them, and who might ask for
        their content again is less likely to than `below`. Blocks of the keys `own` are passed over: they will be
        moved out of the way."""
        ...

    def keep(self, target: Target) -> None:
        """What VRAM has of it is to be taken after all else."""
        ...


@dataclass(slots=True, eq=False)
class Target:
    """A prompt whose blocks are to be in VRAM.

    Attributes:
        name: tells it from others of its cause.
        keys: of its complete blocks, head first.
        session: whose they are, where that is known.
        asked_at: when it became one.
        scope: whose hint it is; None where it is none.
        in_flight: chunks under way.
    """

    cause: Cause
    name: Hashable
    keys: Sequence[BlockKey]
    session: Session | None
    asked_at: float
    scope: Scope | None = None
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks `start` and following of a target, to be loaded now: `keys[i]` is in `slots[i]`."""

    target: Target
    start: int
    keys: tuple[BlockKey, ...]
    slots: tuple[int, ...]
