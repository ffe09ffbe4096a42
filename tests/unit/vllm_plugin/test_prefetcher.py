"""Prefetch over vLLM's own block pool: what is taken, published, given back, and what a request then finds."""

from __future__ import annotations

import importlib
import random
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from kvortex.cache.index import KeyState
from kvortex.cache.prefetch.budget import Cause
from kvortex.cache.prefetch.planner import KEEP_S, LEAST_P
from kvortex.cache.prefix import GroupShape
from kvortex.cache.sessions.rhythm import HABITS
from kvortex.cache.sessions.session import Scope
from kvortex.keys import block_key

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed")
    mini = importlib.import_module("tests.fakes.mini_vllm")
    compat = importlib.import_module("kvortex.vllm_plugin.compat")

MiniVllm, request, hashes_of, BLOCK_SIZE = mini.MiniVllm, mini.request, mini.hashes_of, mini.BLOCK_SIZE


def expecting_returns(**options: Any):
    """An engine that has learnt that everybody comes back in eight seconds, and that guesses are good."""
    engine = MiniVllm(**options)
    for habit in HABITS:
        for _ in range(200):
            engine.prefetcher.book.rhythms.returned(habit, 8.0)
    engine.prefetcher.budget.requests_loaded(100_000)
    engine.prefetcher.budget._rates[Cause.GUESS].saw(400, used=True)
    return engine


def push_out(engine: Any, but: int = 0) -> None:
    """Fills VRAM, all but `but` blocks of it, with what RAM has too and nobody will ask for."""
    free = engine.pool.get_num_free_blocks()
    once = request(f"once-{random.random()}", hashes_of(random.randrange(10**9), free - but - 1))
    room, engine.prefetcher._planner._room = engine.prefetcher._planner._room, lambda *, running: 0
    engine.run(once)
    engine.prefetcher._planner._room = room
    book = engine.prefetcher.book
    book._forget(next(iter(book.recent(1))))
    engine.prefetcher._owners.clear()
    engine.prefetcher._demand._taken = 0.0  # not how long blocks last here


def in_vram(engine: Any, conversation: int, count: int) -> int:
    """Leading blocks that the next request would find."""
    keys = [block_key(h, 0) for h in hashes_of(conversation, count)]
    found = [engine.pool.cached_block_hash_to_block.get_one_block(key) for key in keys]
    return found.index(None) if None in found else count


def prefetched(engine: Any, steps: int = 40) -> None:
    engine.prefetcher._has_more = True
    engine.run(steps=steps)


def a_lost_session(engine: Any, blocks: int = 20) -> None:
    engine.run(request("first", hashes_of(1, blocks), session="a"))
    push_out(engine)
    assert in_vram(engine, 1, blocks) == 0
    engine.clock.advance(1.0)


def test_a_session_is_in_vram_before_its_request_which_is_a_plain_hit() -> None:
    engine = expecting_returns()
    a_lost_session(engine)
    before = engine.side.snapshot()
    prefetched(engine)
    assert in_vram(engine, 1, 20) == 20
    assert engine.pool.get_num_free_blocks() == 60
    assert engine.side.snapshot()["tiers"]["ram"]["pinned_blocks"] == 0

    engine.run(request("second", hashes_of(1, 24), session="a"))
    after = engine.side.snapshot()
    assert after["tokens"]["vram_hit"] - before["tokens"]["vram_hit"] == 20 * BLOCK_SIZE
    assert after["tokens"]["ram_hit"] == before["tokens"]["ram_hit"]
    assert after["prefetch"] == {"issued_blocks": 20, "used_blocks": 20, "wasted_blocks": 0, "late_blocks": 0}
    assert after["load"]["blocks"] - before["load"]["blocks"] == 20
    assert after["load"]["in_flight"] == 0


def test_a_prefetch_never_stores_anew_what_it_brought() -> None:
    engine = expecting_returns()
    a_lost_session(engine)
    stored = engine.side.snapshot()["store"]["blocks"]
    prefetched(engine)
    assert engine.side.snapshot()["store"]["blocks"] == stored
    assert engine.side._residency.resident_blocks == 0


def test_what_is_brought_lies_at_the_warm_end_its_tail_to_go_first() -> None:
    engine = expecting_returns()
    a_lost_session(engine)
    prefetched(engine)
    order = [key for _, key in engine.prefetcher._pool.next_free()]
    keys = [block_key(h, 0) for h in hashes_of(1, 20)]
    assert order[-20:] == keys[::-1]


