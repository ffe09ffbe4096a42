"""What lies in the tiers, told without a lock."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict

import pytest

from kvortex.cache import holdings
from kvortex.cache.holdings import BlockOrder, ram_holdings, vram_holdings
from kvortex.cache.index import BlockIndex
from kvortex.cache.policies import make_policy
from kvortex.cache.residency import Residency
from kvortex.cache.usage import SlotUsage
from kvortex.keys import BlockKey, block_key
from tests.fakes.clock import FakeClock


def key(number: int) -> BlockKey:
    return block_key(number.to_bytes(32, "little"), 0)


class Ram:
    """An index with its usage, on a clock of its own."""

    def __init__(self, num_slots: int) -> None:
        self.clock = FakeClock()
        self.index = BlockIndex(num_slots, make_policy("lru", num_slots), usage=SlotUsage(num_slots, self.clock))

    def store(self, *numbers: int) -> list[int]:
        slots = self.index.reserve([key(n) for n in numbers]).slots
        self.index.publish(slots)
        return list(slots)

    def holdings(self, top: int = 10, by: BlockOrder = BlockOrder.IDLE):
        return ram_holdings(self.index, top, by, 4096)

    def first(self, by: BlockOrder, top: int = 10) -> list[str]:
        return [block["key"] for block in self.holdings(top, by)["first"]]


def shown(*numbers: int) -> list[str]:
    return [key(n)[:8].hex() for n in numbers]


def three_blocks() -> Ram:
    """Block 1, stored first and just asked for twice; 2, asked for once, long ago; 3, stored last, never asked for."""
    ram = Ram(8)
    (one,) = ram.store(1)
    ram.clock.advance(100)
    (two,) = ram.store(2)
    ram.index.touch([two])
    ram.clock.advance(500)
    ram.store(3)
    ram.clock.advance(10)
    ram.index.touch([one])
    ram.index.touch([one])
    return ram


@pytest.mark.parametrize(
    ("by", "order"),
    [(BlockOrder.IDLE, (2, 3, 1)), (BlockOrder.AGE, (1, 2, 3)), (BlockOrder.USES, (1, 2, 3))],
)
def test_blocks_are_listed_in_the_order_asked_for(by, order):
    assert three_blocks().first(by) == shown(*order)
    assert three_blocks().first(by, top=1) == shown(order[0])


def test_a_listed_block_tells_its_age_its_uses_and_its_pins():
    ram = three_blocks()
    slot = ram.index.match([key(1)])[0]
    ram.index.pin([slot])
    block = ram.holdings(by=BlockOrder.AGE)["first"][0]
    assert block == {
        **{"key": shown(1)[0], "group": 0, "slot": slot},
        **{"age_s": 610.0, "idle_s": 0.0, "uses": 2, "pins": 1},
    }


def test_all_published_blocks_are_counted_by_idle_time_and_by_uses():
    ram = three_blocks()
    ram.index.reserve([key(9)])  # not published: no block yet
    told = ram.holdings()
    assert told["blocks"] == 3
    assert told["examined_slots"] == told["capacity_blocks"] == 8
    assert {entry["under_s"]: entry["blocks"] for entry in told["by_idle"] if entry["blocks"]} == {60: 2, 600: 1}
    assert {entry["from_uses"]: entry["blocks"] for entry in told["by_uses"]} == {0: 1, 1: 1, 2: 1, 4: 0, 8: 0}


def test_a_slot_given_to_another_block_starts_anew():
    ram = Ram(1)
    (slot,) = ram.store(1)
    ram.index.touch([slot])
    ram.clock.advance(1000)
    ram.store(2)
    (block,) = ram.holdings()["first"]
    assert (block["key"], block["age_s"], block["uses"]) == (shown(2)[0], 0.0, 0)


def test_chunks_give_what_one_look_gives(monkeypatch):
    ram = Ram(300)
    rng = random.Random(1)
    for number in range(250):
        ram.store(number)
        ram.clock.advance(rng.random() * 60)
        for _ in range(rng.randrange(4)):
            ram.index.touch(ram.index.match([key(rng.randrange(number + 1))]))
    whole = {by: ram.holdings(20, by) for by in BlockOrder}
    monkeypatch.setattr(holdings, "_CHUNK", 7)
    for by in BlockOrder:
        told = ram.holdings(20, by)
        assert {**told, "first": None} == {**whole[by], "first": None}
        field = {BlockOrder.IDLE: "idle_s", BlockOrder.AGE: "age_s", BlockOrder.USES: "uses"}[by]
        assert [b[field] for b in told["first"]] == [b[field] for b in whole[by]["first"]]
    assert sum(entry["blocks"] for entry in whole[BlockOrder.IDLE]["by_idle"]) == 250


def test_an_empty_cache_holds_nothing():
    told = Ram(4).holdings()
    assert (told["blocks"], told["first"]) == (0, [])


def test_a_block_given_up_while_it_is_looked_at_is_not_listed(monkeypatch):
    ram = three_blocks()
    as_it_was = ram.index.slot_states()
    ram.index.reset()
    monkeypatch.setattr(ram.index, "slot_states", lambda: as_it_was)
    assert ram.holdings()["first"] == []


def test_vram_tells_the_head_of_its_queue():
    clock = FakeClock()
    residency = Residency(clock)
    for block_id in (5, 6, 7):
        residency.block_cached(block_id, key(block_id), in_ram=block_id == 6)
        clock.advance(10)
    told = vram_holdings(residency, lambda block_id: block_id == 7, 1, 4096)
    assert (told["resident_blocks"], told["clean_blocks"], told["waiting_blocks"]) == (2, 1, 2)
    assert told["first_waiting"] == [{"key": shown(5)[0], "group": 0, "block_id": 5, "idle_s": 30.0, "in_use": False}]


class Restless(OrderedDict[int, float]):
    """A queue that changes while it is looked at, so many times."""

    changes = 3

    def items(self):
        self.changes -= 1
        for item in super().items():
            if self.changes >= 0:
                self[1000 + self.changes] = 0.0
            yield item


def test_a_queue_that_changes_while_it_is_looked_at_is_looked_at_again(monkeypatch):
    residency = Residency(FakeClock())
    for block_id in range(4):
        residency.block_cached(block_id, key(block_id), in_ram=False)
    monkeypatch.setattr(residency, "_queue", Restless(residency._queue))
    assert [candidate.block_id for candidate, _ in residency.longest_unused(4)] == [0, 1, 2, 3]


def test_a_reader_beside_the_writer_sees_blocks_or_none_and_never_fails():
    ram = Ram(64)
    stop = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                told = ram.holdings(64)
                assert told["blocks"] <= 64
                assert all(len(block["key"]) == 16 for block in told["first"])
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(3000):
        ram.store(number)
        if number % 500 == 0:
            ram.index.reset()
    stop.set()
    reader.join()
    assert not failures, failures
