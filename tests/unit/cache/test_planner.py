"""When storing begins, how much a step stores, when it ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvortex.cache.index import BlockIndex, Reservation
from kvortex.cache.planner import RECOVERY_S, OffloadPlanner, StoreDecision, Watermarks
from kvortex.cache.policies import LRU, Choice, EvictionPolicy
from kvortex.cache.residency import Residency
from kvortex.keys import BlockKey
from tests.fakes.clock import FakeClock

CAPACITY = 100


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big") + bytes(4))


class Vram:
    """What the planner asks of vLLM's pool: blocks that requests hold, and the others in the order they are taken."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.order: list[int] = []

    def in_use(self, block_id: int) -> bool:
        return block_id in self.held

    def next_taken(self) -> list[int]:
        return self.order

    @property
    def free_blocks(self) -> int:
        return len(self.order)

    @property
    def in_use_blocks(self) -> int:
        return len(self.held)


class World:
    """A planner over a VRAM of 100 blocks and a RAM of `slots`."""

    def __init__(self, slots: int = 1000, policy: EvictionPolicy | None = None, **marks: float) -> None:
        settings = {"threshold": 0.85, "target": 0.75, "batch_blocks": 4, "idle_after_s": 30.0, **marks}
        self.residency = Residency(lambda: 0.0)
        self.index = BlockIndex(slots, LRU(slots) if policy is None else policy)
        self.clock = FakeClock()
        self.planner = OffloadPlanner(Watermarks(**settings), CAPACITY, self.residency, self.index, self.clock)
        self.vram = Vram()

    def fill(self, *blocks: int) -> None:
        for block_id in blocks:
            self.residency.block_cached(block_id, key(block_id), in_ram=False)

    def step(self) -> list[int]:
        decision = self.planner.plan(self.vram)
        self.last = decision
        return sorted(c.block_id for c in decision.candidates)

    def complete(self, decision: StoreDecision) -> None:
        assert decision.reservation is not None
        self.index.publish(decision.reservation.slots)
        for candidate in decision.candidates:
            self.residency.copied(candidate.key)
        self.planner.ended(len(decision.candidates))


def test_nothing_is_stored_up_to_the_threshold():
    world = World()
    world.fill(*range(85))
    assert world.step() == []


def test_past_the_threshold_batches_are_stored_down_to_the_target():
    world = World()
    world.fill(*range(85))
    world.step()
    world.fill(85)
    stored = [world.step() for _ in range(5)]
    assert [len(blocks) for blocks in stored] == [5, 4, 2, 0, 0], "the block that arrived, and a batch of 4"
    assert sorted(b for blocks in stored for b in blocks) == list(range(11)), "the longest unused ones"


def test_a_step_stores_a_batch_and_as_much_as_arrived_in_it():
    """A prefill of more blocks than a batch must not outrun the copies."""
    world = World(threshold=0.5, target=0.5, batch_blocks=2)
    world.fill(*range(50))
    assert world.step() == []
    world.fill(*range(50, 70))
    assert len(world.step()) == 20


def test_what_arrived_below_the_threshold_is_stored_batch_by_batch():
    world = World(target=0.5, batch_blocks=2)
    world.fill(*range(85))
    assert world.step() == []
    world.fill(85)
    assert [len(world.step()) for _ in range(3)] == [3, 2, 2]


def test_after_the_target_storing_waits_for_the_threshold_again():
    world = World(batch_blocks=50)
    world.fill(*range(86))
    world.step()
    world.complete(world.last)
    assert world.residency.resident_blocks == 75
    world.fill(*range(200, 205))
    assert world.step() == []


def test_a_threshold_of_zero_is_write_through():
    world = World(threshold=0.0, target=0.0)
    world.fill(3)
    assert world.step() == [3]


def test_running_requests_blocks_are_stored_when_cold_ones_are_not_enough():
    world = World(batch_blocks=50)
    world.fill(*range(90))
    world.vram.held = set(range(80, 90))
    world.residency.take(75, in_use=world.vram.in_use, idle_after_s=0)
    assert set(world.step()) == {*range(75, 80), *range(80, 90)}


def test_there_is_room_for_as_many_as_run_to_be_replaced_at_once():
    world = World(batch_blocks=50)
    world.fill(*range(40))
    world.vram.held = set(range(40))
    assert world.step() == [], "60 may be taken at once, and 40 run"
    world.fill(*range(40, 60))
    world.vram.held = set(range(60))
    assert len(world.step()) == 30, "40 are free, 60 run: down to 40, less the tenth between the marks"


def test_that_room_is_kept_for_a_while_after_they_ended():
    world = World(batch_blocks=50)
    world.vram.held = set(range(60))
    world.step()
    world.vram.held.clear()
    world.fill(*range(41))
    assert len(world.step()) == 11
    world.complete(world.last)
    world.clock.advance(RECOVERY_S / 2)
    world.fill(*range(41, 90))
    assert world.step() == [], "79 of 85 resident: half of the capacity is regained"


def test_one_copy_serves_two_blocks_of_one_content():
    world = World(threshold=0.0, target=0.0)
    world.residency.block_cached(1, key(7), in_ram=False)
    world.residency.block_cached(2, key(7), in_ram=False)
    assert len(world.step()) == 1
    world.complete(world.last)
    assert world.residency.clean_blocks == 2
    assert world.step() == []