def test_a_session_that_is_expected_outlives_others_and_one_that_is_not_any_more_does_not() -> None:
    engine = expecting_returns()
    a_lost_session(engine)
    prefetched(engine)
    session = engine.prefetcher.book.named(Scope(), "a")
    engine.prefetcher._planner._room = lambda *, running: 0  # nothing else is brought
    number = 0
    while engine.clock() < 1006.0:  # it is expected at 1008 or so
        engine.clock.advance(0.2)
        number += 1
        engine.run(request(f"other-{number}", hashes_of(100 + number, 8)))
    assert number * 8 > 2 * 60, "VRAM was not used twice over"
    assert in_vram(engine, 1, 20) == 20
    assert session.wasted == 0
    engine.clock.advance(200.0)
    for later in range(12):
        engine.clock.advance(0.2)
        engine.run(request(f"later-{later}", hashes_of(500 + later, 8)))
    assert in_vram(engine, 1, 20) == 0
    assert session.wasted == 20


@pytest.mark.parametrize(("p_of_others", "stays"), [(0.7, True), (0.9, False)])
def test_a_guess_is_kept_unless_who_goes_instead_is_twice_as_likely_to_return(
    monkeypatch: pytest.MonkeyPatch, p_of_others: float, stays: bool
) -> None:
    engine = expecting_returns()
    a_lost_session(engine)
    prefetched(engine)
    book = engine.prefetcher.book
    guessed = book.named(Scope(), "a")

    def p_return_within(session: Any, now: float, horizon_s: float) -> float:
        if session is not guessed:
            return p_of_others
        return LEAST_P if horizon_s == KEEP_S else 0.4  # of the latter: while it would last

    monkeypatch.setattr(book, "p_return_within", p_return_within)
    engine.prefetcher._planner._room = lambda *, running: 0  # nothing else is brought
    for number in range(25):
        engine.clock.advance(0.2)
        engine.run(request(f"other-{number}", hashes_of(100 + number, 8)))
    assert in_vram(engine, 1, 20) == (20 if stays else 0)


def test_of_a_chunk_too_the_tail_goes_first() -> None:
    engine = expecting_returns()
    a_lost_session(engine)
    engine.step()
    there = in_vram(engine, 1, 20)
    assert 0 < there < 20
    order = [key for _, key in engine.prefetcher._pool.next_free()]
    assert order[-there:] == [block_key(h, 0) for h in hashes_of(1, there)][::-1]


def test_a_prefix_that_is_still_there_is_kept_and_only_the_rest_loaded() -> None:
    engine = expecting_returns()
    engine.run(request("first", hashes_of(1, 20), session="a"))
    push_out(engine, but=8)
    assert 0 < in_vram(engine, 1, 20) < 20
    engine.clock.advance(1.0)
    there = in_vram(engine, 1, 20)
    prefetched(engine)
    assert in_vram(engine, 1, 20) == 20
    assert engine.side.snapshot()["prefetch"]["issued_blocks"] == 20 - there


def test_an_idle_engine_steps_until_all_is_there_and_then_no_more() -> None:
    engine = expecting_returns()
    a_lost_session(engine)
    assert not engine.side.busy
    assert engine.side.may_prefetch() == {"due": True}
    engine.prefetcher._has_more = True
    steps = 0
    while engine.side.busy:
        engine.clock.advance(0.01)
        engine.step()
        steps += 1
    assert steps >= 3
    engine.clock.advance(1.0)
    assert engine.side.may_prefetch() == {"due": False}


def test_a_busy_engine_need_not_be_woken() -> None:
    engine = expecting_returns()
    a_lost_session(engine)
    engine.side._planned_at = engine.clock()
    assert engine.side.may_prefetch() == {"due": False}


def test_a_failed_load_publishes_nothing_and_leaks_nothing() -> None:
    engine = expecting_returns()
    a_lost_session(engine)
    engine.fail_loads = True
    prefetched(engine)
    snapshot = engine.side.snapshot()
    assert in_vram(engine, 1, 20) == 0
    assert engine.pool.get_num_free_blocks() == 60
    assert snapshot["tiers"]["ram"]["pinned_blocks"] == 0
    assert snapshot["prefetch"]["wasted_blocks"] == snapshot["prefetch"]["issued_blocks"] > 0
    assert snapshot["failures"]["load"] > 0


