"""The RAM tier's index: which key lies in which slot, and in what state.

    FREE --reserve--> WRITING --publish--> READY --evicted by reserve, discard, reset--> FREE
                         |                   |
                         |                   +-- discard or reset while pinned --> DOOMED --last unpin--> FREE
                         +-- abandon --> FREE
                         +-- discard or reset --> DOOMED --publish or abandon--> FREE

    quarantined while pinned: DOOMED --last unpin--> QUARANTINED, for good

Lives in the scheduler's process, used by one thread at a time. It never sees bytes: the caller has them
copied between `reserve` and `publish` or `abandon`, and between `pin` and `unpin`. Batches of slots are
Python ints. A caller's mistake is asserted before anything changes. Nothing but `reset` and `check` takes
longer the more blocks are held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvortex.cache.key_table import KeyTable
from kvortex.cache.policies.base import EvictionPolicy
from kvortex.cache.slots import Completed, KeyState, RefusalReason, Refused, Reservation, Room, SlotState
from kvortex.cache.usage import SlotUsage
from kvortex.keys import BlockKey

__all__ = ["BlockIndex", "Completed", "KeyState", "RefusalReason", "Refused", "Reservation", "Room", "SlotState"]

# Plain ints: comparing a byte with an IntEnum member is several times slower.
_FREE, _WRITING, _READY, _DOOMED, _QUARANTINED = (int(state) for state in SlotState)

_NO_KEY = BlockKey(b"")


class BlockIndex:
    """Keys, slots and pins of one tier.

    Args:
        num_slots: at least 1.
        policy: made for `num_slots`, and this index's alone.
        namespace: digest of what all keys here belong to.
        usage: made for `num_slots`; told when blocks are stored and asked for.
    """

    def __init__(
        self, num_slots: int, policy: EvictionPolicy, *, namespace: bytes = b"", usage: SlotUsage | None = None
    ) -> None:
        assert num_slots > 0, num_slots
        assert len(policy) == 0, f"a policy with {len(policy)} slots belongs to another index"
        self.num_slots = num_slots
        self.namespace = namespace
        self.usage = usage
        self.evictions = 0
        """Blocks given up for others so far."""
        self._policy = policy
        self._ready = KeyTable()
        self._writing: dict[BlockKey, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._pins: dict[int, int] = {}
        self._doomed_writing: set[int] = set()
        self._doomed_pinned: set[int] = set()
        self._quarantined: set[int] = set()
        self._states = bytearray(num_slots)
        self._keys = [_NO_KEY] * num_slots

    # ---- looking: no side effect

    def state_of(self, key: BlockKey) -> KeyState:
        if key in self._ready:
            return KeyState.READY
        return KeyState.WRITING if key in self._writing else KeyState.ABSENT

    def is_ready(self, key: BlockKey) -> bool:
        return key in self._ready

    def match(self, keys: Iterable[BlockKey]) -> list[int]:
        """The slots of the longest prefix of `keys` that is READY. Pin them before anything else changes."""
        return self._ready.prefix(keys)

    def ready_slots(self, keys: Iterable[BlockKey]) -> dict[int, int]:
        """Index in `keys` -> slot, of every READY key: `match` for groups that can do with holes."""
        return self._ready.found(keys)

    def absent(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Those of `keys` that are neither READY nor WRITING: what is left to store."""
        writing, missing = self._writing, self._ready.missing(keys)
        return [key for key in missing if key not in writing] if writing else missing

    def slot_state(self, slot: int) -> SlotState:
        self._assert_in_range([slot])
        return SlotState(self._states[slot])

    def slot_states(self) -> bytes:
        """A SlotState a slot, at one moment. Any thread; a copy of one byte a slot."""
        return bytes(self._states)

    def key_at(self, slot: int) -> BlockKey | None:
        """The key in a slot, if there is one now. Any thread."""
        return self._keys[slot] or None

    def key_of(self, slot: int) -> BlockKey:
        """The key of a WRITING or READY slot."""
        state = self.slot_state(slot)
        assert state in (SlotState.WRITING, SlotState.READY), f"slot {slot} is {state.name}"
        return self._keys[slot]

    def loose_key(self, slot: int) -> BlockKey | None:
        """The key of a READY slot that has no pin; None for any other slot."""
        return self._keys[slot] if self._states[slot] == _READY and slot not in self._pins else None

    def pins_of(self, slot: int) -> int:
        return self._pins.get(slot, 0)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def writing(self) -> int:
        return len(self._writing)

    @property
    def ready(self) -> int:
        """Slots that a lookup may find, pinned ones included: how full the tier is."""
        return len(self._ready)

    @property
    def doomed(self) -> int:
        return len(self._doomed_writing) + len(self._doomed_pinned)

    @property
    def pinned(self) -> int:
        """Slots with at least one pin, READY or DOOMED: how busy the tier is."""
        return len(self._pins)

    @property
    def quarantined(self) -> int:
        """Slots out of use for good, those included that are pinned yet."""
        return len(self._quarantined)

    @property
    def evictable(self) -> int:
        """READY slots without a pin. `reserve` grants up to `free + evictable` keys."""
        return self.ready - (len(self._pins) - len(self._doomed_pinned))

    # ---- requests: for the policy, which learns from them

    def prompt(self, keys: Sequence[BlockKey], num_tokens: int) -> None:
        """A request was admitted; once each, before its blocks are pinned or stored.

        Args:
            keys: of every complete block of its prompt in one KV group, head first, held here or not. A model of
                several groups makes one call for each.
        """
        self._policy.prompt(keys, num_tokens)

    def answered(self, keys: Sequence[BlockKey], num_output_tokens: int) -> None:
        """A request that `prompt` told of is over; `keys` may go on with the blocks that its answer completed."""
        self._policy.answered(keys, num_output_tokens)

    # ---- loading: pins and recency

    def pin(self, slots: Sequence[int]) -> None:
        """One more pin on each of these READY slots: none of them is given away until it ends."""
        self._assert_ready(slots)
        pins = self._pins
        first = []
        for slot in slots:
            if slot in pins:
                pins[slot] += 1
            else:
                pins[slot] = 1
                first.append(slot)
        self._policy.blocked(first)

    def unpin(self, slots: Sequence[int]) -> None:
        """One pin less on each, which the policy takes as a use; a DOOMED slot is FREE with its last one."""
        pins, doomed = self._pins, self._doomed_pinned
        ending = Counter(slots)
        missing = {slot: (n, pins.get(slot, 0)) for slot, n in ending.items() if pins.get(slot, 0) < n}
        assert not missing, f"more unpins than pins, as slot: (unpins, pins) {missing}"
        evictable: list[int] = []
        freed: list[int] = []
        for slot, n in ending.items():
            left = pins[slot] - n
            if left:
                pins[slot] = left
                continue
            del pins[slot]
            if slot in doomed:
                doomed.remove(slot)
                freed.append(slot)
            else:
                evictable.append(slot)
        self._policy.evictable(evictable)
        self._release(freed)

    def touch(self, slots: Sequence[int]) -> None:
        """Tells the policy that a request asked for these blocks, head first.

        A hint: slots that are not READY are passed over.
        """
        self._assert_in_range(slots)
        states = self._states
        ready = [slot for slot in slots if states[slot] == _READY]
        self._policy.used(ready)
        if self.usage is not None:
            self.usage.used(ready)

    # ---- storing: a reservation and its end

    def reserve(self, keys: Sequence[BlockKey]) -> Reservation | Refused:
        """A slot for each key, all or nothing: free ones, then READY unpinned ones as the policy chooses.

        Args:
            keys: distinct and absent; the caller leaves out the others.
        """
        count = len(keys)
        absent = len(self.absent(keys))
        assert absent == count, f"{count - absent} of the {count} keys to reserve are READY or WRITING"
        distinct = len(set(keys))
        assert distinct == count, f"only {distinct} of the {count} keys to reserve are distinct"
        room = self.free + self.evictable
        if count > room:
            reason = RefusalReason.TOO_LARGE if count > self.num_slots else RefusalReason.IN_USE
            return Refused(reason, count, room)

        evicted = self._evict(count - self.free) if count > self.free else []
        slots = self._free[: -count - 1 : -1]
        del self._free[self.free - count :]
        states, slot_keys = self._states, self._keys
        for slot, key in zip(slots, keys, strict=True):
            states[slot] = _WRITING
            slot_keys[slot] = key
        self._writing.update(zip(keys, slots, strict=True))
        return Reservation(tuple(slots), tuple(evicted))

    def make_room(self, keys: Sequence[BlockKey]) -> Room:
        """Frees slots for those of `keys` that the policy values more than what would go for them.

        A following `reserve` of the answer's keys evicts nothing, and is granted.

        Args:
            keys: distinct and absent, heads before tails.
        """
        lacking = len(keys) - self.free
        if lacking <= 0:
            return Room(tuple(keys), ())
        victims, declined = self._policy.choose(keys, lacking)
        assert len(victims) + len(declined) == lacking, f"{len(victims)} + {len(declined)} chosen, not {lacking}"
        evicted = self._give_up(victims)
        return Room(tuple(key for key in keys if key not in declined), tuple(evicted))

    def give_up(self, slots: Sequence[int]) -> list[BlockKey]:
        """Frees READY slots without a pin that the caller has chosen, and returns the keys that they had: blocks that
        another tier holds too. The policy hears of it as of any removal, not as of a choice of its own."""
        self._assert_ready(slots)
        keys = self._give_up(list(slots))
        self._policy.removed(slots)
        return keys

    def publish(self, slots: Sequence[int]) -> Completed:
        """The bytes in these slots are complete: WRITING ones are READY, DOOMED ones FREE.

        Slots in which no store is in flight are left as they are. That a store's end is told again after its
        slot was reserved anew cannot be seen here: the caller numbers its orders, and tells each end once.
        """
        written, doomed = self._end_stores(slots)
        states = self._states
        for slot in written:
            states[slot] = _READY
        keys = [self._keys[slot] for slot in written]
        self._ready.add(keys, written)
        self._policy.admitted(written, keys)
        if self.usage is not None:
            self.usage.stored(written)
        self._release(doomed)
        return Completed(len(written), len(doomed), len(slots) - len(written) - len(doomed))

    def abandon(self, slots: Sequence[int]) -> Completed:
        """The store into these slots ended without usable bytes, and no copy runs: they are FREE.

        Slots in which no store is in flight are left as they are, as in `publish`.
        """
        written, doomed = self._end_stores(slots)
        self._release(written)
        self._release(doomed)
        freed = len(written) + len(doomed)
        return Completed(0, freed, len(slots) - freed)

    # ---- forgetting

    def discard(self, slots: Sequence[int]) -> int:
        """The keys of these slots are absent at once, whatever moves their bytes.

        WRITING and pinned slots are DOOMED, others FREE. Returns how many slots had a key.
        """
        self._assert_in_range(slots)
        states, keys, pins = self._states, self._keys, self._pins
        written: list[int] = []
        held: list[int] = []
        for slot in slots:
            if states[slot] in (_WRITING, _READY):
                (held if states[slot] == _READY else written).append(slot)
                states[slot] = _DOOMED  # at once, so that a slot named twice counts once
        for slot in written:
            del self._writing[keys[slot]]
        self._doomed_writing.update(written)
        self._ready.remove([keys[slot] for slot in held])
        self._doomed_pinned.update(slot for slot in held if slot in pins)
        for slot in [*written, *held]:
            keys[slot] = _NO_KEY
        self._policy.removed(held)
        self._release([slot for slot in held if slot not in pins])
        return len(written) + len(held)

    def quarantine(self, slots: Sequence[int]) -> list[BlockKey]:
        """The bytes in these pinned slots are not those that were stored: their keys are absent at once, and returned.

        When their last pin ends, the slots stay out of use, also after a reset.
        """
        self._assert_in_range(slots)
        loose = [slot for slot in slots if slot not in self._pins]
        assert not loose, f"{len(loose)} of {len(slots)} slots to quarantine are not pinned: {loose[:8]}"
        keys = [self._keys[slot] for slot in slots if self._states[slot] == _READY]
        self.discard(slots)
        self._quarantined.update(slots)
        return keys

    def reset(self) -> int:
        """Forgets every key at once; WRITING and pinned slots are DOOMED. Returns how many keys it had."""
        forgotten = self.ready + self.writing
        pins = self._pins
        self._free.extend([slot for slot in self._ready.slots() if slot not in pins])
        self._doomed_writing.update(self._writing.values())
        self._doomed_pinned.update(pins)
        self._ready.clear()
        self._writing.clear()
        self._keys = [_NO_KEY] * self.num_slots
        self._states = bytearray(self.num_slots)
        for slot in self._quarantined:
            self._states[slot] = _QUARANTINED
        for slot in self._doomed_writing | self._doomed_pinned:
            self._states[slot] = _DOOMED
        self._policy.reset()
        return forgotten

    # ---- inside

    def _evict(self, count: int) -> list[BlockKey]:
        """Frees `count <= evictable` slots and returns the keys they had."""
        victims = self._policy.evict(count)
        assert len(victims) == count, f"the policy gave up {len(victims)} slots, not {count}"
        return self._give_up(victims)

    def _give_up(self, victims: list[int]) -> list[BlockKey]:
        # A policy that breaks its contract must not cost anybody's bytes.
        self._assert_ready(victims)
        distinct = len(set(victims))
        assert distinct == len(victims), f"the policy gave up {distinct} slots, not {len(victims)}"
        pins = self._pins
        pinned = [slot for slot in victims if slot in pins] if pins else []
        assert not pinned, f"the policy gave up {len(pinned)} pinned slots: {sorted(pinned)[:8]}"
        evicted = [self._keys[slot] for slot in victims]
        self._ready.remove(evicted)
        self._release(victims)
        self.evictions += len(victims)
        return evicted

    def _end_stores(self, slots: Sequence[int]) -> tuple[list[int], list[int]]:
        """Ends the stores in flight in `slots`: where they were still wanted, and where they were doomed."""
        self._assert_in_range(slots)
        states, keys, writing, doomed_writing = self._states, self._keys, self._writing, self._doomed_writing
        written, doomed = [], []
        for slot in slots:
            if states[slot] == _WRITING:
                states[slot] = _FREE  # at once, so that a slot named twice ends once
                del writing[keys[slot]]
                written.append(slot)
            elif slot in doomed_writing:
                doomed_writing.remove(slot)
                doomed.append(slot)
        return written, doomed

    def _release(self, slots: Sequence[int]) -> None:
        states, keys = self._states, self._keys
        for slot in slots:
            states[slot] = _FREE
            keys[slot] = _NO_KEY
        if self._quarantined:
            slots = self._without_quarantined(slots)
        self._free.extend(slots)

    def _without_quarantined(self, slots: Sequence[int]) -> list[int]:
        for slot in self._quarantined.intersection(slots):
            self._states[slot] = _QUARANTINED
        return [slot for slot in slots if slot not in self._quarantined]

    def _assert_in_range(self, slots: Sequence[int]) -> None:
        if slots:
            low, high = min(slots), max(slots)
            assert 0 <= low <= high < self.num_slots, f"slots {low} to {high} of {self.num_slots}"

    def _assert_ready(self, slots: Sequence[int]) -> None:
        self._assert_in_range(slots)
        states = self._states
        wrong = [slot for slot in slots if states[slot] != _READY]
        assert not wrong, f"{len(wrong)} of {len(slots)} slots are not READY: {wrong[:8]}"

    def check(self) -> None:
        """Asserts every invariant of the index. Scans all slots: for tests and soaks."""
        counts = [self._states.count(state) for state in SlotState]
        out_of_use = self._quarantined - self._doomed_pinned
        assert counts == [self.free, self.writing, self.ready, self.doomed, len(out_of_use)], counts
        assert all(self._states[slot] == _QUARANTINED for slot in out_of_use), out_of_use
        assert sum(counts) == self.num_slots, counts
        for state, entries in ((_READY, self._ready.items()), (_WRITING, list(self._writing.items()))):
            wrong = [s for key, s in entries if self._states[s] != state or self._keys[s] != key]
            assert len(entries) == counts[state], (len(entries), counts, state)
            assert not wrong, f"keys and slots disagree at slots {wrong}"
        named = sum(key != _NO_KEY for key in self._keys)
        assert named == self.writing + self.ready, (named, self.writing, self.ready)
        doomed = [*self._doomed_writing, *self._doomed_pinned]
        for state, slots in ((_FREE, self._free), (_DOOMED, doomed)):
            assert len(slots) == len(set(slots)), f"a slot is listed twice in state {state}"
            assert all(self._states[slot] == state for slot in slots), f"a slot is not in state {state}"
        pinned = self._pins.keys()
        assert all(pins > 0 for pins in self._pins.values()), self._pins
        assert all(self._states[s] == _READY or s in self._doomed_pinned for s in pinned), self._pins
        assert pinned >= self._doomed_pinned, self._doomed_pinned - pinned
        assert pinned.isdisjoint(self._doomed_writing), pinned & self._doomed_writing
        assert len(self._policy) == self.evictable, (len(self._policy), self.evictable)
