"""Which blocks are brought back, against a VRAM that the test fills and empties."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Any

import pytest

from kvortex.cache.costs import StepCosts
from kvortex.cache.index import BlockIndex, Reservation
from kvortex.cache.policies import make_policy
from kvortex.cache.prefetch.budget import WASTE_SHARE, Cause, PrefetchBudget
from kvortex.cache.prefetch.demand import Demand
from kvortex.cache.prefetch.planner import MAX_OF_SCOPE, MAX_TARGETS, PrefetchPlanner
from kvortex.cache.prefetch.target import Chunk, Target
from kvortex.cache.sessions.announcements import HINT_LASTS_S
from kvortex.cache.sessions.book import SessionBook
from kvortex.cache.sessions.rhythm import HABITS
from kvortex.cache.sessions.session import Scope, Session
from kvortex.keys import BlockKey, block_key
from tests.fakes.clock import FakeClock

BLOCK_SIZE = 16
NOBODY = Scope()


def keys_of(conversation: int, count: int) -> list[BlockKey]:
    return [block_key(f"{conversation:016}{i:016}".encode(), 0) for i in range(count)]


class FakeVram:
    """Blocks by key, the next to go first."""

    def __init__(self, capacity: int) -> None:
        self.free_blocks = capacity
        self.content: dict[BlockKey, Session | None] = {}
        self.taken = 0
        self.kept: list[Target] = []

    def holds(self, key: BlockKey) -> bool:
        return key in self.content

    def takeable(
        self, count: int, p_return: Callable[[Session], float], below: float, own: Collection[BlockKey]
    ) -> int:
        unused = self.free_blocks - len(self.content)
        if count <= unused:
            return count
        owners = [owner for key, owner in self.content.items() if key not in own][: count - unused]
        for i, owner in enumerate(owners):
            if owner is not None and p_return(owner) >= below:
                return unused + i
        return count

    def keep(self, target: Target) -> None:
        self.kept.append(target)


class Stage:
    """A planner with all of its neighbours."""

    def __init__(self, capacity: int = 200, slots: int = 4000) -> None:
        self.clock = FakeClock(0.0)
        self.book = SessionBook(100_000)
        self.index = BlockIndex(slots, make_policy("lru", slots, idle_after_s=30.0))
        self.vram = FakeVram(capacity)
        self.capacity = capacity
        self.budget = PrefetchBudget(capacity)
        self.demand = Demand(capacity, 0.0)
        self.loading: set[BlockKey] = set()
        self.planner = PrefetchPlanner(
            self.book,
            self.index,
            self.vram,
            self.budget,
            self.demand,
            StepCosts(),
            block_size=BLOCK_SIZE,
            loading=self.loading.__contains__,
        )
        self.planner.heard_of_link(0, 1600.0)  # a chunk of 16 blocks

    def store(self, keys: list[BlockKey]) -> None:
        answer = self.index.reserve(self.index.absent(keys))
        assert isinstance(answer, Reservation)
        self.index.publish(answer.slots)

    def talk(self, conversation: int, blocks: int = 40, *, gaps_s: float = 2.0, turns: int = 3) -> Session:
        """A conversation of some turns whose blocks RAM has, and VRAM lost."""
        keys = keys_of(conversation, blocks)
        for turn in range(turns):
            if turn:
                self.clock.advance(gaps_s)
            session = self.book.arrived(NOBODY, f"s{conversation}", keys, self.clock())
            self.book.ended(session, keys, blocks, blocks * BLOCK_SIZE, self.clock())
        self.store(keys)
        self.book.lost(keys[-1])
        return session

    def plan(self, *, running: bool = False, requests_load: bool = False) -> Chunk | None:
        chunk = self.planner.plan(self.clock(), running=running, requests_load=requests_load)
        if chunk is not None:
            self.planner.issued(chunk)
            self.loading.update(chunk.keys)
            self.vram.free_blocks -= len(chunk.keys)
        return chunk

    def end(self, chunk: Chunk, *, failed: bool = False) -> None:
        self.loading.difference_update(chunk.keys)
        self.vram.free_blocks += len(chunk.keys)
        self.planner.ended(chunk, failed=failed)
        cause = chunk.target.cause
        if failed:
            self.budget.wasted(cause, len(chunk.keys))
            return
        for key in chunk.keys:
            self.vram.content[key] = chunk.target.session
        while len(self.vram.content) > self.vram.free_blocks:
            self.vram.content.pop(next(iter(self.vram.content)))

    def bring_all(self) -> list[BlockKey]:
        """Plans and ends until nothing more is planned."""
        brought: list[BlockKey] = []
        while chunk := self.plan():
            brought += chunk.keys
            self.end(chunk)
        return brought


def generous(stage: Stage) -> Stage:
    """Guesses have been good so far."""
    stage.budget.requests_loaded(10_000)
    stage.budget.issued(Cause.GUESS, 400)
    stage.budget.used(Cause.GUESS, 400)
    return stage


def returning(stage: Stage, after_s: float) -> None:
    """All have come back after so long."""
    for habit in HABITS:
        for _ in range(300):
            stage.book.rhythms.returned(habit, after_s)


def test_a_conversation_comes_back_head_first_in_chunks_and_once() -> None:
    stage = generous(Stage())
    session = stage.talk(1, 40)
    first = stage.plan()
    assert first is not None
    assert (first.start, len(first.keys), first.target.session) == (0, 16, session)
    stage.end(first)
    assert list(first.keys) + stage.bring_all() == keys_of(1, 40)
    assert stage.plan() is None


def test_only_what_vram_lacks_is_loaded() -> None:
    stage = generous(Stage())
    stage.talk(1, 40)
    stage.vram.content.update(dict.fromkeys(keys_of(1, 30)))
    assert stage.bring_all() == keys_of(1, 40)[30:]


def test_two_chunks_are_under_way_at_most_and_follow_each_other() -> None:
    stage = generous(Stage())
    stage.talk(1, 100)
    one, two = stage.plan(), stage.plan()
    assert one is not None
    assert two is not None
    assert (one.start, two.start) == (0, 16)
    assert stage.plan() is None
    stage.end(one)
    assert stage.plan() is not None


def test_a_chunk_that_ends_before_the_one_ahead_of_it_is_not_brought_again() -> None:
    stage = generous(Stage())
    stage.talk(1, 24)
    one, two = stage.plan(), stage.plan()
    assert one is not None
    assert two is not None
    assert (len(one.keys), two.start, len(two.keys)) == (16, 16, 8)
    stage.end(two)
    assert stage.plan() is None
    stage.end(one)
    assert stage.plan() is None


def test_what_has_not_begun_is_dropped_when_the_request_comes() -> None:
    stage = generous(Stage())
    session = stage.talk(1, 100)
    chunk = stage.plan()
    assert chunk is not None
    stage.book.arrived(NOBODY, "s1", session.keys, stage.clock())
    assert stage.plan() is None
    stage.end(chunk)
    assert stage.plan() is None


def test_loads_of_requests_go_first() -> None:
    stage = generous(Stage())
    stage.talk(1)
    assert stage.plan(requests_load=True) is None
    assert stage.plan() is not None


def test_the_margin_stays_free() -> None:
    stage = generous(Stage(capacity=200))
    stage.talk(1, 40)
    stage.vram.free_blocks = stage.demand.margin_blocks
    assert stage.plan() is None
    stage.vram.free_blocks += 5
    chunk = stage.plan()
    assert chunk is not None
    assert len(chunk.keys) == 5
    assert stage.vram.free_blocks == stage.demand.margin_blocks


def test_after_a_shortage_nothing_is_taken_from_what_little_is_free() -> None:
    stage = generous(Stage(capacity=200))
    stage.talk(1, 40)
    stage.vram.free_blocks = 50
    stage.demand.ran_short()
    assert stage.plan() is None
    stage.clock.advance(120.0)
    stage.demand.saw(150, 0, stage.clock())
    assert stage.plan() is None  # the burst that took them
    stage.clock.advance(200.0)
    stage.demand.saw(150, 0, stage.clock())
    stage.talk(1, 40)
    assert stage.plan() is not None


def test_while_requests_run_the_link_is_shared() -> None:
    stage = generous(Stage())
    stage.talk(1, 100)
    assert stage.plan(running=True) is not None  # what idle time saved up: one chunk
    moved = 0
    for _ in range(100):
        stage.clock.advance(0.01)
        if chunk := stage.plan(running=True):
            moved += len(chunk.keys)
            stage.end(chunk)
            stage.budget.used(chunk.target.cause, len(chunk.keys))
        stage.vram.content.clear()
    # In a second the link moves 1600 blocks; half of its time is the most.
    assert moved == pytest.approx(800, rel=0.1)


def test_the_slowest_rank_counts_as_it_is_now() -> None:
    stage = generous(Stage())
    stage.talk(1, 100)
    stage.planner.heard_of_link(1, 400.0)
    one = stage.plan()
    stage.planner.heard_of_link(1, 800.0)
    two = stage.plan()
    assert one is not None
    assert two is not None
    assert (len(one.keys), len(two.keys)) == (4, 8)


def test_the_likelier_conversation_comes_first() -> None:
    stage = generous(Stage())
    stage.talk(1, 30, gaps_s=2.0)
    old = stage.talk(2, 30, gaps_s=200.0)
    stage.clock.advance(600.0)
    tool = stage.talk(3, 30, gaps_s=2.0)
    first = stage.plan()
    assert first is not None
    assert first.target.session is tool
    assert old.number != tool.number


def test_of_those_that_are_sure_to_return_the_one_that_is_due_comes_first() -> None:
    """Both will be back well before VRAM loses anything: whoever is brought early only takes the other's place."""
    stage = generous(Stage())
    for habit in HABITS:
        for _ in range(200):
            for bin_ in range(4):
                stage.book.rhythms.stayed_silent(habit, bin_)
            stage.book.rhythms.returned(habit, 3.0)
    due = stage.talk(1, 30)
    stage.clock.advance(2.5)
    fresh = stage.talk(2, 30, turns=1)
    horizon_s = 60.0
    assert min(stage.book.p_return_within(s, stage.clock(), horizon_s) for s in (due, fresh)) > 0.9
    first = stage.plan()
    assert first is not None
    assert first.target.session is due


