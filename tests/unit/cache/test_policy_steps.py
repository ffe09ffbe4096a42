"""Random steps through the index with each policy, compared with a model of plain dicts and lists.

Short here; a million steps a policy take some minutes:

    KVORTEX_RANDOM_STEPS=1000000 pytest tests/unit/cache/test_policy_steps.py
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvortex.cache.index import BlockIndex, Completed, KeyState, Refused, Reservation
from kvortex.cache.policies import EVICTION_POLICIES, Adaptive, make_policy
from kvortex.cache.policies.adaptive import policy as policy_module
from kvortex.keys import BlockKey, block_key
from tests.fakes.clock import FakeClock

STEPS = int(os.environ.get("KVORTEX_RANDOM_STEPS", "10000"))
STEPS_AN_EXAMPLE = 500
CHECK_EVERY = 20


class World:
    """An index, what it should be, and requests that share prefixes.

    `order` is LRU's: evictable slots, the oldest first.
    """

    def __init__(self, name: str, num_slots: int, num_chains: int, seed: int) -> None:
        self.dice = random.Random(seed)
        self.clock = FakeClock()
        self.policy = make_policy(name, num_slots, clock=self.clock)
        self.index = BlockIndex(num_slots, self.policy)
        self.is_lru = name == "lru"
        self.chains = [self._chain(number) for number in range(num_chains)]
        self.ready: dict[BlockKey, int] = {}
        self.writing: dict[BlockKey, int] = {}
        self.doomed: set[int] = set()
        self.stores: list[list[tuple[BlockKey, int]]] = []
        self.loads: list[list[int]] = []
        self.pins: Counter[int] = Counter()
        self.order: list[int] = []
        self.asked: list[BlockKey] = []

    def _chain(self, number: int) -> list[BlockKey]:
        """Every third prompt goes on from the first blocks of the one before."""
        shared = self.dice.randint(1, 6) if number % 3 else 0
        start = number - 1 if shared else number
        blocks = [100 * start + i for i in range(shared)] + [100 * number + i for i in range(shared, 14)]
        return [block_key(block.to_bytes(32, "little"), 0) for block in blocks]

    # ---- steps

    def ask(self) -> None:
        self.clock.advance(self.dice.choice([0.0, 1.0, 20.0, 4000.0]))
        chain = self.dice.choice(self.chains)
        self.asked = chain[: self.dice.randint(1, len(chain))]
        self.index.prompt(self.asked, 16 * len(self.asked))

    def answer(self) -> None:
        self.index.answered(self.asked, self.dice.randint(0, 300))

    def load(self) -> None:
        prefix = next((i for i, key in enumerate(self.asked) if key not in self.ready), len(self.asked))
        slots = self.index.match(self.asked)
        assert slots == [self.ready[key] for key in self.asked[:prefix]]
        self.index.pin(slots)
        self.loads.append(slots)
        self.pins.update(slots)
        self.order = [slot for slot in self.order if slot not in slots]

    def load_ends(self) -> None:
        if not self.loads:
            return
        slots = self.loads.pop(self.dice.randrange(len(self.loads)))
        self.index.unpin(slots)
        self.pins.subtract(slots)
        last = [slot for slot in slots if not self.pins[slot]]
        self.pins = +self.pins
        self._newest([slot for slot in last if slot not in self.doomed])
        self.doomed.difference_update(last)

    def store(self) -> None:
        """As the planner does: room first."""
        keys = self._absent()
        lacking = max(0, len(keys) - self.index.free)
        room = self.index.make_room(keys)
        declined = [key for key in keys if key not in room.keys]
        assert list(room.keys) == [key for key in keys if key not in declined]
        assert len(room.evicted) + len(declined) == lacking
        if self.is_lru:
            assert declined == keys[len(keys) - len(declined) :]
            assert len(declined) == max(0, lacking - len(self.order))
        self._evicted(room.evicted)
        reservation = self.index.reserve(room.keys)
        assert isinstance(reservation, Reservation)
        assert reservation.evicted == ()
        self._started(room.keys, reservation)

    def reserve(self) -> None:
        keys = self._absent()
        room = self.index.free + len(self._evictable())
        answer = self.index.reserve(keys)
        if len(keys) > room:
            assert isinstance(answer, Refused)
            assert answer.available == room
            return
        assert isinstance(answer, Reservation)
        self._evicted(answer.evicted)
        self._started(keys, answer)

    def store_ends(self) -> None:
        if not self.stores:
            return
        pairs = self.stores.pop(self.dice.randrange(len(self.stores)))
        slots = [slot for _, slot in pairs]
        wanted = [(key, slot) for key, slot in pairs if self.writing.get(key) == slot]
        doomed = len(pairs) - len(wanted)
        for key, _ in wanted:
            del self.writing[key]
        self.doomed.difference_update(slots)
        if self.dice.random() < 0.9:
            assert self.index.publish(slots) == Completed(len(wanted), doomed, 0)
            self.ready.update(wanted)
            self._newest([slot for _, slot in wanted])
        else:
            assert self.index.abandon(slots) == Completed(0, len(pairs), 0)

    def touch(self) -> None:
        slots = [self.ready[key] for key in self.asked if key in self.ready]
        self.index.touch(slots)
        self._newest([slot for slot in slots if slot in self.order])

    def discard(self) -> None:
        held = {**self.ready, **self.writing}
        some = self.dice.sample(sorted(held), min(2, len(held)))
        assert self.index.discard([held[key] for key in some]) == len(some)
        for key in some:
            self._lose(key)

    def reset(self) -> None:
        if self.dice.random() < 0.02:
            assert self.index.reset() == len(self.ready) + len(self.writing)
            for key in [*self.ready, *self.writing]:
                self._lose(key)

    # ---- the model

    def _absent(self) -> list[BlockKey]:
        keys = [key for key in self.asked if key not in self.ready and key not in self.writing]
        return keys[self.dice.randint(0, 2) :]

    def _evictable(self) -> set[int]:
        return {slot for slot in self.ready.values() if not self.pins[slot]}

    def _evicted(self, keys: Sequence[BlockKey]) -> None:
        slots = [self.ready.pop(key) for key in keys]
        assert not [slot for slot in slots if self.pins[slot]]
        if self.is_lru:
            assert slots == self.order[: len(slots)]
        self.order = [slot for slot in self.order if slot not in slots]

    def _started(self, keys: Sequence[BlockKey], reservation: Reservation) -> None:
        pairs = list(zip(keys, reservation.slots, strict=True))
        used = {*self.ready.values(), *self.writing.values(), *self.doomed}
        assert len(used.union(reservation.slots)) == len(used) + len(pairs)
        self.writing.update(pairs)
        self.stores.append(pairs)

    def _newest(self, slots: Sequence[int]) -> None:
        self.order = [slot for slot in self.order if slot not in slots] + list(reversed(slots))

    def _lose(self, key: BlockKey) -> None:
        if key in self.writing:
            self.doomed.add(self.writing.pop(key))
            return
        slot = self.ready.pop(key)
        if self.pins[slot]:
            self.doomed.add(slot)
        self.order = [other for other in self.order if other != slot]

    def compare(self) -> None:
        index = self.index
        assert (index.ready, index.writing, index.doomed) == (len(self.ready), len(self.writing), len(self.doomed))
        assert index.evictable == len(self._evictable()) == len(self.policy)
        assert index.pinned == len(self.pins)

    def compare_all(self) -> None:
        for key in {key for chain in self.chains for key in chain}:
            expected = KeyState.READY if key in self.ready else KeyState.ABSENT
            assert self.index.state_of(key) is (KeyState.WRITING if key in self.writing else expected)
        assert {slot: self.index.key_of(slot) for slot in self.ready.values()} == {s: k for k, s in self.ready.items()}
        self.index.check()
        if isinstance(self.policy, Adaptive):
            self.policy.check()


@pytest.mark.timeout(max(300, STEPS // 100))
@pytest.mark.parametrize("name", EVICTION_POLICIES)
@settings(deadline=None, max_examples=-(-STEPS // STEPS_AN_EXAMPLE), suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), num_slots=st.integers(1, 60), num_chains=st.integers(1, 12), forgets=st.booleans())
def test_every_step_is_as_in_the_model(name: str, seed: int, num_slots: int, num_chains: int, forgets: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if forgets:
            patch.setattr(policy_module, "_MIN_GHOSTS", 4)
            patch.setattr(policy_module, "_MIN_BIRTHS", 16)
        world = World(name, num_slots, num_chains, seed)
    steps = [world.ask, world.answer, world.load, world.load_ends, world.store, world.store_ends]
    rare = [world.reserve, world.touch, world.discard, world.reset]
    for number in range(STEPS_AN_EXAMPLE):
        world.dice.choice(rare if world.dice.random() < 0.15 else steps)()
        world.compare()
        if number % CHECK_EVERY == 0:
            world.compare_all()
    world.compare_all()