def test_a_block_that_has_changed_in_ram_is_not_published_and_its_slot_is_out_of_use() -> None:
    engine = expecting_returns(verify="all")
    a_lost_session(engine)
    index, key = engine.side._index, block_key(hashes_of(1, 1)[0], 0)
    (slot,) = index.ready_slots([key]).values()
    engine.corrupt.add(slot)
    prefetched(engine)
    snapshot = engine.side.snapshot()
    assert snapshot["verify"]["corrupt_blocks"] == snapshot["tiers"]["ram"]["quarantined_blocks"] == 1
    assert index.state_of(key) is KeyState.ABSENT
    assert in_vram(engine, 1, 20) == 0
    assert engine.pool.get_num_free_blocks() == 60
    assert snapshot["tiers"]["ram"]["pinned_blocks"] == 0


def test_a_request_waits_for_the_chunk_on_its_way_and_loads_the_rest_itself() -> None:
    engine = expecting_returns()
    a_lost_session(engine)
    engine.answers_held = True
    engine.prefetcher._has_more = True
    engine.step()
    (job,) = engine.prefetcher._in_flight
    engine.submit(request("second", hashes_of(1, 24), session="a"))
    engine.step()
    assert [r.request_id for r in engine.waiting] == ["second"]
    assert len(engine.prefetcher._in_flight) == 1, "more was ordered although the request has come"
    engine.answers_held = False
    engine.run()
    snapshot = engine.side.snapshot()
    assert snapshot["prefetch"]["late_blocks"] == snapshot["prefetch"]["used_blocks"] == len(job.keys)
    assert snapshot["tokens"]["ram_hit"] == (20 - len(job.keys)) * BLOCK_SIZE


@pytest.mark.parametrize("reset", ["connector", "vllm"])
def test_a_reset_in_between_makes_the_load_void(reset: str) -> None:
    engine = expecting_returns()
    a_lost_session(engine)
    engine.answers_held = True
    engine.prefetcher._has_more = True
    engine.step()
    assert engine.prefetcher.held_blocks > 0
    if reset == "vllm":  # which refuses while blocks are held: as when vLLM only forgets its map
        engine.pool.cached_block_hash_to_block = type(engine.pool.cached_block_hash_to_block).__mro__[1]()
        for block in engine.pool.blocks:
            block.reset_hash()
    else:
        engine.side.reset()
    engine.answers_held = False
    engine.run()
    assert in_vram(engine, 1, 20) == 0
    assert engine.pool.get_num_free_blocks() == 60
    assert engine.side.snapshot()["tiers"]["ram"]["pinned_blocks"] == 0


def test_what_vram_alone_holds_is_not_taken_unless_it_is_not_worth_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = expecting_returns()
    a_lost_session(engine)
    residency = engine.side._residency
    nobody = (lambda session: 0.0, 1.0, frozenset())
    engine.pool.get_new_blocks(1)  # the one block that is empty
    assert engine.prefetcher.takeable(10, *nobody) == 10
    monkeypatch.setattr(residency, "is_clean", lambda key: False)
    assert engine.prefetcher.takeable(10, *nobody) == 0
    monkeypatch.setattr(residency, "is_given_up", lambda key: True)
    assert engine.prefetcher.takeable(10, *nobody) == 10


def test_requests_that_find_too_little_get_all_there_is() -> None:
    engine = expecting_returns()
    a_lost_session(engine)
    engine.prefetcher._demand.lasts_s = lambda free_blocks: 100.0
    engine.max_running = 1
    engine.clock.advance(6.0)  # it is expected any moment
    held = engine.pool.get_new_blocks(50)
    engine.prefetcher._begun = 50  # by one that has just begun, and will not grow
    engine.submit(request("large", hashes_of(7, 30)))
    for _ in range(5):
        engine.clock.advance(0.01)
        engine.step()
    assert engine.waiting, "the request has to wait for blocks"
    assert engine.side.snapshot()["prefetch"]["issued_blocks"] == 0
    engine.abort(engine.waiting[0])
    engine.prefetcher._demand._shortage = 0.0
    engine.step()
    assert engine.side.snapshot()["prefetch"]["issued_blocks"] > 0, "it was not the shortage"
    engine.pool.free_blocks(held)
    engine.run()


def test_blocks_that_nobody_asked_for_are_wasted_when_vram_takes_them() -> None:
    engine = expecting_returns()
    a_lost_session(engine)
    prefetched(engine)
    push_out(engine)
    assert engine.side.snapshot()["prefetch"]["wasted_blocks"] >= 19


