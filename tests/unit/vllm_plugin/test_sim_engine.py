"""vLLM's own scheduler and both sides of the connector over devices that hold tags: faults at one moment each.

What the random operations of `test_engine_machine.py` found stands here by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvortex.cache.load_choice import Way
from kvortex.messages import Direction, Outcome
from tests.unit.vllm_plugin.sim_import import import_sim

steps = import_sim()
compat, sim, SIZE = steps.compat, steps.sim, steps.SIZE
talk, end_copies, step, run = steps.talk, steps.end_copies, steps.step, steps.run
in_ram_alone, the_load, nothing_is_left = steps.in_ram_alone, steps.the_load, steps.nothing_is_left

Make = Callable[..., Any]


def test_a_promised_request_that_ends_before_its_loads_end_is_told_is_counted(make: Make) -> None:
    engine = make(num_blocks=20)
    in_ram_alone(engine, 1, 85)
    before = engine.side.snapshot()
    engine.add("again", talk(1, 85), max_tokens=1)
    engine.devices[0].promise_next = 1
    step(engine)
    assert the_load(engine)
    while "again" in engine.live:
        step(engine)
    after = engine.side.snapshot()
    assert the_load(engine), "its answer was to come later"
    assert after["tokens"]["queried"] - before["tokens"]["queried"] == 85
    assert after["tokens"]["ram_hit"] - before["tokens"]["ram_hit"] == 80
    run(engine)
    assert engine.side.snapshot()["tokens"] == after["tokens"], "counted twice"
    assert engine.side.snapshot()["refused"]["aborted"] == 0
    nothing_is_left(engine)


def test_a_load_that_one_rank_promised_and_another_failed_writes_no_block_of_others(make: Make) -> None:
    """vLLM gives the failed request's blocks to others while the first rank's copy is still under way."""
    engine = make(num_blocks=20, num_ranks=2)
    in_ram_alone(engine, 1, 83)
    engine.add("again", talk(1, 83), max_tokens=2)
    engine.devices[0].promise_next = 1
    engine.schedule()
    job_id = the_load(engine)
    engine.devices[1].fail(job_id, Outcome.FAILED)
    engine.take_output()
    step(engine)
    engine.add("other", talk(2, 4), max_tokens=4)  # less than a block, which is never filed as complete
    step(engine)
    step(engine)
    if job_id in engine.devices[0].held:
        engine.devices[0].release(job_id)
    run(engine)
    assert engine.side.snapshot()["failures"]["load"] == 10
    nothing_is_left(engine)


def test_a_request_that_one_rank_failed_and_ends_before_the_others_answer_is_counted(make: Make) -> None:
    engine = make(num_blocks=20, num_ranks=2)
    in_ram_alone(engine, 1, 83)
    engine.side._choice.way = lambda *_, **__: Way.COMPUTE
    engine.add("head", talk(1, 17), max_tokens=1)  # a request that keeps none of its blocks waits for the answer
    run(engine)
    engine.side._choice.way = lambda *_, **__: Way.BEFORE_STEP
    before = engine.side.snapshot()
    engine.add("again", talk(1, 83), max_tokens=1)
    engine.devices[0].promise_next = 1
    engine.schedule()
    job_id = the_load(engine)
    engine.devices[1].fail(job_id, Outcome.FAILED)
    engine.take_output()
    for _ in range(5):
        step(engine)
        if "again" not in engine.live:
            break
    assert "again" not in engine.live
    run(engine)
    after = engine.side.snapshot()
    assert after["tokens"]["queried"] - before["tokens"]["queried"] == 83
    assert after["missed"]["load_failed"] == after["failures"]["recomputed_tokens"] == 64
    assert after["refused"]["aborted"] == 0
    nothing_is_left(engine)


def test_a_step_load_does_not_overtake_the_promised_load_of_an_aborted_request(make: Make) -> None:
    """Both write the same GPU block, one after the other."""
    engine = make(num_blocks=20)
    in_ram_alone(engine, 1, 83)
    in_ram_alone(engine, 2, 83)
    engine.add("gone", talk(1, 83), max_tokens=2)
    engine.devices[0].promise_next = 1
    step(engine)
    promised = the_load(engine)
    engine.abort("gone")
    engine.side._choice.way = lambda *_, **__: Way.WITH_STEP
    engine.add("next", talk(2, 83), max_tokens=2)
    (device,) = engine.devices
    while len(device.held) < 2:
        engine.schedule()
        ordered = [job for job in device.held if job != promised]
        if ordered:
            # As early as its fence allows; and then what is left of the other one.
            for layer in range(sim.LAYERS):
                device.copy_layer(ordered[0], layer)
            if promised in device.held:
                device.release(promised)
            engine.take_output()
            break
        engine.take_output()
    run(engine)
    nothing_is_left(engine)


# ---- a block's life, with a fault at each step


def test_a_load_that_ends_while_the_step_runs_is_told_as_vllm_hears_of_it(make: Make) -> None:
    engine = make(num_blocks=20)
    in_ram_alone(engine, 1, 83)
    engine.add("other", talk(5, 30), max_tokens=6)
    engine.add("again", talk(1, 43), max_tokens=2)
    engine.schedule()
    assert any(engine.devices[0].direction(job) is Direction.STORE for job in engine.devices[0].held)
    end_copies(engine)
    engine.take_output()
    assert engine.side.snapshot()["load"]["in_flight"] == 5
    step(engine)
    assert engine.side.snapshot()["load"]["in_flight"] == 0
    run(engine)
    nothing_is_left(engine)


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.TIMED_OUT])
def test_a_failed_store_is_a_block_that_was_not_stored(make: Make, outcome: Outcome) -> None:
    engine = make(num_blocks=20)
    engine.add("a", talk(1, 85), max_tokens=1)
    (device,) = engine.devices
    failed = 0
    for _ in range(12):
        for job_id in device.held:
            failed += len(device._copies[job_id].order.slots)
            device.fail(job_id, outcome)
        step(engine)
    assert failed >= 10, "each is tried again after its next use"
    stats = engine.side.snapshot()
    assert stats["failures"]["store"] == failed
    assert stats["tiers"]["ram"]["used_blocks"] == stats["store"]["blocks"] == 0
    assert engine.side._index.free == engine.side._index.num_slots
    run(engine)
    nothing_is_left(engine)


@pytest.mark.parametrize("local", [0, 40])
@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.TIMED_OUT])
def test_a_failed_load_is_computed(make: Make, outcome: Outcome, local: int) -> None:
    engine = make(num_blocks=20)
    in_ram_alone(engine, 1, 85)
    if local:
        engine.side._choice.way = lambda *_, **__: Way.COMPUTE
        engine.add("head", talk(1, local + 1), max_tokens=1)
        run(engine)
        engine.side._choice.way = lambda *_, **__: Way.BEFORE_STEP
    before = engine.side.snapshot()
    again = engine.add("again", talk(1, 85), max_tokens=3)
    step(engine)
    engine.devices[0].copy_layer(the_load(engine), 0)
    engine.devices[0].fail(the_load(engine), outcome)
    run(engine)
    assert len(again.said) == 3
    after = engine.side.snapshot()
    assert after["failures"]["load"] - before["failures"]["load"] == (80 - local) // SIZE
    assert after["failures"]["recomputed_tokens"] == after["missed"]["load_failed"] == 80 - local
    assert after["tokens"]["ram_hit"] == before["tokens"]["ram_hit"]
    nothing_is_left(engine)


@pytest.mark.parametrize("end", ["preempt", "abort", "finish", "reset"])
def test_a_store_under_way_when_its_block_goes_to_others_is_not_found(
    make: Make, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field trial B04: what is found under A's keys is A's, or nothing."""
    engine = make(num_blocks=20)
    monkeypatch.setattr(engine.side._gate, "must_wait", lambda *_: False)  # or nobody reuses its blocks
    (device,) = engine.devices
    engine.add("a", talk(1, 60), max_tokens=60 if end in ("preempt", "abort") else 1)
    for _ in range(3):
        step(engine)
    stores = device.held
    assert stores
    if end == "abort":
        engine.abort("a")
    elif end == "reset":
        while "a" in engine.live:
            step(engine)
        assert engine.reset_vram()
    elif end == "preempt":
        assert engine.reset_vram(running=True)
        engine.abort("a")
    engine.add("b", talk(2, (engine.free_at_start - 1) * SIZE), max_tokens=1)
    while "b" in engine.live:
        step(engine)
    for job_id in stores:
        device.release(job_id)  # copies b's bytes
    step(engine)
    step(engine)
    keys = engine.keys_of(talk(1, 60))
    found = engine.side._index.ready_slots(keys)
    for i, slot in found.items():
        assert (device.ram[0, slot] == engine.expected(keys[i], 0, 0)).all(), "another's content under this key"
    assert len(found) <= 1, "b took all blocks but one"
    stats = engine.side.snapshot()
    assert stats["refused"]["source_reused"] + stats["refused"]["reset"] >= 6
    engine.add("a again", talk(1, 60), max_tokens=2)
    run(engine)
    nothing_is_left(engine)


