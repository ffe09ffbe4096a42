import hashlib
from collections.abc import Iterable, Sequence

import pytest

from kvortex.cache.index import (
    BlockIndex,
    Completed,
    KeyState,
    RefusalReason,
    Refused,
    Reservation,
    SlotState,
)
from kvortex.cache.policies import make_policy
from kvortex.cache.policies.lru import LRU
from kvortex.keys import BlockKey, block_key


def to_keys(numbers: Iterable[int]) -> list[BlockKey]:
    """New key objects at each call, as each request hashes anew."""
    return [block_key(hashlib.sha256(str(number).encode()).digest(), 0) for number in numbers]


def new_index(num_slots: int) -> BlockIndex:
    return BlockIndex(num_slots, make_policy("lru", num_slots))


def reserved(index: BlockIndex, numbers: Iterable[int]) -> Reservation:
    reservation = index.reserve(to_keys(numbers))
    assert isinstance(reservation, Reservation), reservation
    index.check()
    return reservation


def stored(index: BlockIndex, numbers: Iterable[int]) -> Reservation:
    reservation = reserved(index, numbers)
    index.publish(reservation.slots)
    index.check()
    return reservation


def states(index: BlockIndex, numbers: Iterable[int]) -> list[KeyState]:
    return [index.state_of(key) for key in to_keys(numbers)]


def picture(index: BlockIndex) -> list[object]:
    """All that can be seen of an index."""
    slots = range(index.num_slots)
    found = [(index.slot_state(slot), index.pins_of(slot)) for slot in slots]
    named = [index.key_of(slot) for slot in slots if found[slot][0] in (SlotState.WRITING, SlotState.READY)]
    counts = (index.free, index.writing, index.ready, index.doomed, index.pinned, index.evictable)
    return [found, named, counts, index.evictions]


# ---- a block's life


def test_a_key_is_found_only_after_its_bytes_are_complete() -> None:
    index = new_index(4)
    assert states(index, [1, 2]) == [KeyState.ABSENT] * 2
    reservation = reserved(index, [1, 2])
    assert states(index, [1, 2]) == [KeyState.WRITING] * 2
    assert index.match(to_keys([1, 2])) == []
    assert index.ready_slots(to_keys([1, 2])) == {}
    assert index.publish(reservation.slots) == Completed(published=2, freed=0, ignored=0)
    assert states(index, [1, 2]) == [KeyState.READY] * 2
    assert index.match(to_keys([1, 2])) == list(reservation.slots)
    index.check()


def test_a_key_being_written_is_not_left_to_store() -> None:
    index = new_index(4)
    stored(index, [1])
    reserved(index, [2])
    assert index.absent(to_keys([1, 2, 3, 4])) == to_keys([3, 4])


def test_a_failed_store_is_a_block_that_was_not_stored() -> None:
    index = new_index(4)
    reservation = reserved(index, [1, 2, 3])
    assert index.abandon(reservation.slots) == Completed(published=0, freed=3, ignored=0)
    assert states(index, [1, 2, 3]) == [KeyState.ABSENT] * 3
    assert (index.free, index.writing) == (4, 0)
    index.check()


def test_half_a_store_can_fail() -> None:
    index = new_index(4)
    reservation = reserved(index, [1, 2, 3])
    assert index.abandon(reservation.slots[1:2]).freed == 1
    assert index.publish([reservation.slots[0], reservation.slots[2]]).published == 2
    assert states(index, [1, 2, 3]) == [KeyState.READY, KeyState.ABSENT, KeyState.READY]
    index.check()


def test_match_stops_at_the_first_key_that_is_not_ready() -> None:
    index = new_index(8)
    slots = stored(index, [1, 2, 4]).slots
    reserved(index, [3])
    assert index.match(to_keys([1, 2, 3, 4])) == list(slots[:2])
    assert index.match(to_keys([9, 1])) == []
    assert index.match([]) == []


def test_ready_slots_has_holes() -> None:
    index = new_index(8)
    slots = stored(index, [1, 2, 4]).slots
    assert index.ready_slots(to_keys([9, 1, 3, 4])) == {1: slots[0], 3: slots[2]}


def test_slots_tell_their_keys() -> None:
    index = new_index(4)
    reservation = reserved(index, [1, 2])
    assert [index.key_of(slot) for slot in reservation.slots] == to_keys([1, 2])
    index.abandon(reservation.slots)
    with pytest.raises(AssertionError, match=r"slot \d is FREE"):
        index.key_of(reservation.slots[0])


# ---- reservations


