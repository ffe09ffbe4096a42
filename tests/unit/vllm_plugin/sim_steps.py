"""Steps of a simulated engine, and what tests ask of it. Needs vLLM: `import_sim` imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvortex.messages import Direction, JobId
from kvortex.vllm_plugin import compat
from tests.fakes import sim_engine as sim

__all__ = ["SIZE", "compat", "end_copies", "in_ram_alone", "nothing_is_left", "run", "sim", "step", "talk", "the_load"]

SIZE = sim.BLOCK_SIZE
Make = Callable[..., Any]


def talk(number: int, tokens: int) -> list[int]:
    return [3 + (11 * number + 5 * i) % 500 for i in range(tokens)]


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
