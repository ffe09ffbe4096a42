"""Key to slot, for millions of keys, without a pause."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from kvortex.keys import BlockKey

_NUM_SHARDS = 256


class KeyTable:
    """A map in 256 dicts, by the first byte of the key.

    One dict of a million keys is rebuilt now and then, and the step that meets this stands still for 50 ms;
    rebuilding a small one takes a fraction of a millisecond. Works in batches: a call a key would cost more
    than finding it.
    """

    def __init__(self) -> None:
        self._shards: list[dict[BlockKey, int]] = [{} for _ in range(_NUM_SHARDS)]
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._shards[key[0]]

    def get(self, key: BlockKey) -> int | None:
        """The slot of one key; None if it is not here."""
        return self._shards[key[0]].get(key)

    def prefix(self, keys: Iterable[BlockKey]) -> list[int]:
        """The slots of `keys` up to the first one that is not here."""
        shards = self._shards
        slots: list[int] = []
        for key in keys:
            slot = shards[key[0]].get(key)
            if slot is None:
                break
            slots.append(slot)
        return slots

    def found(self, keys: Iterable[BlockKey]) -> dict[int, int]:
        """Index in `keys` -> slot, of those that are here."""
        shards = self._shards
        return {i: slot for i, key in enumerate(keys) if (slot := shards[key[0]].get(key)) is not None}

    def missing(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Those of `keys` that are not here."""
        shards = self._shards
        return [key for key in keys if key not in shards[key[0]]]

    def add(self, keys: Sequence[BlockKey], slots: Sequence[int]) -> None:
        """Adds keys that are not here."""
        shards = self._shards
        for key, slot in zip(keys, slots, strict=True):
            shards[key[0]][key] = slot
        self._size += len(keys)

    def move(self, keys: Sequence[BlockKey], slots: Sequence[int]) -> None:
        """Gives keys that are here other slots; the key objects held stay the same."""
        shards = self._shards
        for key, slot in zip(keys, slots, strict=True):
            shards[key[0]][key] = slot

    def replace(self, keys: Sequence[BlockKey], slots: Sequence[int]) -> list[int | None]:
        """Files keys that are here anew, under these very key objects. Returns the slot that each had; None for a key
        that is not here, which is left out."""
        shards = self._shards
        before = [shards[key[0]].pop(key, None) for key in keys]
        self._size -= len(keys) - before.count(None)
        if None in before:
            here = [i for i, had in enumerate(before) if had is not None]
            keys, slots = [keys[i] for i in here], [slots[i] for i in here]
        self.add(keys, slots)
        return before

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Removes keys that are here."""
        shards = self._shards
        for key in keys:
            del shards[key[0]][key]
        self._size -= len(keys)

    def slots(self) -> Iterator[int]:
        """Every slot."""
        return chain.from_iterable(shard.values() for shard in self._shards)

    def items(self) -> list[tuple[BlockKey, int]]:
        """Every key and its slot, copied."""
        return [item for shard in self._shards for item in shard.items()]

    def clear(self) -> None:
        for shard in self._shards:
            shard.clear()
        self._size = 0