def test_free_slots_are_taken_before_anything_is_evicted() -> None:
    index = new_index(4)
    stored(index, [1, 2, 3])
    assert stored(index, [4]).evicted == ()
    assert len(stored(index, [5]).evicted) == 1


def test_what_is_evicted_is_told_and_gone_before_its_slot_is_given_away() -> None:
    index = new_index(3)
    old = stored(index, [1])
    stored(index, [2, 3])
    reservation = reserved(index, [4])
    assert list(reservation.evicted) == to_keys([1])
    assert reservation.slots == old.slots
    assert states(index, [1, 2, 3, 4]) == [KeyState.ABSENT, KeyState.READY, KeyState.READY, KeyState.WRITING]
    assert index.match(to_keys([1])) == []
    assert index.evictions == 1


def test_a_touched_block_outlives_one_stored_later() -> None:
    index = new_index(2)
    index.touch(stored(index, [1]).slots)
    stored(index, [2])
    index.touch(index.match(to_keys([1])))
    assert list(stored(index, [3]).evicted) == to_keys([2])


def test_a_touch_of_a_slot_that_is_not_ready_is_passed_over() -> None:
    index = new_index(3)
    slots = [*stored(index, [1]).slots, *reserved(index, [2]).slots, 2]
    index.touch(slots)
    index.check()
    assert index.evictable == 1


def test_slots_being_written_or_pinned_are_never_evicted() -> None:
    index = new_index(4)
    index.pin(stored(index, [1, 2]).slots)
    reserved(index, [3])
    stored(index, [4])
    before = picture(index)
    assert index.reserve(to_keys([5, 6])) == Refused(RefusalReason.IN_USE, wanted=2, available=1)
    assert picture(index) == before
    assert list(stored(index, [5]).evicted) == to_keys([4])


def test_a_refused_reservation_changes_nothing_not_even_the_order_of_eviction() -> None:
    index = new_index(4)
    for number in (1, 2, 3, 4):
        stored(index, [number])
    index.pin(index.match(to_keys([4])))
    before = picture(index)
    assert isinstance(index.reserve(to_keys([5, 6, 7, 8])), Refused)
    index.check()
    assert picture(index) == before
    assert states(index, [5, 6, 7, 8]) == [KeyState.ABSENT] * 4
    assert list(stored(index, [5, 6, 7]).evicted) == to_keys([1, 2, 3])


def test_more_keys_than_slots_are_refused_as_too_large() -> None:
    index = new_index(2)
    assert index.reserve(to_keys([1, 2, 3])) == Refused(RefusalReason.TOO_LARGE, wanted=3, available=2)
    index.check()


def test_a_full_index_serves_who_fits_and_refuses_the_rest() -> None:
    index = new_index(4)
    index.pin(stored(index, [1, 2]).slots)
    answers = [index.reserve(to_keys(range(first, first + 3))) for first in range(10, 28, 3)]
    assert all(isinstance(answer, Refused) for answer in answers)
    for step in range(50):
        reservation = stored(index, [100 + 2 * step, 101 + 2 * step])
        assert set(reservation.slots).isdisjoint(index.match(to_keys([1, 2])))
    assert index.match(to_keys([1, 2])) != []


@pytest.mark.parametrize("state", ["ready", "writing"])
def test_a_key_that_is_held_is_not_reserved_again(state: str) -> None:
    index = new_index(4)
    (stored if state == "ready" else reserved)(index, [1])
    before = picture(index)
    with pytest.raises(AssertionError, match="1 of the 2 keys"):
        index.reserve(to_keys([2, 1]))
    assert picture(index) == before


def test_a_key_is_reserved_once_in_a_call() -> None:
    index = new_index(4)
    with pytest.raises(AssertionError, match="only 1 of the 2"):
        index.reserve(to_keys([1, 1]))
    assert index.free == 4


def test_a_reservation_of_nothing_is_granted() -> None:
    index = new_index(1)
    stored(index, [1])
    assert index.reserve([]) == Reservation((), ())
    index.check()


# ---- ends that are told twice


def test_the_end_of_a_store_told_twice_is_ignored() -> None:
    index = new_index(2)
    slots = stored(index, [1, 2]).slots
    before = picture(index)
    assert index.publish(slots) == Completed(published=0, freed=0, ignored=2)
    assert index.abandon(slots) == Completed(published=0, freed=0, ignored=2)
    assert picture(index) == before
    index.check()


def test_a_failed_store_told_twice_does_not_free_its_slot_twice() -> None:
    index = new_index(2)
    slots = reserved(index, [1]).slots
    assert index.abandon(slots).freed == 1
    assert index.abandon(slots) == Completed(published=0, freed=0, ignored=1)
    assert index.publish(slots).ignored == 1
    index.check()
    assert len(set(reserved(index, [2, 3]).slots)) == 2


