"""How much of a prompt RAM can give, for one or several KV groups."""

from __future__ import annotations

import pytest

from kvortex.cache.index import BlockIndex
from kvortex.cache.policies import make_policy
from kvortex.cache.prefix import GroupShape, PrefixMatcher
from kvortex.keys import BlockKey

FULL = GroupShape(0, 16)
SLIDING = GroupShape(1, 16, window=33)  # the token after a hit reads the 32 before it: two blocks


def key(group: GroupShape, block: int) -> BlockKey:
    return BlockKey(block.to_bytes(32, "big") + group.group_id.to_bytes(4, "big"))


def keys_of(group: GroupShape) -> list[BlockKey]:
    return [key(group, i) for i in range(100)]


def index_with(*held: BlockKey) -> BlockIndex:
    index = BlockIndex(1000, make_policy("lru", 1000))
    if held:
        reservation = index.reserve(held)
        index.publish(reservation.slots)
    return index


def matcher(groups, index, drop_last_block=False) -> PrefixMatcher:
    return PrefixMatcher(groups, index, drop_last_block=drop_last_block)


def held_keys(group: GroupShape, *blocks: int) -> list[BlockKey]:
    return [key(group, b) for b in blocks]


def test_a_prompt_of_which_ram_has_nothing_is_a_miss():
    assert matcher([FULL], index_with()).match(keys_of, 100, 0).ram_tokens == 0


def test_blocks_that_follow_the_local_hit_are_restored():
    index = index_with(*held_keys(FULL, 2, 3))
    hit = matcher([FULL], index).match(keys_of, 100, 32)
    assert hit.ram_tokens == 32
    assert list(hit.slots[0]) == [2, 3]
    assert [index.key_of(s) for s in hit.slots[0].values()] == held_keys(FULL, 2, 3)


def test_a_hole_ends_the_prefix():
    hit = matcher([FULL], index_with(*held_keys(FULL, 0, 1, 3))).match(keys_of, 100, 0)
    assert hit.ram_tokens == 32


@pytest.mark.parametrize(("num_tokens", "expected"), [(64, 48), (65, 64), (63, 48), (16, 0), (17, 16), (1, 0)])
def test_the_last_token_is_always_computed(num_tokens, expected):
    """Field trial B32: a prompt found whole leaves nothing to sample from."""
    index = index_with(*held_keys(FULL, 0, 1, 2, 3))
    assert matcher([FULL], index).match(keys_of, num_tokens, 0).ram_tokens == expected


@pytest.mark.parametrize("local", [1, 15, 17, 40])
def test_a_local_hit_inside_a_block_is_left_alone(local):
    assert matcher([FULL], index_with(*held_keys(FULL, 0, 1, 2))).match(keys_of, 100, local).ram_tokens == 0


def test_a_local_hit_longer_than_what_ram_has_is_never_negative():
    """Field trial B36."""
    index = index_with(*held_keys(FULL, *range(6)))
    assert matcher([FULL], index).match(keys_of, 100, 96).ram_tokens == 0


def test_a_sliding_window_needs_only_the_blocks_before_the_hits_end():
    index = index_with(*held_keys(FULL, *range(6)), *held_keys(SLIDING, 4, 5))
    hit = matcher([FULL, SLIDING], index).match(keys_of, 100, 0)
    assert hit.ram_tokens == 96
    assert list(hit.slots[1]) == [4, 5]


def test_a_hole_in_the_window_shortens_the_hit_for_all_groups():
    index = index_with(*held_keys(FULL, *range(6)), *held_keys(SLIDING, 2, 3, 5))
    hit = matcher([FULL, SLIDING], index).match(keys_of, 100, 0)
    assert hit.ram_tokens == 64
    assert list(hit.slots[0]) == [0, 1, 2, 3]
    assert list(hit.slots[1]) == [2, 3]


def test_a_window_that_reaches_into_the_local_hit_needs_only_what_lies_beyond_it():
    index = index_with(*held_keys(FULL, 3), *held_keys(SLIDING, 3))
    hit = matcher([FULL, SLIDING], index).match(keys_of, 100, 48)
    assert hit.ram_tokens == 16
    assert list(hit.slots[1]) == [3]


def test_a_window_without_its_blocks_is_a_miss():
    index = index_with(*held_keys(FULL, *range(6)))
    assert matcher([FULL, SLIDING], index).match(keys_of, 100, 0).ram_tokens == 0


def test_groups_of_different_block_sizes_meet_on_a_common_edge():
    wide = GroupShape(1, 32)
    index = index_with(*held_keys(FULL, *range(5)), *held_keys(wide, 0, 1, 2))
    hit = matcher([FULL, wide], index).match(keys_of, 1000, 0)
    assert hit.ram_tokens == 64


def test_eagle_recomputes_the_last_matched_block():
    index = index_with(*held_keys(FULL, 0, 1, 2))
    assert matcher([FULL], index, drop_last_block=True).match(keys_of, 100, 0).ram_tokens == 32
