"""What the block index says of keys, slots and reservations."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

from kvortex.keys import BlockKey


class KeyState(Enum):
    """What a lookup may make of a key. WRITING: do not store it again, do not load it yet."""

    ABSENT = "absent"
    WRITING = "writing"
    READY = "ready"


class SlotState(IntEnum):
    """FREE: to be had. WRITING: a store is in flight. READY: visible.

    DOOMED: its key is gone, but a copy into it or out of it may still run.
    QUARANTINED: its bytes were found changed, and nothing is ever stored in it again.
    """

    FREE = 0
    WRITING = 1
    READY = 2
    DOOMED = 3
    QUARANTINED = 4


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slots for a store, WRITING until they are published or abandoned.

    Attributes:
        slots: `slots[i]` is for `keys[i]` of the call.
        evicted: keys that were given up for it; gone already.
    """

    slots: tuple[int, ...]
    evicted: tuple[BlockKey, ...]


class Room(NamedTuple):
    """Free slots made for a store.

    Attributes:
        keys: those that are worth storing, in the order given; the others had better be left.
        evicted: keys that were given up for them; gone already.
    """

    keys: tuple[BlockKey, ...]
    evicted: tuple[BlockKey, ...]


class RefusalReason(Enum):
    """TOO_LARGE: more than the index ever holds. IN_USE: too many slots are pinned, written or doomed now."""

    TOO_LARGE = "too_large"
    IN_USE = "in_use"


@dataclass(frozen=True, slots=True)
class Refused:
    """A reservation that was not made; nothing changed.

    Attributes:
        wanted: slots asked for.
        available: slots that were free or evictable.
    """

    reason: RefusalReason
    wanted: int
    available: int


class Completed(NamedTuple):
    """What the end of a store did to the slots named, by number.

    Attributes:
        published: READY from now on.
        freed: FREE from now on.
        ignored: no store was in flight there, so its end was told before.
    """

    published: int
    freed: int
    ignored: int
