"""`make_room`: slots for those new blocks that are worth one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvortex.cache.index import BlockIndex, Reservation, Room
from kvortex.cache.policies import EVICTION_POLICIES, LRU, Choice, make_policy
from kvortex.keys import BlockKey, block_key


def keys_of(*numbers: int) -> list[BlockKey]:
    return [block_key(number.to_bytes(32, "little"), 0) for number in numbers]


def store(index: BlockIndex, keys: Sequence[BlockKey]) -> list[int]:
    reservation = index.reserve(keys)
    assert isinstance(reservation, Reservation)
    index.publish(reservation.slots)
    return list(reservation.slots)


@pytest.fixture(params=EVICTION_POLICIES)
def index(request: pytest.FixtureRequest) -> BlockIndex:
    return BlockIndex(4, make_policy(request.param, 4))


class DeclinesOdd(LRU):
    """Declines the second of the new blocks, and gives up LRU's choice for the others."""

    def choose(self, keys: Sequence[BlockKey], count: int) -> Choice:
        return Choice(self.evict(count - 1), frozenset(keys[1:2]))


def test_with_room_for_all_nothing_goes(index: BlockIndex) -> None:
    store(index, keys_of(1))
    assert index.make_room(keys_of(2, 3)) == Room(tuple(keys_of(2, 3)), ())
    assert index.free == 3


def test_a_reserve_that_follows_evicts_nothing(index: BlockIndex) -> None:
    store(index, keys_of(1, 2, 3, 4))
    room = index.make_room(keys_of(5, 6))
    assert len(room.keys) == len(room.evicted) == index.free
    assert index.evictions == len(room.evicted)
    index.check()
    reservation = index.reserve(room.keys)
    assert isinstance(reservation, Reservation)
    assert reservation.evicted == ()


def test_keys_declined_are_left_out_in_order() -> None:
    index = BlockIndex(4, DeclinesOdd(4))
    store(index, keys_of(1, 2, 3, 4))
    room = index.make_room(keys_of(5, 6, 7))
    assert room == Room(tuple(keys_of(5, 7)), tuple(keys_of(4, 3)))
    index.check()


def test_pinned_blocks_stay_and_tails_are_declined_for_them(index: BlockIndex) -> None:
    slots = store(index, keys_of(1, 2, 3, 4))
    index.pin(slots[:3])
    room = index.make_room(keys_of(5, 6))
    assert room == Room(tuple(keys_of(5)), tuple(keys_of(4)))
    index.check()


def test_more_than_the_tier_holds_leaves_the_head(index: BlockIndex) -> None:
    room = index.make_room(keys_of(1, 2, 3, 4, 5, 6))
    assert room.keys == tuple(keys_of(1, 2, 3, 4))


def test_prompts_and_answers_reach_the_policy() -> None:
    heard: list[tuple[str, int]] = []

    class Listens(LRU):
        def prompt(self, keys: Sequence[BlockKey], num_tokens: int) -> None:
            heard.append(("prompt", num_tokens))

        def answered(self, keys: Sequence[BlockKey], num_output_tokens: int) -> None:
            heard.append(("answered", num_output_tokens))

    index = BlockIndex(4, Listens(4))
    index.prompt(keys_of(1), 20)
    index.answered(keys_of(1), 7)
    assert heard == [("prompt", 20), ("answered", 7)]
