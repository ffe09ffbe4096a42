"""Which VRAM blocks are resident, clean, and due for a store."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvortex.cache.residency import Candidate, Residency
from kvortex.keys import BlockKey


def key(name: str) -> BlockKey:
    return BlockKey(name.encode().ljust(36, b"."))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def residency(clock: Clock) -> Residency:
    return Residency(clock)


def nothing_in_use(block_id: int) -> bool:
    return False


def taken(residency: Residency, count: int, in_use=nothing_in_use, idle_after_s: float = 30.0) -> list[int]:
    return [c.block_id for c in residency.take(count, in_use=in_use, idle_after_s=idle_after_s)]


def test_a_block_is_resident_until_its_copy_is_published(residency):
    residency.block_cached(1, key("a"), in_ram=False)
    assert (residency.resident_blocks, residency.clean_blocks) == (1, 0)
    residency.copied(key("a"))
    assert (residency.resident_blocks, residency.clean_blocks) == (0, 1)
    residency.check()


def test_a_block_loaded_from_ram_is_clean_at_once_and_never_queued(residency):
    residency.block_cached(1, key("a"), in_ram=True)
    assert residency.clean_blocks == 1
    assert taken(residency, 5) == []


def test_two_blocks_of_one_content_become_clean_together(residency):
    residency.block_cached(1, key("a"), in_ram=False)
    residency.block_cached(2, key("a"), in_ram=False)
    residency.copied(key("a"))
    assert residency.clean_blocks == 2
    residency.block_uncached(1, key("a"))
    assert residency.clean_blocks == 1
    assert residency.holds(key("a"))
    residency.check()


def test_a_block_taken_for_something_else_is_forgotten(residency):
    residency.block_cached(1, key("a"), in_ram=False)
    assert residency.block_uncached(1, key("a"))
    assert not residency.block_uncached(1, key("a"))
    assert residency.complete_blocks == 0
    assert taken(residency, 1) == []


def test_a_second_hash_of_a_block_does_not_rename_it(residency):
    residency.block_cached(1, key("a"), in_ram=False)
    residency.block_cached(1, key("b"), in_ram=True)
    assert residency.clean_blocks == 0
    assert not residency.block_uncached(1, key("b"))
    assert residency.complete_blocks == 1


def test_the_longest_unused_block_is_taken_first(residency):
    for block_id, name in enumerate("abc"):
        residency.block_cached(block_id, key(name), in_ram=False)
    residency.used([0])
    assert sorted(taken(residency, 2)) == [1, 2]
    assert taken(residency, 2) == [0]


def test_idle_blocks_go_before_fresh_ones_and_those_before_running_ones(residency, clock):
    residency.block_cached(0, key("running"), in_ram=False)
    residency.block_cached(1, key("idle"), in_ram=False)
    clock.now = 100.0
    residency.block_cached(2, key("fresh"), in_ram=False)
    running = {0}
    assert taken(residency, 1, running.__contains__) == [1]
    assert taken(residency, 1, running.__contains__) == [2]
    assert taken(residency, 1, running.__contains__) == [0]


def test_a_step_looks_at_a_bounded_number_of_blocks(residency):
    for block_id in range(1000):
        residency.block_cached(block_id, key(str(block_id)), in_ram=False)
    looked_at = []

    def in_use(block_id: int) -> bool:
        looked_at.append(block_id)
        return block_id < 900

    residency.take(10, in_use=in_use, idle_after_s=30.0)
    assert len(looked_at) == 20


def test_blocks_in_use_that_were_passed_over_do_not_hide_cold_ones(residency):
    for block_id in range(100):
        residency.block_cached(block_id, key(str(block_id)), in_ram=False)
    cold = {99}
    found: list[int] = []
    for _ in range(60):
        found += taken(residency, 1, lambda b: b not in cold)
        if 99 in found:
            break
    assert 99 in found


def test_a_copy_that_ram_gave_up_makes_the_block_resident_but_not_due_before_its_next_use(residency):
    residency.block_cached(1, key("a"), in_ram=True)
    residency.copies_lost([key("a"), key("never seen")])
    assert residency.resident_blocks == 1
    assert taken(residency, 1) == []
    residency.used([1])
    assert taken(residency, 1) == [1]
    residency.check()


def test_a_block_that_ram_declined_is_resident_but_neither_due_nor_missed_before_its_next_use(residency):
    residency.block_cached(1, key("a"), in_ram=False)
    residency.block_cached(2, key("a"), in_ram=False)
    assert taken(residency, 1) == [1]
    residency.declined([key("a")])
    assert (residency.resident_blocks, residency.given_up_blocks) == (2, 2)
    assert residency.is_given_up(key("a"))
    assert taken(residency, 2) == []
    residency.used([2])
    assert not residency.is_given_up(key("a"))
    assert residency.given_up_blocks == 0
    assert taken(residency, 2) == [2]
    residency.check()


def test_a_block_given_up_is_forgotten_with_its_last_vram_block(residency):
    residency.block_cached(1, key("a"), in_ram=True)
    residency.copies_lost([key("a")])
    residency.block_uncached(1, key("a"))
    assert residency.given_up_blocks == 0
    residency.block_cached(1, key("a"), in_ram=False)
    assert not residency.is_given_up(key("a"))
    assert taken(residency, 1) == [1]
    residency.check()


def test_a_block_given_up_that_is_computed_again_is_due(residency):
    residency.block_cached(1, key("a"), in_ram=True)
    residency.copies_lost([key("a")])
    residency.block_cached(2, key("a"), in_ram=False)
    assert residency.given_up_blocks == 0
    assert taken(residency, 2) == [2]
    residency.check()


def test_heads_are_taken_before_tails_whether_their_request_runs_or_has_ended(residency):
    for block_id in range(1, 9):
        residency.block_cached(block_id, key(str(block_id)), in_ram=False)
    residency.used([4, 3, 2, 1])  # one request ended, its tail first; another with its head, 1 and 2, still runs
    running = {1, 2, 5, 6, 7, 8}
    assert taken(residency, 10, running.__contains__) == [1, 2, 5, 6, 7, 8, 3, 4]


def test_emptied_ram_makes_every_block_due_again(residency):
    residency.block_cached(1, key("a"), in_ram=True)
    residency.block_cached(2, key("b"), in_ram=False)
    residency.block_cached(3, key("c"), in_ram=True)
    residency.copies_lost([key("c")])
    residency.all_copies_lost()
    assert residency.resident_blocks == 3
    assert residency.given_up_blocks == 0
    assert sorted(taken(residency, 5)) == [1, 2, 3]
    residency.check()


def test_a_reset_of_vllms_cache_forgets_all(residency):
    residency.block_cached(1, key("a"), in_ram=True)
    residency.clear()
    assert residency.complete_blocks == residency.clean_blocks == residency.queued_blocks == 0
    residency.check()


def test_a_copy_is_spared_once_a_use_and_only_of_a_block_that_vram_keeps(residency, clock):
    residency.block_cached(1, key("a"), in_ram=True)
    assert residency.stays(key("a"), in_use=lambda _: True, let_go_after_s=clock.now)
    residency.used([1])
    assert not residency.stays(key("a"), in_use=nothing_in_use, let_go_after_s=clock.now), "taken with the next ones"
    assert residency.stays(key("a"), in_use=nothing_in_use, let_go_after_s=clock.now - 1)
    residency.copies_spared([key("a")])
    assert residency.is_due(1)
    assert residency.take_these([1, 2]) == [Candidate(1, key("a"), completion=0)]
    residency.copied(key("a"))
    assert not residency.stays(key("a"), in_use=lambda _: True, let_go_after_s=0.0), "spared since its last use"
    residency.used([1])
    assert residency.stays(key("a"), in_use=lambda _: True, let_go_after_s=0.0)
    residency.check()


@given(
    due=st.sets(st.integers(0, 9)),
    copied=st.sets(st.integers(0, 9)),
    hit=st.sets(st.integers(0, 9)),
    order=st.permutations(range(12)),
    count=st.integers(0, 12),
)
def test_what_is_at_stake_is_among_the_next_blocks_that_the_request_does_not_hit(
    due: set[int], copied: set[int], hit: set[int], order: list[int], count: int
) -> None:
    residency = Residency(Clock())
    for block in range(10):  # 10 and 11 hold nothing
        residency.block_cached(block, key(str(block)), in_ram=block not in due)
    at_stake = residency.at_stake(order, count, hit={key(str(block)) for block in hit}, copied_from=copied)
    others = [block for block in order if block not in hit][:count]
    assert at_stake == any(block in due or block in copied for block in others)
    assert [order[i] for i in residency.due_among(order)] == [block for block in order if block in due]
