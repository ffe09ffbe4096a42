"""One suite for every registered policy, then what each one promises on its own."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvortex.cache.policies import EVICTION_POLICIES, Adaptive, EvictionPolicy, make_policy
from kvortex.config.settings import EVICTION_POLICIES as CONFIGURABLE
from kvortex.errors import UsageError
from kvortex.keys import BlockKey, block_key
from tests.fakes.clock import FakeClock

NUM_SLOTS = 8


@pytest.fixture(params=sorted(EVICTION_POLICIES))
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    return make_policy(request.param, NUM_SLOTS)


@pytest.fixture
def lru() -> EvictionPolicy:
    return make_policy("lru", NUM_SLOTS)


def admit(policy: EvictionPolicy, slots: Sequence[int]) -> None:
    """Blocks whose keys follow from their slots."""
    policy.admitted(slots, keys_of(slots))


def keys_of(numbers: Sequence[int], group: int = 0) -> list[BlockKey]:
    return [block_key(number.to_bytes(32, "little"), group) for number in numbers]


def evict_all(policy: EvictionPolicy) -> list[int]:
    return policy.evict(len(policy))


# ---- every policy


def test_a_new_policy_has_nothing_to_give_up(policy: EvictionPolicy) -> None:
    assert len(policy) == 0
    assert policy.evict(0) == []


def test_every_admitted_slot_is_given_up_once(policy: EvictionPolicy) -> None:
    admit(policy, [0, 1, 2])
    admit(policy, [3, 4])
    victims = policy.evict(2) + policy.evict(3)
    assert sorted(victims) == [0, 1, 2, 3, 4]
    assert len(policy) == 0


def test_a_slot_given_up_can_be_admitted_again(policy: EvictionPolicy) -> None:
    admit(policy, [0])
    policy.evict(1)
    admit(policy, [0])
    assert policy.evict(1) == [0]


def test_more_than_there_are_is_an_assertion_and_changes_nothing(policy: EvictionPolicy) -> None:
    admit(policy, [0, 1, 2])
    policy.blocked([1])
    with pytest.raises(AssertionError):
        policy.evict(3)
    assert len(policy) == 2
    assert sorted(evict_all(policy)) == [0, 2]


def test_a_blocked_slot_is_not_given_up_until_it_is_evictable(policy: EvictionPolicy) -> None:
    admit(policy, [0, 1, 2])
    policy.blocked([0, 1])
    assert evict_all(policy) == [2]
    policy.evictable([0, 1])
    assert sorted(evict_all(policy)) == [0, 1]


def test_use_does_not_unblock(policy: EvictionPolicy) -> None:
    admit(policy, [0, 1])
    policy.blocked([0])
    policy.used([0, 1, 0])
    assert evict_all(policy) == [1]


def test_a_removed_slot_is_forgotten_evictable_or_blocked(policy: EvictionPolicy) -> None:
    admit(policy, [0, 1, 2])
    policy.blocked([1])
    policy.removed([0, 1])
    assert evict_all(policy) == [2]
    admit(policy, [0, 1])
    assert sorted(evict_all(policy)) == [0, 1]


def test_reset_forgets_every_slot(policy: EvictionPolicy) -> None:
    admit(policy, [0, 1, 2])
    policy.blocked([2])
    policy.reset()
    assert len(policy) == 0
    admit(policy, list(range(NUM_SLOTS)))
    assert sorted(evict_all(policy)) == list(range(NUM_SLOTS))


def test_empty_batches_do_nothing(policy: EvictionPolicy) -> None:
    admit(policy, [])
    policy.used([])
    policy.blocked([])
    policy.evictable([])
    policy.removed([])
    assert evict_all(policy) == []


def test_prompts_and_answers_change_no_slot(policy: EvictionPolicy) -> None:
    policy.prompt(keys_of([0, 1, 2, 7]), 60)
    admit(policy, [0, 1])
    policy.answered(keys_of([0, 1, 2, 7, 6]), 20)
    policy.prompt(keys_of([0, 1, 5]), 50)
    policy.prompt([], 3)
    policy.answered([], 3)
    policy.answered(keys_of([4]), 3)
    assert len(policy) == 2
    assert sorted(evict_all(policy)) == [0, 1]


def test_groups_of_one_prompt_are_blocks_of_their_own(policy: EvictionPolicy) -> None:
    for group in (0, 1):
        policy.prompt(keys_of([0, 1], group), 32)
    policy.admitted([0, 1, 2, 3], [*keys_of([0, 1], 0), *keys_of([0, 1], 1)])
    assert sorted(evict_all(policy)) == [0, 1, 2, 3]


def test_choose_gives_up_as_many_as_asked_of_held_and_new(policy: EvictionPolicy) -> None:
    admit(policy, [0, 1])
    new = keys_of([4, 5, 6])
    for count in (0, 1):
        victims, declined = policy.choose(new, count)
        assert len(victims) + len(declined) == count
        assert declined <= set(new)
    left = len(policy)
    victims, declined = policy.choose(new, left + 3)
    assert len(victims) == left
    assert declined == set(new)
    assert len(policy) == 0


def test_a_prompts_tail_goes_before_the_head_that_others_share(policy: EvictionPolicy) -> None:
    for prompt in ([0, 1, 2, 3], [0, 1, 4, 5]):
        keys = keys_of(prompt)
        policy.prompt(keys, 64)
        fresh = [slot for slot in prompt if slot > 1 or prompt[2] == 2]
        policy.admitted(fresh, keys_of(fresh))
        policy.used(prompt)
        policy.answered(keys, 10)
    victims = evict_all(policy)
    assert victims.index(3) < victims.index(2) < victims.index(1) < victims.index(0)
    assert victims.index(5) < victims.index(4) < victims.index(1)


def test_a_clock_that_jumps_back_does_no_harm() -> None:
    for name in EVICTION_POLICIES:
        clock = FakeClock()
        policy = make_policy(name, NUM_SLOTS, clock=clock)
        for jump in (5.0, -1000.0, 1e7, -1e7):
            clock.advance(jump)
            policy.prompt(keys_of([0, 1, 2]), 48)
            if len(policy) == 0:
                admit(policy, [0, 1, 2])
            policy.used([0, 1, 2])
        assert sorted(policy.evict(3)) == [0, 1, 2]


SLOTS = st.lists(st.integers(0, NUM_SLOTS - 1), max_size=NUM_SLOTS)
OPERATIONS = ["admit", "use", "block", "unblock", "remove", "evict", "prompt", "answer", "choose", "wait", "reset"]
CALLS = st.lists(st.tuples(st.sampled_from(OPERATIONS), SLOTS))


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
@settings(deadline=None)
@given(calls=CALLS)
def test_only_evictable_slots_are_ever_given_up(name: str, calls: list[tuple[str, list[int]]]) -> None:
    clock = FakeClock()
    policy = make_policy(name, NUM_SLOTS, clock=clock)
    evictable: set[int] = set()
    blocked: set[int] = set()
    for call, drawn in calls:
        slots = list(dict.fromkeys(drawn))
        if call == "admit":
            fresh = [slot for slot in slots if slot not in evictable | blocked]
            admit(policy, fresh)
            evictable.update(fresh)
        elif call == "use":
            policy.used([slot for slot in drawn if slot in evictable | blocked])
        elif call == "block":
            pinned = [slot for slot in slots if slot in evictable]
            policy.blocked(pinned)
            evictable.difference_update(pinned)
            blocked.update(pinned)
        elif call == "unblock":
            unpinned = [slot for slot in slots if slot in blocked]
            policy.evictable(unpinned)
            blocked.difference_update(unpinned)
            evictable.update(unpinned)
        elif call == "remove":
            gone = [slot for slot in slots if slot in evictable | blocked]
            policy.removed(gone)
            evictable.difference_update(gone)
            blocked.difference_update(gone)
        elif call == "prompt":
            policy.prompt(keys_of(drawn), 16 * len(drawn))
        elif call == "answer":
            policy.answered(keys_of(drawn), 10)
        elif call == "wait":
            clock.advance(sum(drawn) ** 3 - 20)
        elif call == "reset":
            policy.reset()
            evictable.clear()
            blocked.clear()
        elif call == "choose":
            new = keys_of([slot for slot in slots if slot not in evictable | blocked])
            count = min(len(drawn), len(new) + len(evictable))
            victims, declined = policy.choose(new, count)
            assert len(victims) + len(declined) == count
            assert declined <= set(new)
            assert evictable.issuperset(victims)
            evictable.difference_update(victims)
        else:
            count = min(len(slots), len(evictable))
            victims = policy.evict(count)
            assert len(victims) == len(set(victims)) == count
            assert evictable.issuperset(victims)
            evictable.difference_update(victims)
        assert len(policy) == len(evictable)
        if isinstance(policy, Adaptive):
            policy.check()
    assert sorted(evict_all(policy)) == sorted(evictable)


# ---- lru


def test_lru_gives_up_what_was_stored_first(lru: EvictionPolicy) -> None:
    for slot in (3, 1, 2):
        admit(lru, [slot])
    assert evict_all(lru) == [3, 1, 2]


def test_lru_gives_up_a_prompts_tail_before_its_head(lru: EvictionPolicy) -> None:
    admit(lru, [0, 1, 2])
    admit(lru, [5, 6])
    assert evict_all(lru) == [2, 1, 0, 6, 5]


def test_lru_keeps_what_was_used(lru: EvictionPolicy) -> None:
    admit(lru, [0, 1, 2, 3])
    lru.used([2, 3])
    assert evict_all(lru) == [1, 0, 3, 2]


def test_lru_counts_a_slot_used_twice_in_a_batch_at_its_first_place(lru: EvictionPolicy) -> None:
    admit(lru, [0, 1, 2])
    lru.used([0, 1, 0])
    assert evict_all(lru) == [2, 1, 0]


def test_lru_takes_the_end_of_a_pin_for_a_use(lru: EvictionPolicy) -> None:
    admit(lru, [0])
    admit(lru, [1])
    lru.blocked([0])
    lru.evictable([0])
    assert evict_all(lru) == [1, 0]


def test_lru_goes_on_in_order_after_giving_up_some(lru: EvictionPolicy) -> None:
    admit(lru, [3, 2, 1, 0])
    assert lru.evict(2) == [0, 1]
    admit(lru, [7])
    assert evict_all(lru) == [2, 3, 7]


def test_lru_asserts_that_a_slot_is_admitted_once(lru: EvictionPolicy) -> None:
    admit(lru, [0])
    with pytest.raises(AssertionError, match="slot 0"):
        admit(lru, [0])
    with pytest.raises(AssertionError, match="slot 5"):
        admit(lru, [5, 5])


def test_lru_asserts_that_a_blocked_slot_was_evictable(lru: EvictionPolicy) -> None:
    with pytest.raises(AssertionError, match="slot 4"):
        lru.blocked([4])


# ---- the registry


def test_a_misspelt_policy_names_the_nearest_one() -> None:
    with pytest.raises(UsageError, match="'lruu' does not exist") as caught:
        make_policy("lruu", 1)
    assert caught.value.hint is not None
    assert "did you mean 'lru'" in caught.value.hint


def test_an_unknown_policy_lists_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        make_policy("magic", 1)
    assert caught.value.hint is not None
    assert all(name in caught.value.hint for name in EVICTION_POLICIES)


def test_the_configuration_knows_these_and_no_others() -> None:
    assert sorted(CONFIGURABLE) == sorted(EVICTION_POLICIES)
