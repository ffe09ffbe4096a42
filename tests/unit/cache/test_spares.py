"""Which copies may be given up because VRAM has the block too, and that copies do not go round in a circle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvortex.cache.gate import NOBODY, Line
from kvortex.cache.index import BlockIndex, KeyState
from kvortex.cache.planner import OffloadPlanner, StoreDecision, Watermarks
from kvortex.cache.policies import EVICTION_POLICIES, make_policy
from kvortex.cache.residency import Residency
from kvortex.keys import BlockKey
from kvortex.replay.two_tiers import BlockPool
from tests.fakes.clock import FakeClock


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big") + bytes(4))


class Server:
    """A pool of VRAM blocks over RAM. Prompts are lists of numbers; those of the same number are the same block."""

    def __init__(self, vram: int, ram: int, policy: str = "lru", ahead: int = 0, threshold: float = 0.8) -> None:
        self.clock = FakeClock()
        self.residency = Residency(self.clock)
        self.index = BlockIndex(ram, make_policy(policy, ram, clock=self.clock))
        self.pool = BlockPool(vram)
        marks = Watermarks(threshold, threshold, batch_blocks=vram, idle_after_s=30.0, ahead_blocks=ahead)
        self.planner = OffloadPlanner(marks, vram, self.residency, self.index, self.clock)
        self.stores: Counter[BlockKey] = Counter()
        self.uses: Counter[BlockKey] = Counter()
        self.lost = 0

    def start(self, numbers: Sequence[int]) -> Running:
        """Admits a prompt, once the blocks it takes are safe; returns when its loads have ended."""
        self.clock.advance(1.0)
        keys = [key(number) for number in numbers]
        self.index.prompt(keys, len(keys))
        held = self.pool.held(keys)
        self.pool.hold(held)
        self.planner.in_vram_too(list(self.index.ready_slots(keys[: len(held)]).values()))
        wanted = len(keys) - len(held)
        self.settle(Line(wanted, wanted) if wanted else NOBODY)
        slots = self.index.match(keys[len(held) :])
        self.index.pin(slots)
        block_ids = list(held)
        for block_id, before in self.pool.take(wanted):
            if before is not None:
                due = self.residency.is_due(block_id)
                self.residency.block_uncached(block_id, before)
                self.lost += due
            self.residency.block_cached(
                block_id,
                keys[len(block_ids)],
                in_ram=self.index.state_of(keys[len(block_ids)]) is KeyState.READY,
            )
            block_ids.append(block_id)
        self.index.unpin(slots)
        self.planner.in_vram_too(slots)
        self.uses.update(keys)
        return Running(keys, block_ids, len(held), len(slots))

    def end(self, running: Running) -> None:
        self.clock.advance(1.0)
        self.residency.used(reversed(running.block_ids))
        self.pool.let_go(running.block_ids, running.keys)

    def ask(self, numbers: Sequence[int]) -> int:
        """Blocks found in either tier."""
        running = self.start(numbers)
        self.end(running)
        self.settle(NOBODY)
        return running.in_vram + running.loaded

    def settle(self, line: Line) -> None:
        for _ in range(100):
            decision = self.planner.plan(self.pool, line)
            if decision.reservation is not None:
                self.complete(decision)
            elif not decision.not_worth:
                return
        raise AssertionError("stores do not end")

    def complete(self, decision: StoreDecision) -> None:
        assert decision.reservation is not None
        self.index.publish(decision.reservation.slots)
        for candidate in decision.candidates:
            self.residency.copied(candidate.key)
            self.stores[candidate.key] += 1
        self.planner.ended(len(decision.candidates))

    def check(self) -> None:
        self.index.check()
        self.residency.check()
        assert self.lost == 0, "VRAM took a block that was due"
        too_many = {k: (n, self.uses[k]) for k, n in self.stores.items() if n > 2 * self.uses[k]}
        assert not too_many, f"stored more than twice a use: {too_many}"


class Running:
    def __init__(self, keys: Sequence[BlockKey], block_ids: list[int], in_vram: int, loaded: int) -> None:
        self.keys = keys
        self.block_ids = block_ids
        self.in_vram = in_vram
        self.loaded = loaded


def talk(number: int, blocks: int = 4) -> list[int]:
    return list(range(100 * number, 100 * number + blocks))


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_conversations_in_turn_that_fit_vram_and_ram_together_are_all_found(policy: str) -> None:
    server = Server(vram=20, ram=24, policy=policy)
    for turn in range(4):
        found = [server.ask(talk(number)) for number in range(10)]
        assert found == ([0] * 10 if turn == 0 else [4] * 10), turn
        server.check()


def test_with_write_through_every_block_has_a_copy_and_the_loop_finds_nothing() -> None:
    server = Server(vram=20, ram=24, threshold=0.0)
    assert [server.ask(talk(number)) for _ in range(3) for number in range(10)] == [0] * 30
    server.check()


def test_ram_with_room_for_all_gives_nothing_up_and_copies_each_block_once() -> None:
    server = Server(vram=20, ram=100, ahead=4)
    for _ in range(4):
        for number in range(20):
            server.ask(talk(number))
    assert server.index.evictions == 0
    assert max(server.stores.values()) == 1
    server.check()


def test_a_copy_is_given_up_while_its_block_is_in_use_and_made_again_before_vram_takes_it() -> None:
    server = Server(vram=8, ram=8)
    for number in range(3):
        server.ask(talk(number))
    running = server.start(talk(0))
    assert running.loaded == 4
    assert server.index.evictions == 0, "0 and 1 are in RAM, 1 and 2 in VRAM"
    second = server.start(talk(1))
    assert second.loaded == 4
    assert [server.index.match([key(k)]) for k in talk(2)].count([]) == 0, "2 took the place of spare copies of 0"
    assert server.index.match([key(0)]) == []
    assert not server.residency.is_clean(key(0))
    server.end(running)
    server.end(second)
    assert server.ask(talk(2)) == 4
    server.check()


def test_a_pinned_copy_is_not_spare() -> None:
    server = Server(vram=8, ram=8)
    for number in range(3):
        server.ask(talk(number))
    running = server.start(talk(0))
    pinned = server.index.match([key(k) for k in talk(0)])
    server.index.pin(pinned)
    server.settle(Line(4, 4))
    assert server.index.match([key(k) for k in talk(0)]) == pinned
    server.index.unpin(pinned)
    server.end(running)
    server.check()


PROMPTS = st.lists(
    st.tuples(st.integers(0, 11), st.integers(1, 6), st.booleans()),
    min_size=1,
    max_size=60,
)


@settings(deadline=None, max_examples=60)
@given(
    prompts=PROMPTS,
    policy=st.sampled_from(EVICTION_POLICIES),
    ram=st.integers(1, 40),
    ahead=st.integers(0, 4),
    threshold=st.sampled_from([0.0, 0.5, 0.8, 1.0]),
)
def test_whatever_is_asked_no_block_that_is_due_is_taken_and_none_is_stored_more_than_twice_a_use(
    prompts: list[tuple[int, int, bool]], policy: str, ram: int, ahead: int, threshold: float
) -> None:
    server = Server(vram=20, ram=ram, policy=policy, ahead=ahead, threshold=threshold)
    running: list[Running] = []
    for number, blocks, goes_on in prompts:
        # The pool's model knows no block of two requests.
        while any(key(100 * number) in r.keys for r in running) or sum(len(r.keys) for r in running) + blocks > 20:
            server.end(running.pop(0))
        running.append(server.start(talk(number, blocks)))
        while len(running) > (2 if goes_on else 0):
            server.end(running.pop(0))
        if threshold:
            server.check()
        else:
            server.index.check()
            server.residency.check()


def test_what_a_request_let_go_of_is_judged_as_a_whole_and_head_first() -> None:
    """VRAM takes the tail first: judged later, the head would be declined behind a tail that is useless without it."""
    server = Server(vram=8, ram=4, threshold=1.0)
    server.end(server.start(talk(0)))
    server.end(server.start(talk(1)))
    decision = server.planner.plan(server.pool, Line(1, 1))
    assert [c.key for c in decision.candidates] == [key(number) for number in talk(0)]


def test_the_policy_finds_room_only_for_what_loads_under_way_will_not_leave() -> None:
    server = Server(vram=8, ram=8, threshold=1.0)
    for number in range(4):
        server.ask(talk(number))
    loading = server.index.match([key(number) for number in talk(1)])
    assert len(loading) == 4
    server.index.pin(loading)
    decision = server.planner.plan(server.pool, Line(4, 4))
    assert (decision.candidates, decision.evicted) == ((), ()), "the load under way will leave four slots"
    server.index.unpin(loading)
    decision = server.planner.plan(server.pool, Line(4, 4))
    assert set(decision.evicted) == {key(number) for number in talk(0)}
    server.complete(decision)
    server.check()