def test_nothing_goes_that_is_as_likely_to_be_asked_for() -> None:
    stage = generous(Stage(capacity=40))
    returning(stage, 100.0)
    lost, there = stage.talk(1, 20, turns=1), stage.talk(2, 40, turns=1)
    stage.vram.content.update(dict.fromkeys(there.keys, there))
    assert stage.plan() is None
    stage.clock.advance(1.0)
    stage.vram.content.update(dict.fromkeys(there.keys))  # the same blocks, of nobody's
    chunk = stage.plan()
    assert chunk is not None
    assert chunk.target.session is lost


def test_nobody_is_guessed_who_comes_back_later_than_vram_would_keep_it() -> None:
    """Expected in twenty seconds, and VRAM is used over in two; then it is at rest."""
    stage = generous(Stage(capacity=400))
    returning(stage, 20.0)
    lost = stage.talk(1, 20, turns=1)
    for _ in range(100):
        stage.clock.advance(0.1)
        stage.demand.saw(20, 20, stage.clock())
        stage.demand.saw(0, 0, stage.clock())
    assert 1.5 < stage.demand.lasts_s(stage.capacity) < 2.5
    assert stage.plan() is None
    stage.demand = stage.planner._demand = Demand(stage.capacity, stage.clock())
    stage.clock.advance(1.0)
    chunk = stage.plan()
    assert chunk is not None
    assert chunk.target.session is lost