@pytest.mark.parametrize("end", ["done", "fail", "time_out"])
def test_aborts_while_loads_are_under_way_leak_nothing(make: Make, end: str) -> None:
    """Field trial B16: thirty rounds, all requests gone while their loads wait."""
    engine = make(num_blocks=30, num_slots=400)
    (device,) = engine.devices
    for number in range(6):
        engine.add(f"warm {number}", talk(number, 45), max_tokens=1)
        run(engine)
    in_ram_alone(engine, 50, 45)
    for round_number in range(30):
        names = [f"{round_number}-{number}" for number in range(3)]
        for number, name in enumerate(names):
            engine.add(name, talk((round_number + number) % 6, 45), max_tokens=2)
        step(engine)
        held = [job for job in device.held if device.direction(job) is Direction.LOAD]
        assert held, "nothing was loaded"
        for name in names:
            engine.abort(name)
        step(engine)
        assert engine.side.snapshot()["tiers"]["ram"]["pinned_blocks"] > 0, "the copies may still run"
        for job_id in held:
            if end == "done":
                device.release(job_id)
            else:
                device.fail(job_id, Outcome.FAILED if end == "fail" else Outcome.TIMED_OUT)
        run(engine)
        nothing_is_left(engine)
    assert engine.side.snapshot()["refused"]["aborted"] >= 30
    engine.add("after", talk(1, 45), max_tokens=3)
    run(engine)
    nothing_is_left(engine)