def test_a_slot_named_twice_in_one_answer_ends_once() -> None:
    index = new_index(2)
    (slot,) = reserved(index, [1]).slots
    assert index.publish([slot, slot]) == Completed(published=1, freed=0, ignored=1)
    assert index.discard([slot, slot]) == 1
    (slot,) = reserved(index, [2]).slots
    assert index.abandon([slot, slot]) == Completed(published=0, freed=1, ignored=1)
    index.check()


def test_a_late_answer_does_not_free_a_doomed_slot_that_is_still_read() -> None:
    index = new_index(1)
    slots = stored(index, [1]).slots
    index.pin(slots)
    index.discard(slots)
    assert index.publish(slots).ignored == 1
    assert index.abandon(slots).ignored == 1
    assert index.slot_state(0) is SlotState.DOOMED
    index.check()


# ---- pins


def test_a_slot_is_held_until_its_last_pin_ends() -> None:
    index = new_index(1)
    slots = stored(index, [1]).slots
    index.pin(slots)
    index.pin(slots)
    index.unpin(slots)
    assert isinstance(index.reserve(to_keys([2])), Refused)
    index.unpin(slots)
    assert list(stored(index, [2]).evicted) == to_keys([1])


def test_blocks_under_a_slow_read_outlive_any_number_of_stores() -> None:
    index = new_index(8)
    held = stored(index, [1, 2, 3, 4]).slots
    index.pin(held)
    granted = refused = 0
    for number in range(100, 120):
        answer = index.reserve(to_keys([number, number + 1000]))
        if isinstance(answer, Refused):
            refused += 1
            continue
        granted += 1
        assert set(answer.slots).isdisjoint(held)
        if number % 2:
            index.publish(answer.slots)
    assert granted + refused == 20
    assert index.match(to_keys([1, 2, 3, 4])) == list(held)
    index.unpin(held)
    index.check()
    assert index.evictable >= 4


def test_occupancy_and_pins_are_two_figures() -> None:
    index = new_index(8)
    for number in range(18):
        stored(index, [number])
    index.pin(index.match(to_keys([16])))
    index.pin(index.match(to_keys([17])))
    refused = index.reserve(to_keys(range(100, 107)))
    assert isinstance(refused, Refused)
    assert (index.ready, index.pinned, index.evictions, refused.available) == (8, 2, 10, 6)


def test_an_unpin_without_a_pin_is_an_assertion_and_changes_nothing() -> None:
    index = new_index(2)
    slots = stored(index, [1, 2]).slots
    index.pin(slots[:1])
    before = picture(index)
    for wrong in (slots, [slots[0], slots[0]]):
        with pytest.raises(AssertionError, match="more unpins than pins"):
            index.unpin(wrong)
        assert picture(index) == before


def test_only_ready_slots_are_pinned() -> None:
    index = new_index(3)
    ready, writing = stored(index, [1]).slots, reserved(index, [2]).slots
    for wrong in (writing, [2], [*ready, *writing]):
        with pytest.raises(AssertionError, match="not READY"):
            index.pin(wrong)
    assert index.pinned == 0


@pytest.mark.parametrize("call", ["pin", "touch", "publish", "abandon", "discard"])
@pytest.mark.parametrize("slot", [-1, 2])
def test_a_slot_number_out_of_range_is_an_assertion(call: str, slot: int) -> None:
    index = new_index(2)
    stored(index, [1, 2])
    before = picture(index)
    with pytest.raises(AssertionError, match=r"slots .* of 2"):
        getattr(index, call)([0, slot])
    assert picture(index) == before


# ---- quarantine and reset


def test_a_discarded_block_is_absent_and_its_slot_free() -> None:
    index = new_index(2)
    slots = stored(index, [1, 2]).slots
    assert index.discard(slots[:1]) == 1
    assert states(index, [1, 2]) == [KeyState.ABSENT, KeyState.READY]
    assert index.free == 1
    assert index.discard(slots[:1]) == 0
    index.check()


def test_a_discarded_block_under_a_load_keeps_its_slot_until_the_load_ends() -> None:
    index = new_index(1)
    slots = stored(index, [1]).slots
    index.pin(slots)
    assert index.discard(slots) == 1
    assert index.match(to_keys([1])) == []
    assert (index.doomed, index.free) == (1, 0)
    assert isinstance(index.reserve(to_keys([1])), Refused)
    index.check()
    index.unpin(slots)
    assert (index.doomed, index.free) == (0, 1)
    index.check()