def test_a_full_ram_gives_up_its_oldest_blocks_heads_last():
    world = World(slots=3, threshold=0.0, target=0.0)
    for block in (1, 2, 3, 4):
        world.fill(block)
        world.step()
        world.complete(world.last)
    assert world.last.evicted == (key(1),)


def test_a_ram_of_pinned_blocks_refuses_without_changing_anything_and_says_how_many():
    world = World(slots=2, threshold=0.0, target=0.0)
    world.fill(1, 2)
    world.step()
    world.complete(world.last)
    world.index.pin(world.index.match([key(1)]) + world.index.match([key(2)]))
    world.fill(3, 4, 5)
    assert world.step() == []
    assert (world.last.refused, world.last.not_worth) == (3, 0)
    assert world.step() == []
    assert world.last.refused == 0, "counted once"
    world.index.check()


def test_the_tail_is_refused_where_pins_leave_less_room_than_is_asked_for():
    world = World(slots=2, threshold=0.0, target=0.0)
    world.fill(1, 2)
    world.step()
    world.complete(world.last)
    world.index.pin(world.index.match([key(1)]))
    world.fill(3, 4, 5)
    world.vram.held = {3, 4, 5}
    assert world.step() == [3]
    assert (world.last.evicted, world.last.refused, world.last.not_worth) == ((key(2),), 2, 0)
    assert world.residency.given_up_blocks == 1, "the copy of 2; blocks that found no slot are missed"


class Picky(LRU):
    """Declines blocks of an even number while it can."""

    def choose(self, keys: Sequence[BlockKey], count: int) -> Choice:
        even = [k for k in keys if k[31] % 2 == 0][:count]
        return Choice(self.evict(count - len(even)), frozenset(even))


def full_world(**marks: float) -> World:
    """RAM is full of blocks that VRAM has no more."""
    world = World(slots=6, policy=Picky(6), batch_blocks=10, **marks)
    reservation = world.index.reserve([key(block) for block in range(200, 206)])
    assert isinstance(reservation, Reservation)
    world.index.publish(reservation.slots)
    return world


def test_blocks_that_are_worth_less_than_all_held_are_counted_and_not_asked_again_before_their_next_use():
    world = full_world(threshold=0.0, target=0.0)
    world.fill(1, 2, 3, 4)
    assert world.step() == [1, 3]
    assert (world.last.refused, world.last.not_worth, len(world.last.evicted)) == (0, 2, 2)
    assert world.index.free == 0
    world.complete(world.last)
    assert [world.step(), world.last.not_worth] == [[], 0]
    world.residency.used([4])
    assert [world.step(), world.last.not_worth] == [[], 1]
    world.residency.check()
    world.index.check()


def test_a_step_in_which_nothing_is_worth_a_slot_stores_nothing_and_gives_nothing_up():
    world = full_world(threshold=0.0, target=0.0)
    world.fill(2, 4)
    assert world.step() == []
    assert (world.last.reservation, world.last.evicted, world.last.not_worth) == (None, (), 2)
    assert world.index.ready == 6


def test_blocks_that_were_declined_are_not_due():
    """Else marks would never be met again, and whatever comes would be copied at once."""
    world = full_world(threshold=0.5, target=0.5, ahead_blocks=1)
    world.fill(*range(0, 102, 2))
    world.vram.order = list(range(0, 102, 2))
    assert [world.step(), world.last.not_worth] == [[], 1]
    assert world.residency.resident_blocks == 51
    assert [world.step(), world.last.not_worth] == [[], 0]
    assert world.residency.queued_blocks == 50


def test_a_ram_smaller_than_vram_does_not_copy_the_same_blocks_for_ever():
    world = World(slots=5, threshold=0.0, target=0.0, batch_blocks=10)
    world.fill(*range(20))
    copies = 0
    for _ in range(50):
        blocks = world.step()
        copies += len(blocks)
        if world.last.reservation is not None:
            world.complete(world.last)
    assert copies <= 20
    world.residency.check()
    world.index.check()


def test_blocks_in_flight_count_as_stored():
    world = World(batch_blocks=50)
    world.fill(*range(86))
    assert len(world.step()) == 11
    assert world.step() == []
    world.planner.ended(11)


@pytest.mark.parametrize("target", [0.9, 1.1, -0.1])
def test_watermarks_in_the_wrong_order_are_our_bug(target):
    with pytest.raises(AssertionError):
        Watermarks(threshold=0.85, target=target, batch_blocks=1, idle_after_s=1.0)


def test_a_block_lost_before_it_was_copied_makes_storing_write_through():
    """A burst of allocations outran the copies: the next one shall find nothing but clean blocks."""
    world = World(batch_blocks=100)
    world.fill(*range(80))
    assert world.step() == []
    world.planner.outrun()
    assert len(world.step()) == 80


def test_the_marks_come_back_when_no_more_blocks_are_lost():
    world = World(batch_blocks=100)
    world.planner.outrun()
    assert world.planner.extra_room_blocks == CAPACITY
    world.clock.advance(RECOVERY_S / 2)
    assert world.planner.extra_room_blocks == CAPACITY / 2
    world.clock.advance(RECOVERY_S)
    world.fill(*range(85))
    assert world.step() == []