@pytest.mark.parametrize("connector", [False, True])
@pytest.mark.parametrize("under_way", ["nothing", "store", "load"])
def test_after_a_reset_nothing_of_before_is_found(make: Make, connector: bool, under_way: str) -> None:
    """Field trial B15: vLLM's reset, with and without the option that names the connector, and the connector's own."""
    engine = make(num_blocks=20)
    (device,) = engine.devices
    in_ram_alone(engine, 1, 85)
    if under_way == "load":
        engine.add("loading", talk(1, 85), max_tokens=1)
        step(engine)
        assert the_load(engine)
        assert not engine.reset_vram(), "vLLM refuses while a request holds blocks"
        if not connector:
            run(engine)
            return
        assert engine.connector.reset_cache()
    else:
        if under_way == "store":
            engine.add("storing", talk(2, 85), max_tokens=1)
            while "storing" in engine.live:
                step(engine)
            assert device.held
        assert engine.scheduler.reset_prefix_cache(reset_connector=connector)
    engine.clock.advance(0.1)
    if under_way == "store":
        end_copies(engine)
    run(engine)
    before = engine.side.snapshot()
    for number in (1, 2):
        engine.add(f"again {number}", talk(number, 85), max_tokens=1)
        run(engine)
    after = engine.side.snapshot()
    assert after["refused"]["reset"] > 0
    if under_way != "load":
        assert after["tokens"]["vram_hit"] == before["tokens"]["vram_hit"]
    assert after["tokens"]["ram_hit"] == before["tokens"]["ram_hit"]
    nothing_is_left(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_client_that_gives_up_while_queued(make: Make, overlap: bool) -> None:
    """Field trial B22: with steps one by one, and with the next one scheduled before the last one's outputs."""
    engine = make(num_blocks=9, overlap=overlap)
    engine.add("0", talk(0, 60), max_tokens=3)
    step(engine)
    engine.add("1", talk(1, 60), max_tokens=3)
    step(engine)
    stores = engine.ordered["stores"]
    engine.abort("1")
    step(engine)
    run(engine)
    keys = engine.keys_of(talk(1, 60))
    assert engine.side._index.ready_slots(keys) == {}
    assert engine.ordered["stores"] >= stores
    engine.add("2", talk(1, 60), max_tokens=3)
    run(engine)
    nothing_is_left(engine)


@pytest.mark.parametrize("told", [True, False])
def test_what_a_preempted_request_lets_go_is_free_while_its_step_is_under_way(
    make: Make, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """Field trial B23. The control: a vLLM that is not told keeps it back, and 0.26 preempts one after another."""
    if not told:
        monkeypatch.setattr(compat, "loads_wait_for_kernels", lambda config: None)
    engine = make(num_blocks=30, overlap=True)
    engine.add("a", talk(1, 40), max_tokens=8)
    engine.schedule()
    free = engine.pool.get_num_free_blocks()
    engine.scheduler._preempt_request(engine.scheduler.running.pop(), 0.0)
    assert (engine.pool.get_num_free_blocks() > free) == told
    run(engine)
    nothing_is_left(engine)


@pytest.mark.parametrize("waits", [True, False])
def test_a_load_into_blocks_that_a_preempted_requests_step_still_writes_comes_behind_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Why vLLM need not keep such blocks back. The control: loads that wait for no kernel."""
    engine = make(num_blocks=20, overlap=True)
    (device,) = engine.devices
    in_ram_alone(engine, 1, 85)
    monkeypatch.setattr(engine.side._gate, "must_wait", lambda *_: False)  # for the copies of a's blocks
    engine.add("a", talk(2, 17 * SIZE - 3), max_tokens=20)
    for _ in range(5):
        step(engine)
    engine.schedule()
    assert "a" in engine.live
    assert device.submitted > device.done
    engine.scheduler._preempt_request(engine.scheduler.running.pop(), 0.0)
    engine.abort("a")
    if not waits:
        fence = sim.StreamPoint(device, 0)
        monkeypatch.setattr(device, "fence", lambda: fence)
    engine.add("again", talk(1, 85), max_tokens=3)
    engine.schedule()
    device.release(the_load(engine))
    assert waits == (device.submitted == device.done), "the load alone has run the kernels that it waits for"
    if not waits:
        with pytest.raises(AssertionError, match="a reads what is not its own"):
            engine.take_output()
        return
    engine.take_output()
    engine.take_output()
    run(engine)
    nothing_is_left(engine)


def test_ram_full_of_pinned_blocks_refuses_counts_and_goes_on(make: Make) -> None:
    """Field trial B24: two requests load all that RAM holds, others have new blocks to store."""
    engine = make(num_blocks=40, num_slots=8, settings={"eviction_policy": "lru"})
    (device,) = engine.devices
    for number in (1, 2):
        engine.add(f"first {number}", talk(number, 33), max_tokens=1)
        run(engine)
    before = engine.side.snapshot()
    for block in engine.pool.blocks[1:]:  # VRAM loses them by other hands
        engine.pool._maybe_evict_cached_block(block)
    engine.add("load 1", talk(1, 33), max_tokens=1)
    engine.add("load 2", talk(2, 33), max_tokens=1)
    engine.add("new 1", talk(3, 25), max_tokens=1)
    engine.add("new 2", talk(4, 25), max_tokens=1)
    for _ in range(6):
        step(engine)
    stats = engine.side.snapshot()
    assert stats["tiers"]["ram"]["pinned_blocks"] == 8
    assert stats["refused"]["ram_pinned"] - before["refused"]["ram_pinned"] >= 6
    assert engine.side._index.evictable == 0
    assert not any(device.direction(job) is Direction.STORE for job in device.held)
    run(engine)
    for number in range(10):
        engine.add(f"later {number}", talk(5 + number, 25), max_tokens=1)
        run(engine)
    assert engine.side.snapshot()["store"]["blocks"] > stats["store"]["blocks"], "nothing was stored ever after"
    nothing_is_left(engine)


@pytest.mark.parametrize("blocks", [1, 2, 8])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_prompts_around_a_blocks_edge(make: Make, blocks: int, more: int) -> None:
    """Field trials B26, B32: asked three times, from VRAM and from RAM; the last token is always computed."""
    engine = make(num_blocks=20)
    tokens = blocks * SIZE + more
    right = [engine.add("a", talk(1, tokens), max_tokens=2)]
    run(engine)
    right.append(engine.add("b", talk(1, tokens), max_tokens=1))
    run(engine)
    for number in (90, 91):
        engine.add(f"filler {number}", talk(number, (engine.free_at_start - 1) * SIZE), max_tokens=1)
        run(engine)
    before = engine.side.snapshot()["tokens"]["ram_hit"]
    right.append(engine.add("c", talk(1, tokens), max_tokens=2))
    run(engine)
    hit = engine.side.snapshot()["tokens"]["ram_hit"] - before
    assert hit == (tokens - 1) // SIZE * SIZE
    assert [len(wish.said) for wish in right] == [2, 1, 2]
    nothing_is_left(engine)


def test_a_preempted_requests_tokens_are_counted_once(make: Make) -> None:
    """Field trial B28: scheduled, preempted, admitted again with more from RAM, and that load fails."""
    engine = make(num_blocks=20)
    engine.add("a", talk(1, 85), max_tokens=30)
    for _ in range(5):
        end_copies(engine)
        step(engine)
    assert engine.side.snapshot()["tokens"]["queried"] == 85
    engine.scheduler._preempt_request(engine.scheduler.running.pop(), 0.0)
    for block in engine.pool.blocks[1:]:
        engine.pool._maybe_evict_cached_block(block)
    step(engine)
    engine.devices[0].fail(the_load(engine), Outcome.FAILED)
    run(engine)
    stats = engine.side.snapshot()
    assert stats["tokens"]["queried"] == 85
    assert stats["failures"]["load"] == 10
    nothing_is_left(engine)


def test_an_answer_to_a_store_that_never_comes_does_not_keep_the_engine_busy_for_ever(make: Make) -> None:
    """Field trial B35: the slot stays out of use, the key is absent, and vLLM may rest."""
    engine = make(num_blocks=20)
    (device,) = engine.devices
    engine.add("a", talk(1, 85), max_tokens=1)
    while "a" in engine.live or not device.held:
        step(engine)
    for job_id in device.held:
        device.lose(job_id)
    lost = engine.side._index.writing
    assert lost
    engine.clock.advance(25.0)
    step(engine)
    index = engine.side._index
    assert (index.doomed, index.writing) == (lost, 0)
    assert engine.side.snapshot()["failures"]["store"] == lost
    assert not engine.side.busy, "vLLM would step without end"
    engine.add("b", talk(1, 85), max_tokens=1)
    run(engine)
    for job_id in device.lost:
        device.find(job_id)
    engine.add("c", talk(2, 20), max_tokens=1)
    run(engine)
    assert index.doomed == 0
    nothing_is_left(engine)


def test_slots_are_what_the_configuration_says_over_all_ranks(make: Make) -> None:
    for ranks in (1, 2):
        engine = make(num_ranks=ranks, num_slots=50)
        assert engine.side._index.num_slots == 50
        assert engine.side.snapshot()["tiers"]["ram"]["capacity_bytes"] == 50 * sim.BLOCK_BYTES * ranks
