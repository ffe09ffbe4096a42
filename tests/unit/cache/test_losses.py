"""The bounded memory of lost blocks."""

from __future__ import annotations

import random

from kvortex.cache.losses import MAX_PLACES, Loss, LossRecord
from kvortex.keys import BlockKey, block_key


def random_keys(count: int, *, group: int = 0, seed: int = 1) -> list[BlockKey]:
    rng = random.Random(seed)
    return [block_key(rng.randbytes(32), group) for _ in range(count)]


def test_a_loss_is_told_until_the_block_is_found_again():
    record = LossRecord(100)
    evicted, lost, never = random_keys(3)
    record.evicted([evicted])
    record.not_stored(lost)
    assert [record.of(key) for key in (evicted, lost, never)] == [Loss.EVICTED, Loss.NOT_STORED, None]
    record.found_again(evicted)
    record.found_again(never)
    assert [record.of(key) for key in (evicted, lost, never)] == [None, Loss.NOT_STORED, None]
    record.reset()
    assert record.of(lost) is None


def test_a_block_that_ram_gave_up_stays_evicted_when_vram_loses_it_too():
    record = LossRecord(100)
    (key,) = random_keys(1)
    record.evicted([key])
    record.not_stored(key)
    assert record.of(key) is Loss.EVICTED


def test_a_block_that_is_given_up_after_it_was_lost_once_is_evicted():
    record = LossRecord(100)
    (key,) = random_keys(1)
    record.not_stored(key)
    record.evicted([key])
    assert record.of(key) is Loss.EVICTED


def test_groups_of_one_hash_are_told_apart():
    record = LossRecord(100)
    (full,), (sliding,) = random_keys(1), random_keys(1, group=1)
    assert full[:-4] == sliding[:-4]
    record.evicted([full])
    assert record.of(sliding) is None
    record.not_stored(sliding)
    assert (record.of(full), record.of(sliding)) == (Loss.EVICTED, Loss.NOT_STORED)


def test_most_of_the_latest_losses_are_remembered_and_nothing_is_invented():
    record = LossRecord(4096)
    keys = random_keys(50_000)
    record.evicted(keys)
    latest = sum(record.of(key) is Loss.EVICTED for key in keys[-2000:])
    assert latest > 1600
    assert not any(record.of(key) for key in random_keys(10_000, seed=2))


def test_the_table_follows_the_tier_within_bounds():
    assert LossRecord(1).num_places == 4096
    assert LossRecord(10_000).num_places == 32_768
    assert LossRecord(10_000_000).num_places == MAX_PLACES