@pytest.mark.parametrize("end", ["publish", "abandon"])
def test_a_store_given_up_is_never_seen_whatever_its_end(end: str) -> None:
    index = new_index(1)
    slots = reserved(index, [1]).slots
    assert index.discard(slots) == 1
    assert states(index, [1]) == [KeyState.ABSENT]
    assert isinstance(index.reserve(to_keys([2])), Refused)
    assert getattr(index, end)(slots) == Completed(published=0, freed=1, ignored=0)
    assert states(index, [1]) == [KeyState.ABSENT]
    assert index.free == 1
    index.check()


def test_a_discarded_key_can_be_stored_again_while_its_old_slot_is_doomed() -> None:
    index = new_index(2)
    old = reserved(index, [1]).slots
    index.discard(old)
    new = stored(index, [1]).slots
    assert index.publish(old) == Completed(published=0, freed=1, ignored=0)
    assert index.match(to_keys([1])) == list(new)
    index.check()


def test_a_reset_forgets_every_key_and_waits_for_copies_under_way() -> None:
    index = new_index(6)
    read = stored(index, [1, 2]).slots
    index.pin(read)
    written = reserved(index, [3]).slots
    stored(index, [4, 5])
    assert index.reset() == 5
    index.check()
    assert states(index, range(1, 6)) == [KeyState.ABSENT] * 5
    assert (index.free, index.writing, index.ready, index.doomed, index.pinned) == (3, 0, 0, 3, 2)
    assert index.publish(written) == Completed(published=0, freed=1, ignored=0)
    index.unpin(read)
    index.check()
    assert index.free == 6
    assert len(set(stored(index, range(1, 7)).slots)) == 6


def test_a_second_reset_keeps_what_the_first_one_doomed() -> None:
    index = new_index(3)
    read, written = stored(index, [1]).slots, reserved(index, [2]).slots
    index.pin(read)
    index.reset()
    assert index.reset() == 0
    assert index.doomed == 2
    index.check()
    index.abandon(written)
    index.unpin(read)
    assert index.free == 3


# ---- what the policy is told


class Recorder(LRU):
    """An LRU that keeps what it was told of admitted blocks, and can be made to break its contract."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.admissions: list[tuple[list[int], list[BlockKey]]] = []
        self.victims: list[int] | None = None

    def admitted(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        self.admissions.append((list(slots), list(keys)))
        super().admitted(slots, keys)

    def evict(self, count: int) -> list[int]:
        return super().evict(count) if self.victims is None else self.victims


def test_the_policy_hears_of_a_block_when_it_is_published() -> None:
    policy = Recorder(4)
    index = BlockIndex(4, policy)
    reservation = index.reserve(to_keys([1, 2, 3]))
    assert isinstance(reservation, Reservation)
    assert policy.admissions == []
    index.discard(reservation.slots[1:2])
    index.publish(reservation.slots)
    kept = [reservation.slots[0], reservation.slots[2]]
    assert policy.admissions == [(kept, to_keys([1, 3]))]


@pytest.mark.parametrize(
    ("victims", "message"),
    [([0], "1 pinned slots"), ([2], "not READY"), ([1, 1], "1 slots, not 2"), ([-1], "slots -1")],
)
def test_a_policy_that_gives_up_what_it_must_not_is_caught(victims: list[int], message: str) -> None:
    policy = Recorder(4)
    index = BlockIndex(4, policy)
    for number in range(4):
        reservation = index.reserve(to_keys([number]))
        assert isinstance(reservation, Reservation)
        if number != 2:
            index.publish(reservation.slots)
    index.pin([0])
    policy.victims = victims
    with pytest.raises(AssertionError, match=message):
        index.reserve(to_keys(range(10, 10 + len(victims))))


def test_a_policy_serves_one_index() -> None:
    policy = Recorder(2)
    stored(BlockIndex(2, policy), [1])
    with pytest.raises(AssertionError, match="another index"):
        BlockIndex(2, policy)


def test_an_index_keeps_its_namespace() -> None:
    assert BlockIndex(1, make_policy("lru", 1), namespace=b"n").namespace == b"n"


# ---- bounds


def test_no_table_grows_beyond_the_slots() -> None:
    index = new_index(10)
    for number in range(2000):
        slots = stored(index, [number]).slots
        if number % 3 == 0:
            index.pin(slots)
            index.unpin(slots)
        if number % 7 == 0:
            index.discard(slots)
    held = [index.ready, index.writing, index.free, index.pinned, index.doomed]
    assert held[0] + held[2] == 10
    assert held[1] == held[3] == held[4] == 0
    index.check()