@pytest.mark.parametrize(("p", "is_guessed"), [(0.45, False), (0.55, True)])
def test_who_is_likelier_to_return_than_not_is_guessed(
    monkeypatch: pytest.MonkeyPatch, p: float, is_guessed: bool
) -> None:
    stage = generous(Stage(capacity=400))
    stage.talk(1, 10)
    monkeypatch.setattr(stage.book, "p_return_within", lambda *_: p)
    assert (stage.plan() is not None) == is_guessed


def test_a_look_that_led_to_nothing_is_not_repeated_at_every_step() -> None:
    stage = generous(Stage())
    stage.talk(1)
    stage.vram.takeable = lambda *_: 0  # type: ignore[method-assign]
    looks = 0

    def likeliest(*arguments: Any) -> list[tuple[float, Session]]:
        nonlocal looks
        looks += 1
        return SessionBook.likeliest(stage.book, *arguments)

    stage.book.likeliest = likeliest  # type: ignore[method-assign]
    for _ in range(100):
        stage.clock.advance(0.01)
        assert stage.plan() is None
    assert 3 <= looks <= 5


def test_who_is_not_in_ram_is_not_looked_at_again() -> None:
    stage = generous(Stage())
    session = stage.talk(1)
    stage.index.reset()
    assert stage.plan() is None
    assert stage.book.likeliest(stage.clock(), 10.0, 8) == []
    assert session.is_silent