def test_a_queued_request_has_its_blocks_before_its_turn() -> None:
    engine = expecting_returns()
    engine.run(request("first", hashes_of(1, 20)))
    push_out(engine)
    engine.max_running = 1
    engine.answers_held = True
    busy = request("busy", hashes_of(5, 3))
    engine.running.append(busy)  # it takes the only place for a while
    engine._compute = lambda asked: None
    engine.submit(request("queued", hashes_of(1, 24)))
    for _ in range(10):
        engine.clock.advance(0.05)
        engine.step()
        engine.answer()
    assert in_vram(engine, 1, 20) == 20
    assert [r.request_id for r in engine.waiting] == ["queued"]
    del engine._compute
    engine.running.remove(busy)
    engine.answers_held = False
    engine.run()
    snapshot = engine.side.snapshot()
    assert snapshot["prefetch"]["used_blocks"] == 20
    assert snapshot["tokens"]["ram_hit"] == 0


def test_a_hint_brings_a_session_back_and_tells_what_was_found() -> None:
    engine = MiniVllm()
    a_lost_session(engine)
    found = engine.side.hint("a", None)
    assert found == {
        "enabled": True,
        "known": True,
        "accepted": True,
        "blocks": 20,
        "vram_blocks": 0,
        "ram_blocks": 20,
    }
    assert engine.side.busy, "nothing would wake the engine"
    engine.run()
    assert in_vram(engine, 1, 20) > 0
    assert engine.side.hint("b", None)["known"] is False


@pytest.mark.parametrize("hinted", [True, False])
def test_a_hinted_session_that_vram_still_has_stays_until_it_comes(hinted: bool) -> None:
    engine = MiniVllm()
    engine.run(request("first", hashes_of(1, 20), session="a"))
    assert in_vram(engine, 1, 20) == 20
    if hinted:
        engine.side.hint("a", None)
    engine.run()
    for number in range(20):
        engine.clock.advance(0.2)
        engine.run(request(f"other-{number}", hashes_of(100 + number, 8)))
    assert (in_vram(engine, 1, 20) == 20) == hinted


def test_hints_of_long_prompts_take_a_bounded_part_of_the_schedulers_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MiniVllm()
    engine.run(request("first", hashes_of(1, 50)))
    prefetcher = engine.prefetcher
    keys = [block_key(h, 0) for h in hashes_of(1, 50)]
    keys += [block_key(h, 0) for h in hashes_of(2, 950)]
    warmed: list[int] = []
    monkeypatch.setattr(prefetcher._pool, "warm", lambda some: warmed.append(len(some)))
    for number in range(200):  # two seconds
        prefetcher.hint(Scope(), None, [*keys[:-1], block_key(number.to_bytes(32, "little"), 0)])
        engine.clock.advance(0.01)
        engine.step()
    assert 30_000 < sum(warmed) < 45_000, "20,000 a second"


def test_prompts_that_are_hinted_and_never_come_are_not_remembered() -> None:
    engine = MiniVllm()
    engine.run(request("first", hashes_of(1, 5)))
    prefetcher = engine.prefetcher
    prefetcher.book._forget(next(iter(prefetcher.book.recent(1))))
    keys = [block_key(h, 0) for h in hashes_of(1, 5)]
    for _ in range(3):
        hinted = prefetcher.hint(Scope(), None, keys)
        assert (hinted.known, hinted.accepted, hinted.in_vram) == (False, True, 5)
        engine.run()
    assert not prefetcher._planner._hints
    assert not prefetcher._kept


def test_a_long_prompt_that_is_hinted_is_not_gone_through_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine would stand still for as long."""
    engine = MiniVllm()
    a_lost_session(engine, blocks=50)
    index, lock = engine.side._index, engine.side._lock
    match, under_lock = index.match, []

    def counted(keys: Any) -> list[int]:
        found = match(keys)
        if lock._is_owned():
            under_lock.append(len(found))
        return found

    monkeypatch.setattr(index, "match", counted)
    assert engine.side.hint("a", None)["ram_blocks"] == 50
    assert under_lock == [1]


def test_a_hinted_prompt_is_hashed_with_pauses_to_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's thread would wait for the interpreter."""
    kv_cache_utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    hash_of = importlib.import_module("vllm.utils.hashing").sha256
    kv_cache_utils.init_none_hash(hash_of)
    patient_hash = importlib.import_module("kvortex.vllm_plugin.patient_hash")
    clock, pauses = iter(range(1000)), []
    monkeypatch.setattr(patient_hash, "time", SimpleNamespace(perf_counter=lambda: next(clock), sleep=pauses.append))
    tokens = list(range(20 * BLOCK_SIZE))
    keys = compat.prompt_keys(tokens, None, GroupShape(0, BLOCK_SIZE), BLOCK_SIZE, "sha256")
    last = kv_cache_utils.NONE_HASH
    for i, key in enumerate(keys):
        block = tuple(tokens[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE])
        last = kv_cache_utils.hash_block_tokens(hash_of, last, block, None)
        assert key == block_key(last, 0)
    assert len(keys) == len(pauses) == 20


