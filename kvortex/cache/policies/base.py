"""The eviction policy's interface: which READY slots to give up when a store needs room.

The index says what happens to slots; the policy only orders them. In the policy's eyes a slot goes

    (unknown) --admitted--> evictable <--blocked / evictable--> blocked
                                |  evict, removed                  |  removed
                                +------------> (unknown) <---------+

Beside that it hears of prompts, whatever RAM holds of them: which blocks follow each other, what is asked for again,
and after how long. A policy may pass this over; one that does not must cope with blocks it never heard of.

Batches may be empty, hold each slot once, except in `used`, and list a prompt's blocks from its head to its
tail. A block without the ones before it is never hit: a policy should give up a batch's tail before its head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvortex.keys import BlockKey


class Choice(NamedTuple):
    """Whom new blocks displace.

    Attributes:
        victims: slots given up, and forgotten.
        declined: new blocks that had better not be stored.
    """

    victims: list[int]
    declined: frozenset[BlockKey]


class EvictionPolicy(Protocol):
    """Orders the slots of one index. No call but `reset` takes longer the more slots are held."""

    def __len__(self) -> int:
        """How many slots `evict` may choose from."""
        ...

    def prompt(self, keys: Sequence[BlockKey], num_tokens: int) -> None:
        """A request was admitted.

        Args:
            keys: of every complete block of its prompt in one KV group, head first, in RAM or not. A model of several
                groups makes one call for each.
            num_tokens: length of the prompt.
        """
        ...

    def answered(self, keys: Sequence[BlockKey], num_output_tokens: int) -> None:
        """A request is over, by whatever cause.

        Args:
            keys: as given to `prompt`, with those of the blocks that its answer completed behind them.
            num_output_tokens: length of the answer.
        """
        ...

    def admitted(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """Unknown slots became READY: they are evictable.

        Args:
            keys: of each slot's block, for policies that remember blocks after they are gone.
        """
        ...

    def used(self, slots: Sequence[int]) -> None:
        """A request asked for these blocks. They may be evictable or blocked, and may repeat."""
        ...

    def blocked(self, slots: Sequence[int]) -> None:
        """Evictable slots got their first pin: `evict` must not choose them."""
        ...

    def evictable(self, slots: Sequence[int]) -> None:
        """Blocked slots lost their last pin: `evict` may choose them again."""
        ...

    def removed(self, slots: Sequence[int]) -> None:
        """Slots, evictable or blocked, hold no block any more, and not by this policy's choice."""
        ...

    def evict(self, count: int) -> list[int]:
        """Chooses `count` evictable slots, least valuable first, and forgets them. Atomic.

        The caller sees to it that `count <= len(self)`; more is an assertion and changes nothing.
        """
        ...

    def choose(self, keys: Sequence[BlockKey], count: int) -> Choice:
        """Chooses `count` of the evictable slots and of these new blocks, least valuable first. Atomic.

        Args:
            keys: distinct and not held, heads before tails. The blocks not declined are admitted later.
            count: `<= len(self) + len(keys)`.
        """
        ...

    def reset(self) -> None:
        """Forgets every slot, and all that was learnt of their keys."""
        ...


def displace(policy: EvictionPolicy, keys: Sequence[BlockKey], count: int) -> Choice:
    """`choose` for a policy to which new blocks are worth more than all it holds: declines what cannot be had, tails
    first."""
    victims = policy.evict(min(count, len(policy)))
    left = count - len(victims)
    assert left <= len(keys), f"choose {count} of {len(victims)} evictable slots and {len(keys)} new blocks"
    return Choice(victims, frozenset(keys[len(keys) - left :]))