def test_a_failed_load_is_not_tried_again() -> None:
    stage = generous(Stage())
    stage.talk(1)
    chunk = stage.plan()
    assert chunk is not None
    stage.end(chunk, failed=True)
    assert stage.plan() is None


def test_hints_go_before_guesses_and_waiting_requests_before_hints() -> None:
    stage = generous(Stage(capacity=400))
    returning(stage, 10.0)
    guessed, hinted = stage.talk(1, 10), stage.talk(2, 10)
    stage.store(keys_of(3, 10))
    stage.planner.hint(NOBODY, hinted.keys, hinted, stage.clock())
    stage.planner.request_waits("r", keys_of(3, 10), None, stage.clock())
    brought = stage.bring_all()
    assert brought == keys_of(3, 10) + keys_of(2, 10) + keys_of(1, 10)
    assert guessed.is_silent


def test_what_vram_has_of_a_hinted_session_is_kept_and_of_a_guessed_one_not() -> None:
    stage = generous(Stage(capacity=400))
    guessed, hinted = stage.talk(1, 10), stage.talk(2, 10)
    stage.vram.content = dict.fromkeys([*guessed.keys, *hinted.keys])
    stage.planner.hint(NOBODY, hinted.keys, hinted, stage.clock())
    assert stage.bring_all() == []
    assert [target.session for target in stage.vram.kept] == [hinted]


def test_hints_that_were_worth_nothing_keep_nothing() -> None:
    stage = Stage(capacity=400)
    stage.budget.issued(Cause.HINT, 300)
    stage.budget.wasted(Cause.HINT, 300)
    hinted = stage.talk(2, 10)
    stage.vram.content = dict.fromkeys(hinted.keys)
    stage.planner.hint(NOBODY, hinted.keys, hinted, stage.clock())
    assert stage.plan() is None
    assert stage.vram.kept == []


def test_a_session_that_is_announced_each_time_is_not_guessed() -> None:
    stage = generous(Stage(capacity=400))
    returning(stage, 10.0)
    silent, announced = stage.talk(1, 10), stage.talk(2, 10)
    stage.book.announced(announced, stage.clock())
    stage.clock.advance(1.0)
    stage.book.arrived(NOBODY, "s2", announced.keys, stage.clock())
    stage.book.ended(announced, announced.keys, 10, 10 * BLOCK_SIZE, stage.clock())
    stage.book.lost(announced.keys[-1])
    assert announced.announces
    assert set(stage.bring_all()) == set(silent.keys)


@pytest.mark.parametrize("announced", [True, False])
def test_where_all_sessions_are_announced_a_new_one_is_not_guessed(announced: bool) -> None:
    stage = generous(Stage(capacity=400))
    session = stage.talk(1, 10, turns=1)
    for _ in range(200):
        stage.book.rhythms.returned(session.habit, 2.0)
    for _ in range(100):
        stage.book.announcements.returned(2.0 if announced else None)
    assert bool(stage.bring_all()) != announced


def test_a_hinted_session_goes_before_one_that_returns_later() -> None:
    """VRAM is full of a session that nearly surely returns, some time; the hinted one comes in a second."""
    stage = generous(Stage(capacity=20))
    other, hinted = stage.talk(1, 10, gaps_s=20.0, turns=8), stage.talk(2, 10)
    for _ in range(100):
        stage.book.rhythms.returned(other.habit, 20.0)
    stage.vram.content = dict.fromkeys([*other.keys, *keys_of(7, 10)], other)
    for _ in range(50):
        stage.book.announcements.returned(1.0)
    stage.planner.hint(NOBODY, hinted.keys, hinted, stage.clock())
    assert stage.book.p_return_within(other, stage.clock(), stage.demand.lasts_s(20)) > 0.9
    assert stage.bring_all()[:1] == hinted.keys[:1]