def test_a_hint_names_sessions_of_its_own_scope_only() -> None:
    engine = MiniVllm()
    engine.run(request("first", hashes_of(1, 20), session="a", salt="mine"))
    push_out(engine)
    for salt, caller in ((None, ""), ("yours", ""), ("mine", "key")):
        found = engine.side.hint("a", None, salt, caller)
        assert (found["known"], found["blocks"]) == (False, 0)
    assert engine.side.hint("a", None, "mine")["blocks"] == 20


def test_lines_are_those_of_the_caller() -> None:
    engine = MiniVllm()
    for caller in ("one", "two"):
        asked = request(caller, hashes_of(len(caller), 4), session="same")
        asked.kv_transfer_params["kvortex_caller"] = caller
        engine.run(asked)
    book = engine.prefetcher.book
    assert book.named(Scope("", "one"), "same") is not book.named(Scope("", "two"), "same")
    assert len(engine.side.sessions(10, "one")["sessions"]) == 1
    assert len(engine.side.sessions(10)["sessions"]) == 2
    (line,) = engine.side.sessions(10, "two")["sessions"]
    assert (line["session"], line["turns"], line["blocks"], line["vram_blocks"]) == ("same", 1, 4, 4)


def test_switched_off_there_is_nothing() -> None:
    engine = MiniVllm(prefetch=False)
    engine.run(request("first", hashes_of(1, 20), session="a"))
    assert engine.side.hint("a", None) == {"enabled": False}
    assert engine.side.sessions(10) == {"enabled": False, "known": 0, "sessions": []}
    assert engine.side.may_prefetch() == {"due": False}


@pytest.mark.parametrize("seed", range(6))
def test_random_conversations_never_read_what_is_not_their_own_and_nothing_leaks(seed: int) -> None:
    """Requests, hints, aborts, failures, resets and answers in any order, over a VRAM that is far too small."""
    rng = random.Random(seed)
    engine = expecting_returns(num_blocks=40, num_slots=120)
    engine.answers_held = True
    lengths = dict.fromkeys(range(12), 3)
    for number in range(600):
        engine.clock.advance(rng.expovariate(1.0) * rng.choice([0.01, 0.5]))
        conversation = rng.randrange(12)
        if len(engine.waiting) < 6 and rng.random() < 0.4:
            lengths[conversation] = min(20, lengths[conversation] + rng.randrange(3))
            name = rng.choice([None, f"s{conversation}"])
            engine.submit(request(f"r{number}", hashes_of(conversation, lengths[conversation]), session=name))
        if rng.random() < 0.2:
            engine.side.hint(f"s{conversation}", None)
        if engine.waiting and rng.random() < 0.1:
            engine.abort(rng.choice(engine.waiting))
        if rng.random() < 0.01:
            engine.side.reset()
        engine.fail_loads = rng.random() < 0.1
        engine.step()
        engine.answer(rng)
    engine.fail_loads = engine.answers_held = False
    engine.run(steps=500)
    assert engine.pool.get_num_free_blocks() == 40
    snapshot = engine.side.snapshot()
    assert snapshot["tiers"]["ram"]["pinned_blocks"] == 0
    assert snapshot["load"]["in_flight"] == snapshot["store"]["in_flight"] == 0
    assert snapshot["prefetch"]["used_blocks"] > 5


def test_sessions_change_only_under_the_lock_that_hints_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's pool tells of blocks amid vLLM's own calls, while another thread may go through the sessions."""
    engine = MiniVllm()
    engine.run(request("first", hashes_of(1, 4), session="a"))
    book, lock = engine.prefetcher.book, engine.side._lock
    lost, is_free = book.lost, []

    def could_take() -> bool:
        taken = lock.acquire(blocking=False)
        if taken:
            lock.release()
        return taken

    def told(key: Any) -> None:
        with ThreadPoolExecutor(1) as others:
            is_free.append(others.submit(could_take).result())
        lost(key)

    monkeypatch.setattr(book, "lost", told)
    push_out(engine)
    assert is_free
    assert not any(is_free)
