"""A policy that is told late answers as if it had been told at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvortex.cache.policies import EVICTION_POLICIES, LRU, Deferred, make_deferred, make_policy
from kvortex.cache.policies import deferred as deferred_module
from kvortex.keys import BlockKey, block_key
from tests.fakes.clock import FakeClock

NUM_SLOTS = 8
SLOTS = st.lists(st.integers(0, NUM_SLOTS - 1), max_size=NUM_SLOTS)
OPERATIONS = ["admit", "use", "block", "unblock", "remove", "evict", "prompt", "answer", "choose", "wait", "reset"]
CALLS = st.lists(st.tuples(st.sampled_from([*OPERATIONS, "settle"]), SLOTS))


def keys_of(numbers: Sequence[int]) -> list[BlockKey]:
    return [block_key(number.to_bytes(32, "little"), 0) for number in numbers]


class Told(LRU):
    """Writes down what it hears of prompts, and when by its own clock."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(NUM_SLOTS)
        self.heard: list[tuple[float, tuple[BlockKey, ...], int]] = []
        self.deferred = Deferred(self._with, clock)

    def _with(self, clock: FakeClock) -> Told:
        self.clock = clock
        return self

    def prompt(self, keys: Sequence[BlockKey], num_tokens: int) -> None:
        self.heard.append((self.clock(), tuple(keys), num_tokens))


def test_it_is_told_when_there_is_time_and_reads_the_time_at_which_it_was() -> None:
    clock = FakeClock()
    policy = Told(clock)
    begin = clock()
    policy.deferred.prompt(keys_of([1]), 16)
    clock.advance(5.0)
    policy.deferred.prompt(keys_of([1, 2]), 32)
    clock.advance(1.0)
    assert policy.heard == []
    policy.deferred.settle()
    assert policy.heard == [(begin, tuple(keys_of([1])), 16), (begin + 5.0, tuple(keys_of([1, 2])), 32)]
    policy.deferred.settle()
    assert len(policy.heard) == 2
    assert policy.clock() == begin + 6.0


@pytest.mark.parametrize("asked", [len, lambda policy: policy.evict(0), lambda policy: policy.choose([], 0)])
def test_it_is_told_before_it_is_asked(asked) -> None:  # type: ignore[no-untyped-def]
    policy = Told(FakeClock())
    policy.deferred.prompt(keys_of([1]), 16)
    asked(policy.deferred)
    assert len(policy.heard) == 1


def test_what_changes_after_it_was_told_of_does_not_change_what_it_hears() -> None:
    policy = Told(FakeClock())
    keys = keys_of([1, 2])
    policy.deferred.prompt(keys, 32)
    keys.clear()
    policy.deferred.settle()
    assert policy.heard[0][1] == tuple(keys_of([1, 2]))


def test_what_is_not_told_yet_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_module, "_MAX_UNTOLD", 3)
    policy = Told(FakeClock())
    for _ in range(7):
        policy.deferred.prompt(keys_of([1]), 16)
    assert len(policy.heard) == 6


def test_a_reset_forgets_what_was_not_told() -> None:
    policy = Told(FakeClock())
    policy.deferred.admitted([1], keys_of([1]))
    policy.deferred.reset()
    assert len(policy.deferred) == 0


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
@settings(deadline=None)
@given(calls=CALLS)
def test_it_answers_as_the_same_policy_that_was_told_at_once(name: str, calls: list[tuple[str, list[int]]]) -> None:
    clock = FakeClock()
    both = make_policy(name, NUM_SLOTS, clock=clock), make_deferred(name, NUM_SLOTS, clock=clock)
    evictable: set[int] = set()
    blocked: set[int] = set()
    for call, drawn in calls:
        slots = list(dict.fromkeys(drawn))
        held = evictable | blocked
        count = min(len(slots), len(evictable))
        new = [slot for slot in slots if slot not in held]
        loose = [slot for slot in slots if slot in evictable]
        pinned = [slot for slot in slots if slot in blocked]
        gone: set[int] = set()
        if call == "settle":
            both[1].settle()
        elif call == "wait":
            clock.advance(sum(drawn) ** 3 - 20)
        elif call == "evict":
            plain, late = (policy.evict(count) for policy in both)
            assert plain == late
            gone = set(plain)
        elif call == "choose":
            chosen, late_chosen = (policy.choose(keys_of(new), min(len(new), len(drawn))) for policy in both)
            assert chosen == late_chosen
            gone = set(chosen.victims)
        else:
            for policy in both:
                match call:
                    case "admit":
                        policy.admitted(new, keys_of(new))
                    case "use":
                        policy.used([slot for slot in drawn if slot in held])
                    case "block":
                        policy.blocked(loose)
                    case "unblock":
                        policy.evictable(pinned)
                    case "remove":
                        policy.removed(loose + pinned)
                    case "prompt":
                        policy.prompt(keys_of(drawn), 16 * len(drawn))
                    case "answer":
                        policy.answered(keys_of(drawn), 10)
                    case "reset":
                        policy.reset()
        match call:
            case "admit":
                evictable.update(new)
            case "block":
                evictable.difference_update(loose)
                blocked.update(loose)
            case "unblock":
                blocked.difference_update(pinned)
                evictable.update(pinned)
            case "remove":
                gone = set(loose + pinned)
            case "reset":
                gone = held
        evictable -= gone
        blocked -= gone
    plain, late = (policy.evict(len(evictable)) for policy in both)
    assert plain == late
