"""vLLM's own scheduler and both sides of the connector over devices that hold tags: when stores run, who hears when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.vllm_plugin.sim_import import import_sim

steps = import_sim()
sim, talk, end_copies, step, run = steps.sim, steps.talk, steps.end_copies, steps.step, steps.run
nothing_is_left = steps.nothing_is_left

Make = Callable[..., Any]


def wrong_in_ram(engine: Any, tokens: list[int]) -> int:
    """Blocks found in RAM, of these tokens, that hold anything else."""
    (device,) = engine.devices
    keys = engine.keys_of(tokens)
    found = engine.side._index.ready_slots(keys)
    assert found
    layers = range(sim.LAYERS)
    return sum(
        any((device.ram[layer, slot] != engine.expected(keys[i], 0, layer)).any() for layer in layers)
        for i, slot in found.items()
    )


def play_with_early_stores(engine: Any) -> None:
    """Copied as early as their fences allow, layer by layer, while no kernel has run of its own accord."""
    engine.add("a", talk(1, 85), max_tokens=3)
    (device,) = engine.devices
    while engine.live:
        engine.schedule()
        for job_id in device.held:
            device.copy_layer(job_id, 0)
        engine.take_output()
    run(engine)
    assert engine.side.snapshot()["store"]["blocks"] == 10


def test_a_store_reads_what_the_steps_kernels_wrote(make: Make) -> None:
    engine = make(num_blocks=20)
    play_with_early_stores(engine)
    assert wrong_in_ram(engine, talk(1, 85)) == 0


def test_control_a_store_behind_the_step_before_reads_too_early(make: Make) -> None:
    engine = make(num_blocks=20)
    written_by = engine.side._steps.written_by
    engine.side._steps.written_by = lambda completion: written_by(completion) - 1
    play_with_early_stores(engine)
    assert wrong_in_ram(engine, talk(1, 85)) > 0


def test_a_store_of_what_earlier_steps_wrote_does_not_wait_for_this_one(make: Make) -> None:
    engine = make(num_blocks=60, overlap=True, settings={"offload_threshold": 0.9, "offload_target": 0.9})
    (device,) = engine.devices
    engine.add("a", talk(1, 85), max_tokens=1)
    run(engine)
    assert engine.side.snapshot()["store"]["blocks"] == 0
    engine.add("b", talk(2, 300), max_tokens=1)
    engine.schedule()
    while not device.held:
        engine.take_output()
        engine.schedule()
    done = device.done
    for layer in range(sim.LAYERS):
        device.copy_layer(device.held[0], layer)
    assert device.done == done < device.submitted, "kernels had to run first"
    engine.take_output()
    run(engine)
    assert wrong_in_ram(engine, talk(1, 85)) == 0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_store_that_ends_while_the_step_runs_is_told_with_its_output(make: Make, num_ranks: int) -> None:
    """By a worker in the scheduler's process; one of its own says it a step later."""
    engine = make(num_blocks=20, num_ranks=num_ranks)
    engine.add("a", talk(1, 60), max_tokens=4)
    engine.schedule()
    assert all(device.held for device in engine.devices)
    end_copies(engine)
    engine.take_output()
    told = num_ranks == 1
    assert engine.side.snapshot()["store"]["blocks"] == 7 * told
    step(engine)
    assert engine.side.snapshot()["store"]["blocks"] == 7
    run(engine)
    nothing_is_left(engine)


# ---- what the policy learns of a prompt can wait, its request cannot


def heard_prompts(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    policy = engine.side._index._policy._policy
    heard: list[int] = []
    monkeypatch.setattr(policy, "prompt", lambda keys, num_tokens: heard.append(num_tokens))
    return heard


def test_the_policy_hears_of_a_prompt_once_its_step_is_submitted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(overlap=True)
    heard = heard_prompts(engine, monkeypatch)
    engine.add("one", talk(1, 40), max_tokens=4)
    engine.schedule()
    assert heard == [], "its request waited for what the policy learns"
    end_copies(engine)
    engine.schedule()  # nobody is admitted
    assert heard == [40]
    run(engine)
    assert heard == [40]


def test_the_policy_hears_of_a_prompt_at_the_first_answer_where_every_step_admits_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(overlap=True)
    heard = heard_prompts(engine, monkeypatch)
    for number in range(3):
        engine.add(f"number {number}", talk(number, 40 + number), max_tokens=2)
        engine.schedule()
        end_copies(engine)
        engine.take_output()
    # The last one's step ordered stores of the one before; their end was told with its output.
    assert heard == [40, 41, 42]
    run(engine)
