"""Random operations on a small index, each step compared with a model of plain dicts and lists."""

import hashlib
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvortex.cache.index import BlockIndex, Completed, KeyState, Refused, Reservation, SlotState
from kvortex.cache.policies import make_policy
from kvortex.keys import BlockKey, block_key

NUM_SLOTS = 6
UNIVERSE = [block_key(hashlib.sha256(bytes([i])).digest(), i % 2) for i in range(10)]

KEYS = st.lists(st.sampled_from(UNIVERSE), min_size=1, max_size=NUM_SLOTS + 1, unique=True)
SLOTS = st.lists(st.integers(0, NUM_SLOTS - 1), max_size=NUM_SLOTS)
CHOICE = st.randoms(use_true_random=False)


@dataclass
class Model:
    """What an index should be.

    Attributes:
        keys: of slots WRITING or READY.
        stores: slots that a copy is writing, doomed ones too.
        order: evictable slots, the oldest first.
    """

    states: list[SlotState] = field(default_factory=lambda: [SlotState.FREE] * NUM_SLOTS)
    keys: dict[int, BlockKey] = field(default_factory=dict)
    stores: set[int] = field(default_factory=set)
    pins: list[int] = field(default_factory=lambda: [0] * NUM_SLOTS)
    bad: set[int] = field(default_factory=set)
    order: list[int] = field(default_factory=list)
    evictions: int = 0

    def slot_of(self, key: BlockKey, state: SlotState) -> int | None:
        return next((s for s, k in self.keys.items() if k == key and self.states[s] is state), None)

    def state_of(self, key: BlockKey) -> KeyState:
        if self.slot_of(key, SlotState.READY) is not None:
            return KeyState.READY
        return KeyState.ABSENT if self.slot_of(key, SlotState.WRITING) is None else KeyState.WRITING

    def ready_slots(self, keys: list[BlockKey]) -> dict[int, int]:
        slots = {i: self.slot_of(key, SlotState.READY) for i, key in enumerate(keys)}
        return {i: slot for i, slot in slots.items() if slot is not None}

    def make_newest(self, slots: list[int]) -> None:
        for slot in reversed(slots):
            if slot in self.order:
                self.order.remove(slot)
            self.order.append(slot)

    def doom(self, slot: int) -> None:
        """Takes the key from a slot; frees it unless bytes may still move."""
        del self.keys[slot]
        if slot in self.order:
            self.order.remove(slot)
        busy = slot in self.stores or self.pins[slot] > 0
        self.states[slot] = SlotState.DOOMED if busy else SlotState.FREE

    def count(self, state: SlotState) -> int:
        return self.states.count(state)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(NUM_SLOTS, make_policy("lru", NUM_SLOTS))
        self.model = Model()
        self.loads: list[list[int]] = []

    # ---- stores

    @rule(keys=KEYS)
    def reserve(self, keys: list[BlockKey]) -> None:
        model = self.model
        wanted = [key for key in keys if model.state_of(key) is KeyState.ABSENT]
        assert self.index.absent(keys) == wanted
        free = {slot for slot in range(NUM_SLOTS) if model.states[slot] is SlotState.FREE}
        answer = self.index.reserve(wanted)
        if len(wanted) > len(free) + len(model.order):
            assert isinstance(answer, Refused)
            assert (answer.wanted, answer.available) == (len(wanted), len(free) + len(model.order))
            return  # and nothing changed, as the comparison after this step sees
        assert isinstance(answer, Reservation)
        victims = model.order[: max(0, len(wanted) - len(free))]
        assert list(answer.evicted) == [model.keys[slot] for slot in victims]
        for slot in victims:
            model.doom(slot)
        assert len(set(answer.slots)) == len(wanted)
        assert free.union(victims).issuperset(answer.slots)
        for slot, key in zip(answer.slots, wanted, strict=True):
            model.states[slot] = SlotState.WRITING
            model.keys[slot] = key
        model.stores.update(answer.slots)
        model.evictions += len(victims)

    @rule(keys=KEYS)
    def store_at_once(self, keys: list[BlockKey]) -> None:
        self.reserve(keys)
        self.end_stores(sorted(self.model.stores), good=True, twice=False)

    @precondition(lambda self: self.model.stores)
    @rule(choice=CHOICE, good=st.booleans(), twice=st.booleans())
    def store_ends(self, choice: random.Random, good: bool, twice: bool) -> None:
        stores = sorted(self.model.stores)
        self.end_stores(choice.sample(stores, choice.randint(1, len(stores))), good, twice)

    def end_stores(self, slots: list[int], good: bool, twice: bool) -> None:
        model = self.model
        wanted = [slot for slot in slots if model.states[slot] is SlotState.WRITING]
        model.stores.difference_update(slots)
        if good:
            for slot in wanted:
                model.states[slot] = SlotState.READY
            model.make_newest(wanted)
        else:
            for slot in wanted:
                model.doom(slot)
        for slot in slots:
            if model.states[slot] is SlotState.DOOMED:
                model.states[slot] = SlotState.FREE
        tell = self.index.publish if good else self.index.abandon
        published = len(wanted) if good else 0
        repeats = slots if twice else []
        assert tell([*slots, *repeats]) == Completed(published, len(slots) - published, len(repeats))

    @rule(slots=SLOTS, good=st.booleans())
    def late_answer(self, slots: list[int], good: bool) -> None:
        ended = [slot for slot in slots if slot not in self.model.stores]
        tell = self.index.publish if good else self.index.abandon
        assert tell(ended) == Completed(0, 0, len(ended))

    # ---- loads

    @precondition(lambda self: SlotState.READY in self.model.states)
    @rule(choice=CHOICE)
    def load_begins(self, choice: random.Random) -> None:
        ready = [slot for slot in range(NUM_SLOTS) if self.model.states[slot] is SlotState.READY]
        slots = choice.sample(ready, choice.randint(1, len(ready)))
        self.index.pin(slots)
        self.loads.append(slots)
        for slot in slots:
            self.model.pins[slot] += 1
            if slot in self.model.order:
                self.model.order.remove(slot)

    @precondition(lambda self: self.loads)
    @rule(choice=CHOICE)
    def load_ends(self, choice: random.Random) -> None:
        model = self.model
        slots = self.loads.pop(choice.randrange(len(self.loads)))
        self.index.unpin(slots)
        for slot in slots:
            model.pins[slot] -= 1
        last = [slot for slot in slots if model.pins[slot] == 0]
        model.make_newest([slot for slot in last if model.states[slot] is SlotState.READY])
        for slot in last:
            if model.states[slot] is SlotState.DOOMED:
                model.states[slot] = SlotState.QUARANTINED if slot in model.bad else SlotState.FREE

    @rule(slots=SLOTS)
    def touch(self, slots: list[int]) -> None:
        self.index.touch(slots)
        self.model.make_newest([slot for slot in slots if slot in self.model.order])

    @rule(slots=SLOTS)
    def pins_that_must_not_be(self, slots: list[int]) -> None:
        if any(self.model.states[slot] is not SlotState.READY for slot in slots):
            with pytest.raises(AssertionError):
                self.index.pin(slots)
        if any(self.model.pins[slot] < slots.count(slot) for slot in slots):
            with pytest.raises(AssertionError):
                self.index.unpin(slots)

    # ---- forgetting

    @rule(slots=st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, max_size=3))
    def discard(self, slots: list[int]) -> None:
        keyed = [slot for slot in dict.fromkeys(slots) if slot in self.model.keys]
        assert self.index.discard(slots) == len(keyed)
        for slot in keyed:
            self.model.doom(slot)

    @precondition(lambda self: self.loads and len(self.model.bad) < 2)
    @rule(choice=CHOICE)
    def quarantine(self, choice: random.Random) -> None:
        slots = choice.choice(self.loads)[:1]
        keyed = [slot for slot in slots if slot in self.model.keys]
        assert self.index.quarantine(slots) == [self.model.keys[slot] for slot in keyed]
        self.model.bad.update(slots)
        for slot in keyed:
            self.model.doom(slot)

    @rule(slot=st.integers(0, NUM_SLOTS - 1))
    def quarantine_what_no_load_reads(self, slot: int) -> None:
        if self.model.pins[slot] == 0:
            with pytest.raises(AssertionError):
                self.index.quarantine([slot])

    @precondition(lambda self: SlotState.FREE not in self.model.states)
    @rule()
    def reset(self) -> None:
        assert self.index.reset() == len(self.model.keys)
        for slot in list(self.model.keys):
            self.model.doom(slot)

    # ---- after each step

    @invariant()
    def the_index_agrees_with_itself(self) -> None:
        self.index.check()

    @invariant()
    def every_slot_is_as_in_the_model(self) -> None:
        index, model = self.index, self.model
        assert [index.slot_state(slot) for slot in range(NUM_SLOTS)] == model.states
        assert [index.pins_of(slot) for slot in range(NUM_SLOTS)] == model.pins
        assert {slot: index.key_of(slot) for slot in model.keys} == model.keys
        assert index.quarantined == len(model.bad)
        out_of_use = index.quarantined - sum(model.states[slot] is SlotState.DOOMED for slot in model.bad)
        counts = [index.free, index.writing, index.ready, index.doomed, out_of_use]
        assert counts == [model.count(state) for state in SlotState]
        assert sum(counts) == NUM_SLOTS
        assert index.pinned == sum(pins > 0 for pins in model.pins)
        assert index.evictable == len(model.order)
        assert index.evictions == model.evictions

    @invariant()
    def every_lookup_is_as_in_the_model(self) -> None:
        index, model = self.index, self.model
        assert [index.state_of(key) for key in UNIVERSE] == [model.state_of(key) for key in UNIVERSE]
        ready = model.ready_slots(UNIVERSE)
        assert index.ready_slots(UNIVERSE) == ready
        prefix = next((i for i in range(len(UNIVERSE)) if i not in ready), len(UNIVERSE))
        assert index.match(UNIVERSE) == [ready[i] for i in range(prefix)]


IndexMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase
