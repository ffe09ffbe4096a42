"""Field trial B18: a bounded store whose tables, and whose memory, stay bounded however long it runs.

TRIAL_CYCLES=200000 is the trial at its full length, with the process's memory measured.
"""

from __future__ import annotations

import os
import random

import psutil
import pytest

from kvortex.cache.index import BlockIndex, Reservation
from kvortex.cache.losses import LossRecord
from kvortex.cache.policies import make_policy
from kvortex.cache.policies.adaptive import policy as adaptive
from kvortex.cache.usage import SlotUsage
from kvortex.config.settings import EVICTION_POLICIES
from kvortex.keys import BlockKey
from tests.fakes.clock import FakeClock
from tests.fakes.growth import tables

CYCLES = int(os.environ.get("TRIAL_CYCLES", "2000"))
IS_FULL = CYCLES >= 200_000
CAPACITY = 1000 if IS_FULL else 60
SLOT_BYTES = 4096
GHOSTS = 12
"""A table of a policy that remembers blocks which are gone has at most so many times the blocks that are here."""

HIGHEST_SLOPE = 1 << 20
"""Bytes for 100,000 cycles."""


class Store:
    """The index with its policy, records of what was lost, and bytes, as the scheduler and the worker have them."""

    def __init__(self, policy: str) -> None:
        self.clock = FakeClock()
        self.index = BlockIndex(
            CAPACITY, make_policy(policy, CAPACITY, idle_after_s=30.0), usage=SlotUsage(CAPACITY, self.clock)
        )
        self.losses = LossRecord(CAPACITY)
        self.slab = bytearray(CAPACITY * SLOT_BYTES)
        self.rng = random.Random(18)
        self.loads: list[list[int]] = []
        self.stores: list[tuple[int, ...]] = []

    def cycle(self) -> None:
        rng, index = self.rng, self.index
        self.clock.advance(rng.random())
        first = rng.randrange(40 * CAPACITY)
        keys = [self.key(number) for number in range(first, first + rng.randrange(1, 9))]
        index.prompt(keys, 16 * len(keys))
        held = index.match(keys)
        index.touch(held)
        if held:
            index.pin(held)
            self.loads.append(held)
        absent = index.absent(keys)
        answer = index.reserve(absent)
        if isinstance(answer, Reservation):
            self.losses.evicted(answer.evicted)
            for slot in answer.slots:
                self.slab[slot * SLOT_BYTES] = 1
            self.stores.append(answer.slots)
        while len(self.stores) > 3:
            slots = self.stores.pop(rng.randrange(len(self.stores)))
            (index.publish if rng.random() < 0.9 else index.abandon)(slots)
        while len(self.loads) > 3:
            index.unpin(self.loads.pop(rng.randrange(len(self.loads))))
        if rng.random() < 0.01:
            index.discard([rng.randrange(CAPACITY)])
        index.answered(keys, 8)

    @staticmethod
    def key(number: int) -> BlockKey:
        return BlockKey(number.to_bytes(32, "big") + bytes(4))


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_no_table_of_the_store_grows_with_the_number_of_cycles(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # It remembers at least 65,536 blocks and prompts that are gone: here, as many as the cache is large.
    monkeypatch.setattr(adaptive, "_MIN_GHOSTS", 1)
    monkeypatch.setattr(adaptive, "_MIN_BIRTHS", 1)
    store = Store(policy)
    fixed = tables(store)
    sampled: list[tuple[int, int]] = []
    for number in range(CYCLES):
        store.cycle()
        if (number + 1) % (CYCLES // 20) == 0:
            sampled.append((number, psutil.Process().memory_info().rss))
            for path, length in tables(store).items():
                assert length <= max(fixed.get(path, 0), GHOSTS * CAPACITY), (number, path, length)
    store.index.check()
    if IS_FULL:
        (first, low), (last, high) = sampled[2], sampled[-1]
        slope = (high - low) * 100_000 / (last - first)
        print(policy, f"{slope / 1024:.0f} KiB for 100,000 cycles")
        assert slope < HIGHEST_SLOPE, f"{slope:.0f} bytes for 100,000 cycles"


def test_a_table_that_grows_is_seen() -> None:
    """Its control."""
    store = Store("lru")
    store.loads.extend([0] for _ in range(2 * GHOSTS * CAPACITY))
    assert tables(store)["Store.loads"] > GHOSTS * CAPACITY
    assert "Store.index._keys" in tables(store)