def test_waiting_requests_are_brought_in_their_order_and_left_when_they_are_served() -> None:
    stage = generous(Stage(capacity=400))
    for i in range(3):
        stage.store(keys_of(i, 10))
        stage.planner.request_waits(f"r{i}", keys_of(i, 10), None, stage.clock())
    stage.planner.request_is_served("r1")
    assert stage.bring_all() == keys_of(0, 10) + keys_of(2, 10)


def test_a_hint_is_old_after_a_while_and_no_more_are_kept_than_the_bound() -> None:
    stage = generous(Stage())
    stage.store(keys_of(1, 10))
    assert stage.planner.hint(NOBODY, keys_of(1, 10), None, stage.clock())
    stage.clock.advance(HINT_LASTS_S + 1)
    assert stage.planner.may_plan(stage.clock())
    assert stage.plan() is None
    assert not stage.planner.may_plan(stage.clock())
    taken = [stage.planner.hint(NOBODY, keys_of(i, 1), None, stage.clock()) for i in range(MAX_TARGETS + 10)]
    assert taken.count(True) == MAX_OF_SCOPE


def test_a_caller_who_hints_at_all_there_is_leaves_room_for_others_until_his_hints_are_old() -> None:
    stage = generous(Stage())
    junk, other, third = Scope(caller="junk"), Scope(caller="other"), Scope(caller="third")
    for i in range(MAX_TARGETS):
        stage.planner.hint(junk, keys_of(i, 1), None, stage.clock())
    assert not stage.planner.hint(junk, keys_of(2000, 1), None, stage.clock())
    assert stage.planner.hint(junk, keys_of(0, 1), None, stage.clock()), "that one is there"
    taken = [stage.planner.hint(other, keys_of(3000 + i, 1), None, stage.clock()) for i in range(MAX_TARGETS)]
    assert taken.count(True) == MAX_TARGETS - MAX_OF_SCOPE
    assert not stage.planner.hint(third, keys_of(9000, 1), None, stage.clock())
    stage.clock.advance(HINT_LASTS_S + 1)
    assert stage.planner.hint(third, keys_of(9000, 1), None, stage.clock())


def test_forgotten_targets_are_not_brought() -> None:
    stage = generous(Stage())
    stage.store(keys_of(1, 10))
    stage.planner.hint(NOBODY, keys_of(1, 10), None, stage.clock())
    stage.planner.request_waits("r", keys_of(1, 10), None, stage.clock())
    stage.planner.forget_targets()
    assert stage.plan() is None


@pytest.mark.parametrize("hints", [False, True])
def test_a_thousand_sessions_that_never_return_waste_within_the_bound(hints: bool) -> None:
    stage = Stage(capacity=200, slots=30_000)
    rng = random.Random(2)
    wasted = 0
    for i in range(1000):
        session = stage.talk(i, 20, turns=1)
        if hints:
            stage.planner.hint(NOBODY, session.keys, session, stage.clock())
        stage.clock.advance(rng.uniform(0.01, 0.3))
        stage.budget.requests_loaded(2)
        before = set(stage.vram.content)
        causes: dict[BlockKey, Cause] = {}
        while chunk := stage.plan():
            causes |= dict.fromkeys(chunk.keys, chunk.target.cause)
            stage.end(chunk)
        # Nobody ever asks for what was brought: what it pushed out, and in time the rest, is wasted.
        for key in [*causes, *before]:
            stage.vram.content.pop(key, None)
        for cause in causes.values():
            stage.budget.wasted(cause, 1)
        wasted += len(causes)
    loaded = 2 * 1000 + stage.budget.count.issued
    assert wasted == stage.budget.count.wasted
    assert wasted <= 1.1 * WASTE_SHARE * loaded + 0.02 * 200 + 16
