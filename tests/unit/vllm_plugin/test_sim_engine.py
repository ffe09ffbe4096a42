"""vLLM's own scheduler and both sides of the connector over devices that hold tags: faults at one moment each.

What the random operations of `test_engine_machine.py` found stands here by itself.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvortex.cache.load_choice import Way
from kvortex.messages import Direction, JobId, Outcome

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed")
    compat = importlib.import_module("kvortex.vllm_plugin.compat")
    if not compat.REPORTS_FAILED_REQUESTS:
        pytest.skip("the stand-in for a model runner calls the hooks of later versions", allow_module_level=True)
    sim = importlib.import_module("tests.fakes.sim_engine")

SIZE = sim.BLOCK_SIZE
Make = Callable[..., Any]


def talk(number: int, tokens: int) -> list[int]:
    return [3 + (11 * number + 5 * i) % 500 for i in range(tokens)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sim.vllm_config(folder, overlap=False, max_running=4)


@pytest.fixture
def make(config: Any) -> Iterator[Make]:
    """Engines without prefetch, whose stores and loads the test ends; loads come before their step."""
    made = []

    def make_one(**options: Any) -> Any:
        settings = {"offload_threshold": 0.0, "prefetch_enabled": False, "transfer_timeout": 10.0}
        options = {"num_slots": 300, **options}
        engine = sim.SimEngine(config, settings=settings | options.pop("settings", {}), **options)
        engine.side._choice.way = lambda *_, **__: Way.BEFORE_STEP
        made.append(engine)
        return engine

    yield make_one
    for engine in made:
        engine.close()


def end_copies(engine: Any) -> None:
    for device in engine.devices:
        for job_id in device.held:
            device.release(job_id)


def step(engine: Any) -> None:
    engine.schedule()
    engine.take_output()


def run(engine: Any, steps: int = 60) -> None:
    """Until all is answered, with copies that end well."""
    for _ in range(steps):
        end_copies(engine)
        if not engine.scheduler.has_requests():
            return
        step(engine)
        engine.clock.advance(0.2)
    raise AssertionError(f"requests do not end: {engine.live}, {engine.side.busy}")


def in_ram_alone(engine: Any, number: int, tokens: int) -> None:
    """A prompt's blocks are in RAM and no longer in VRAM."""
    engine.add(f"first {number}", talk(number, tokens), max_tokens=1)
    run(engine)
    filler = (engine.free_at_start - 1) * SIZE
    for other in (90, 91):
        engine.add(f"filler {number} {other}", talk(other + number, filler), max_tokens=1)
        run(engine)
    key = engine.keys_of(talk(number, tokens))[0]
    assert not engine.side._residency.holds(key)
    assert engine.side._index.match([key])


def the_load(engine: Any, rank: int = 0) -> JobId:
    device = engine.devices[rank]
    (job_id,) = [job for job in device.held if device.direction(job) is Direction.LOAD]
    return job_id


def nothing_is_left(engine: Any) -> None:
    stats = engine.side.snapshot()
    assert engine.pool.get_num_free_blocks() == engine.free_at_start
    assert stats["tiers"]["ram"]["pinned_blocks"] == 0
    assert stats["load"]["in_flight"] == stats["store"]["in_flight"] == 0
    assert stats["sessions"]["active"] == engine.side._jobs.unanswered == 0
    tokens = stats["tokens"]
    assert tokens["vram_hit"] + tokens["ram_hit"] + tokens["computed"] == tokens["queried"]


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
