"""What the adaptive policy promises on its own: bounds, learning, and the judge."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvortex.cache.policies import Adaptive
from kvortex.cache.policies.adaptive import policy as policy_module
from kvortex.cache.policies.adaptive.facts import NUM_FACTS, cut
from kvortex.cache.policies.adaptive.hazard import EDGES_S, NUM_BINS, HazardModel, age_bin
from kvortex.cache.policies.adaptive.lru_judge import LRUJudge
from kvortex.cache.policies.adaptive.prompts import Stretch
from kvortex.cache.policies.adaptive.runs import NO_RUN, NO_SLOT, Runs, Visit
from kvortex.keys import BlockKey, block_key
from tests.fakes.clock import FakeClock

NUM_SLOTS = 8


def keys_of(*numbers: int) -> list[BlockKey]:
    return [block_key(number.to_bytes(32, "little"), 0) for number in numbers]


@pytest.fixture
def few_ghosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "_MIN_GHOSTS", 4)
    monkeypatch.setattr(policy_module, "_MIN_BIRTHS", 16)


# ---- bounds


def test_what_is_remembered_is_bounded(few_ghosts: None) -> None:
    clock = FakeClock()
    policy = Adaptive(NUM_SLOTS, clock=clock)
    for number in range(500):
        clock.advance(1.0)
        policy.prompt(keys_of(*range(10 * number, 10 * number + 6)), 96)
        policy.check()
        assert policy._known.num_ghosts <= NUM_SLOTS
    assert len(policy._runs.birth) < 50


def test_a_held_block_outlives_the_memory_of_its_prompt(few_ghosts: None) -> None:
    clock = FakeClock()
    policy = Adaptive(NUM_SLOTS, clock=clock)
    policy.prompt(keys_of(1, 2, 3), 48)
    policy.admitted([0, 1, 2], keys_of(1, 2, 3))
    for number in range(10, 60):
        clock.advance(1.0)
        policy.prompt(keys_of(number), 16)
    policy.check()
    policy.prompt(keys_of(1, 2, 3, 4), 64)
    policy.check()
    assert policy.evict(3) == [2, 1, 0]


def one_by_one(policy: Adaptive) -> Adaptive:
    """The same policy without its short cuts: each block is moved, and looked for in its run, on its own."""
    runs = policy._runs

    def held(known: dict[int, int]) -> list[Stretch]:
        return [Stretch(j, [slot], runs.run_of[slot], runs.depth_of[slot]) for j, slot in known.items() if slot >= 0]

    def add(slot: int, run: int, depth: int, *, blocked: bool = False, behind: int = NO_SLOT) -> None:
        Runs.add(runs, slot, run, depth, blocked=blocked)

    policy._told._held = held  # type: ignore[method-assign]
    runs.add = add  # type: ignore[method-assign]
    return policy


def assert_same(one: Adaptive, other: Adaptive) -> None:
    """They know the same, down to which of two equal key objects is kept, and would give up the same in turn."""
    assert one._runs._columns == other._runs._columns
    for its_keys, others_keys in zip(one._runs.keys, other._runs.keys, strict=True):
        assert [id(key) for key in its_keys] == [id(key) for key in others_keys]
    assert one._runs.run_of == other._runs.run_of
    assert one._runs._blocked == other._runs._blocked
    alive = [run for run, birth in enumerate(one._runs.birth) if birth >= 0]
    for run in alive:
        assert list(one._runs.from_deepest(run)) == list(other._runs.from_deepest(run))
        assert [one._runs.depth_of[slot] for slot in one._runs.from_deepest(run)] == [
            other._runs.depth_of[slot] for slot in other._runs.from_deepest(run)
        ]
    for ranked in ("_by_rank", "_by_age", "_others"):
        assert vars(getattr(one._leaves, ranked)) == vars(getattr(other._leaves, ranked))


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 10**6))
def test_every_count_holds_whatever_happens(seed: int) -> None:
    """A tiny memory, prompts that are prefixes of each other, stores in any order; with short cuts and without."""
    generator = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_module, "_MIN_GHOSTS", 4)
        patch.setattr(policy_module, "_MIN_BIRTHS", 16)
        clock = FakeClock()
        policy, plain = Adaptive(NUM_SLOTS, clock=clock), one_by_one(Adaptive(NUM_SLOTS, clock=clock))
    both = policy, plain
    held: dict[BlockKey, int] = {}
    blocked: set[int] = set()
    chains = [[100 * chain + i for i in range(9)] for chain in range(4)]
    for _ in range(60):
        clock.advance(generator.choice([0.0, 1.0, 20.0, 4000.0]))
        chain = generator.choice(chains)
        keys = keys_of(*chain[: generator.randint(1, 9)])
        for each in both:
            each.prompt(keys, 16 * len(keys))
        if generator.random() < 0.5:
            answer = keys_of(*chain[: len(keys) + 2])
            for each in both:
                each.answered(answer, 30)
        fresh = [key for key in keys if key not in held][: NUM_SLOTS - len(blocked)]
        if generator.random() < 0.5:
            generator.shuffle(fresh)
        lacking = len(fresh) - (NUM_SLOTS - len(held))
        victims, declined = policy.choose(fresh, lacking) if lacking > 0 else ([], frozenset())
        if lacking > 0:
            assert plain.choose(fresh, lacking) == (victims, declined)
        held = {key: slot for key, slot in held.items() if slot not in victims}
        fresh = [key for key in fresh if key not in declined]
        slots = [slot for slot in range(NUM_SLOTS) if slot not in held.values()][: len(fresh)]
        held.update(zip(fresh, slots, strict=True))
        pinned = [slot for slot in held.values() if slot not in blocked and generator.random() < 0.2]
        unpinned = [slot for slot in blocked if generator.random() < 0.5]
        for each in both:
            each.admitted(slots, fresh)
            each.blocked(pinned)
            each.evictable(unpinned)
        blocked = (blocked | set(pinned)) - set(unpinned)
        if held and generator.random() < 0.2:
            key, slot = generator.choice(list(held.items()))
            for each in both:
                each.removed([slot])
            del held[key]
            blocked.discard(slot)
        policy.check()
        assert_same(policy, plain)
        for key, place in policy._known._places.items():
            if place >= 0:
                its_keys = policy._runs.keys[policy._runs.run_of[place]]
                assert its_keys[policy._runs.depth_of[place]] is key, "its bytes are kept twice"
        assert len(policy) == len(held) - len(blocked)


def test_ghosts_among_blocks_that_nobody_told_of_stay_in_their_own_runs() -> None:
    """Of a run given up only some blocks are remembered; between them, its old blocks are strangers."""
    policy = Adaptive(NUM_SLOTS, clock=FakeClock())
    prompt = keys_of(*range(8))
    policy.prompt(prompt, 128)
    policy.admitted(list(range(8)), prompt)
    assert sorted(policy.evict(5)) == [3, 4, 5, 6, 7]
    policy.admitted([3, 4, 5, 6, 7], prompt[3:])
    policy.check()
    assert sorted(policy.evict(8)) == list(range(8))


@given(num_blocks=st.integers(1, 20), data=st.data())
def test_every_fourth_block_given_up_and_the_last_is_remembered(num_blocks: int, data: st.DataObject) -> None:
    keys = keys_of(*range(num_blocks))
    given_up = sorted(data.draw(st.sets(st.integers(0, num_blocks - 1), min_size=1)), reverse=True)
    ghosts, forgotten = policy_module._remembered(keys, given_up)
    assert set(ghosts) == {keys[d] for d in given_up if d % 4 == 3 or d == num_blocks - 1}
    assert sorted(ghosts + forgotten) == sorted(keys[d] for d in given_up)


# ---- what it gives up


def test_an_answers_blocks_belong_to_its_prompt() -> None:
    policy = Adaptive(NUM_SLOTS, clock=FakeClock())
    policy.prompt(keys_of(1, 2), 32)
    policy.answered(keys_of(1, 2, 3, 4), 32)
    policy.admitted([0, 1, 2, 3], keys_of(1, 2, 3, 4))
    policy.check()
    assert policy.evict(4) == [3, 2, 1, 0]


def test_a_head_under_a_pinned_tail_goes_only_when_nothing_else_is_left() -> None:
    policy = Adaptive(NUM_SLOTS, clock=FakeClock())
    for numbers, slots in (((1, 2), [0, 1]), ((11, 12), [2, 3])):
        policy.prompt(keys_of(*numbers), 32)
        policy.admitted(slots, keys_of(*numbers))
    policy.blocked([1])
    assert policy.evict(3) == [3, 2, 0]


def test_new_blocks_that_are_worth_least_are_declined_from_their_tail() -> None:
    """Conversations come back every 30 s, one-off prompts never: after some time the latter are not stored."""
    clock = FakeClock()
    policy = Adaptive(NUM_SLOTS, clock=clock)
    talks = [keys_of(*range(100 * talk, 100 * talk + 4)) for talk in range(2)]
    slot_of: dict[BlockKey, int] = {}
    declined_share = []
    for step in range(400):
        clock.advance(15.0)
        one_off = keys_of(*range(10_000 + 10 * step, 10_000 + 10 * step + 4))
        for keys, output in ((talks[step % 2], 300), (one_off, 10)):
            policy.prompt(keys, 64)
            fresh = [key for key in keys if key not in slot_of]
            lacking = len(fresh) - (NUM_SLOTS - len(slot_of))
            victims, declined = policy.choose(fresh, lacking) if lacking > 0 else ([], frozenset())
            slot_of = {key: slot for key, slot in slot_of.items() if slot not in victims}
            kept = [key for key in fresh if key not in declined]
            assert kept == fresh[: len(kept)]
            free = [slot for slot in range(NUM_SLOTS) if slot not in slot_of.values()][: len(kept)]
            policy.admitted(free, kept)
            slot_of.update(zip(kept, free, strict=True))
            policy.answered(keys, output)
        declined_share.append(len(declined) / 4)
    assert np.mean(declined_share[-100:]) > 0.9


# ---- what it learns


def test_a_prompt_is_cut_where_the_history_of_its_blocks_changes() -> None:
    parts = [(c.start, c.end, c.uses, c.is_new, c.is_edge) for c in cut([(3, 1), (3, 1), (2, 1)], 6)]
    assert parts == [(0, 2, 3, False, False), (2, 3, 2, False, False), (3, 5, 1, True, False), (5, 6, 1, True, True)]
    assert [(c.start, c.end) for c in cut([], 1)] == [(0, 1)]
    assert [(c.start, c.end) for c in cut([(2, 1)], 1)] == [(0, 1)]
    assert [(c.start, c.end) for c in cut([(2, 1)] * 3, 3)] == [(0, 2), (2, 3)]


def test_what_comes_back_after_a_minute_is_worth_most_just_before_that() -> None:
    model = HazardModel(NUM_FACTS)
    facts = np.zeros(NUM_FACTS, np.float32).tobytes()
    at = age_bin(60.0)
    for now_s in range(400):
        for bin_ in range(at):
            model.saw(facts, bin_, hit=False, blocks=1, class_=0)
        model.saw(facts, at, hit=True, blocks=1, class_=0)
        model.learn(float(now_s))
    worth = model.worth([[0.0] * NUM_FACTS], [0])[0]
    assert worth[at] > 3 * worth[0]
    assert worth[at] > 1 / 60


def test_what_never_comes_back_is_worth_less_than_what_does() -> None:
    model = HazardModel(2)
    returns, leaves = (np.array(facts, np.float32).tobytes() for facts in ([1.0, 0.0], [0.0, 1.0]))
    for now_s in range(300):
        for bin_ in range(10):
            model.saw(leaves, bin_, hit=False, blocks=4, class_=1)
        model.saw(returns, 5, hit=True, blocks=4, class_=0)
        model.learn(float(now_s))
    worth = model.worth([[1.0, 0.0], [0.0, 1.0]], [0, 1])
    assert worth[0][0] > 5 * worth[1][0]


@given(hits=st.lists(st.booleans(), min_size=64, max_size=640), data=st.data())
def test_worth_is_that_of_the_best_horizon(hits: list[bool], data: st.DataObject) -> None:
    model = HazardModel(NUM_FACTS)
    nothing = np.zeros(NUM_FACTS, np.float32)
    for hit in hits:
        bin_ = data.draw(st.integers(0, NUM_BINS - 1)) if hit else 0
        model.saw(nothing.tobytes(), bin_, hit=hit, blocks=4, class_=1)
    model.learn(0.0)
    worth = model.worth([nothing.tolist(), nothing.tolist()], [0, 0])
    hazard = np.minimum(1 / (1 + np.exp(-model._base)), 0.95)  # without facts, in a class of which nothing is known
    for start in range(NUM_BINS):
        alive, gained, spent, best = 1.0, 0.0, 0.0, 0.0
        for bin_ in range(start, NUM_BINS):
            gained += alive * hazard[bin_]
            spent += alive * (EDGES_S[bin_ + 1] - EDGES_S[bin_]) * (1 - hazard[bin_] / 2)
            alive *= 1 - hazard[bin_]
            best = max(best, gained / spent)
        assert worth[:, start] == pytest.approx([best, best], rel=1e-4)
    assert (worth[:, NUM_BINS] == worth[:, NUM_BINS - 1]).all()


def test_ages_fall_into_bins_and_the_oldest_into_the_last() -> None:
    assert age_bin(0.0) == 0
    assert age_bin(EDGES_S[3]) == 3
    assert age_bin(1e9) == len(EDGES_S) - 2


# ---- the judge


def lose(judge: LRUJudge, windows: int) -> list[bool]:
    words = []
    for _ in range(windows):
        judge.saw(own=0, lru=4096, blocks=4096)
        words.append(judge.be_lru)
    return words


def test_lru_has_the_word_for_longer_each_time_that_it_would_have_won() -> None:
    words = lose(LRUJudge(1), 12)
    #        lost  LRU    grace  lost  LRU         LRU    grace  lost  LRU x 4
    assert words == [True, False, False, True, True, False, False, True, True, True, True, False]


def test_a_small_loss_is_chance() -> None:
    judge = LRUJudge(1)
    judge.saw(own=1000, lru=1040, blocks=4096)
    assert not judge.be_lru
    judge.saw(own=1000, lru=1100, blocks=4096)
    assert judge.be_lru


# ---- the tree


def test_blocks_on_which_a_held_run_hangs_stay() -> None:
    runs = Runs(NUM_SLOTS)
    visit = Visit(1, 0, 0.0, 0.0, 4, 64, 0.0, 10.0, 0)
    parent = runs.new(0, 0.0, visit, tuple(keys_of(1, 2, 3, 4)), uses=1, sessions=1)
    kid = runs.new(1, 0.0, visit, tuple(keys_of(5)), uses=1, sessions=1)
    for depth in range(4):
        runs.add(depth, parent, depth)
    runs.hang(kid, parent, 1)
    assert runs.remove_tail(parent, 1) == ([3], NO_RUN)
    runs.add(7, kid, 0)
    assert runs.remove_tail(parent, 9) == ([2], NO_RUN)
    assert not runs.is_leaf(parent)
    assert runs.remove(7) == parent
    assert runs.is_leaf(parent)
    assert runs.remove_tail(parent, 9) == ([1, 0], NO_RUN)
    assert runs.deepest[parent] == NO_SLOT
    runs.extend(parent, [5, 6], 1)
    runs.extend(kid, [4], 0)
    assert runs.next_depth(parent) == 3
    assert list(runs.from_deepest(parent)) == [6, 5]
    assert runs.remove_tail(kid, 9) == ([4], parent)


def test_what_is_left_of_a_run_hangs_on_the_last_block_taken_from_it() -> None:
    policy = Adaptive(NUM_SLOTS, clock=FakeClock())
    policy.prompt(keys_of(1, 2, 3, 4, 5), 80)
    policy.admitted([0, 1, 2, 3, 4], keys_of(1, 2, 3, 4, 5))
    runs = policy._runs
    old = runs.run_of[3]
    assert [runs.depth_of[slot] for slot in (0, 3)] == [0, 3]
    policy.prompt(keys_of(1, 2, 3, 6), 64)
    new = runs.run_of[2]
    assert [runs.run_of[slot] for slot in range(4)] == [new, new, new, old]
    assert (runs.parent_of(old), runs._parent_depth[old]) == (new, 2)


def test_a_block_that_comes_late_finds_its_place() -> None:
    runs = Runs(NUM_SLOTS)
    visit = Visit(1, 0, 0.0, 0.0, 4, 64, 0.0, 10.0, 0)
    run = runs.new(0, 0.0, visit, tuple(keys_of(1, 2, 3, 4)), uses=1, sessions=1)
    for slot, depth in ((0, 3), (1, 0), (2, 2)):
        runs.add(slot, run, depth)
    assert list(runs.from_deepest(run)) == [0, 2, 1]
    runs.remove(2)
    assert list(runs.from_deepest(run)) == [0, 1]
