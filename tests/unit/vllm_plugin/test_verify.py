"""A load that finds changed bytes: its request is computed, their slots are out of use for good, and it is counted."""

from __future__ import annotations

import importlib
import random
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvortex.cache.index import KeyState, SlotState
from kvortex.cache.residency import Candidate
from kvortex.keys import SAMPLE_EVERY, BlockKey, block_key, in_sample
from kvortex.messages import Direction, JobId, JobResult, Outcome
from tests.fakes.clock import FakeClock
from tests.fakes.copy_engines import HeldEngine

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed")
    mini_vllm = importlib.import_module("tests.fakes.mini_vllm")
    jobs = importlib.import_module("kvortex.vllm_plugin.jobs")
    engines = importlib.import_module("kvortex.vllm_plugin.engines")
    worker = importlib.import_module("kvortex.vllm_plugin.worker")
    base = importlib.import_module("kvortex.transfer.base")
    verifying = importlib.import_module("kvortex.transfer.verifying")


def conversation(engine: Any, number: int, count: int = 10) -> list[BlockKey]:
    """One that RAM has, and VRAM not."""
    hashes = mini_vllm.hashes_of(number, count)
    engine.submit(mini_vllm.request(f"first {number}", hashes))
    engine.run()
    for other in range(3):
        push = number * 100 + other + 50
        engine.submit(mini_vllm.request(f"push {push}", mini_vllm.hashes_of(push, 25)))
        engine.run()
    return [block_key(h, 0) for h in hashes]


def again(engine: Any, name: str, number: int, count: int = 10) -> None:
    engine.submit(mini_vllm.request(name, mini_vllm.hashes_of(number, count)))
    engine.run()


def settled(engine: Any) -> dict[str, Any]:
    """The snapshot, when nothing is in flight."""
    engine.side._index.check()
    engine.side._residency.check()
    snapshot = engine.side.snapshot()
    assert snapshot["tiers"]["ram"]["pinned_blocks"] == 0
    assert snapshot["load"]["in_flight"] == snapshot["store"]["in_flight"] == 0
    return snapshot


def test_changed_blocks_are_computed_stored_elsewhere_and_never_meet_their_slots_again() -> None:
    engine = mini_vllm.MiniVllm(prefetch=False, verify="all", num_slots=130)
    index = engine.side._index
    keys = conversation(engine, 1)
    slots = list(index.ready_slots(keys).values())
    bad = {slots[3], slots[7]}
    engine.corrupt |= bad
    again(engine, "second", 1)
    snapshot = settled(engine)
    assert snapshot["verify"] == {
        "mode": "all",
        "intact_blocks": 0,
        "corrupt_blocks": 2,
        "failed_load_blocks": len(keys),
    }
    assert snapshot["failures"]["load"] == len(keys)
    assert snapshot["missed"]["load_failed"] == len(keys) * mini_vllm.BLOCK_SIZE
    assert snapshot["tiers"]["ram"]["quarantined_blocks"] == 2
    assert all(index.state_of(key) is KeyState.READY for key in keys), "computed, and stored again"
    assert not bad & set(index.ready_slots(keys).values())
    for number in range(2, 12):
        conversation(engine, number)
        assert {index.slot_state(slot) for slot in bad} == {SlotState.QUARANTINED}
    keys = conversation(engine, 12)
    again(engine, "third", 12)
    snapshot = settled(engine)
    assert snapshot["verify"]["corrupt_blocks"] == 2
    assert snapshot["verify"]["intact_blocks"] >= len(keys)
    assert engine.pool.reset_prefix_cache()
    assert engine.side.snapshot()["tiers"]["ram"]["quarantined_blocks"] == 2
    conversation(engine, 13)
    assert index.free + index.ready == index.num_slots - 2
    settled(engine)


def test_a_changed_block_that_vram_still_has_is_stored_again() -> None:
    """A prefix in RAM alone, its tail in both: the load needs the prefix, and the tail is clean."""
    engine = mini_vllm.MiniVllm(prefetch=False, verify="all")
    index, residency = engine.side._index, engine.side._residency
    keys = conversation(engine, 1)
    again(engine, "second", 1)
    job = engine.side._jobs
    (slot,) = index.ready_slots(keys[5:6]).values()
    assert residency.is_clean(keys[5])
    index.pin([slot])
    failed = jobs.LoadJob(
        job_id=JobId(10**6),
        slots=[slot],
        keys=[keys[5]],
        waiting_ranks=set(),
        failed=True,
        corrupt_slots={slot},
        request_id="gone",
        gpu_blocks=[0],
        local_tokens=0,
        ram_tokens=0,
        computed_tokens=None,
        with_step=False,
    )
    engine.side._ledger.load.in_flight += 1
    engine.side.ends.ended(failed)
    assert not residency.is_clean(keys[5])
    residency.check()
    engine.run()
    assert index.state_of(keys[5]) is KeyState.READY
    assert slot not in index.ready_slots(keys).values()
    assert job.unanswered == 0
    settled(engine)


def test_slots_that_two_loads_find_changed_are_out_of_use_once() -> None:
    engine = mini_vllm.MiniVllm(prefetch=False, verify="all")
    index = engine.side._index
    keys = conversation(engine, 1)
    slots = list(index.ready_slots(keys).values())
    engine.corrupt.add(slots[0])
    index.pin(slots[:1])  # as another request's load does
    again(engine, "second", 1)
    assert index.slot_state(slots[0]) is SlotState.DOOMED, "its bytes may still be read"
    assert index.quarantined == 1
    assert index.quarantine(slots[:1]) == []
    index.unpin(slots[:1])
    assert index.slot_state(slots[0]) is SlotState.QUARANTINED
    assert index.quarantined == 1
    settled(engine)


def test_a_ram_that_changes_at_random_never_gives_a_wrong_block_and_counts_each_once() -> None:
    """`MiniVllm` asserts that every request reads its own blocks."""
    rng = random.Random(5)
    engine = mini_vllm.MiniVllm(prefetch=False, verify="all", num_slots=500)
    index = engine.side._index
    numbers = range(10)
    keys = [block_key(h, 0) for number in numbers for h in mini_vllm.hashes_of(number, 10)]
    for number in numbers:
        again(engine, f"first {number}", number)
    for turn in range(60):
        engine.corrupt |= set(rng.sample(list(index.ready_slots(keys).values()), 2))
        again(engine, f"turn {turn}", rng.choice(numbers))
        snapshot = settled(engine)
        found = {slot for slot in range(500) if index.slot_state(slot) is SlotState.QUARANTINED}
        assert found <= engine.corrupt
        assert snapshot["verify"]["corrupt_blocks"] == len(found)
    assert len(found) > 20


def test_any_rank_that_finds_a_change_fails_the_block_in_all() -> None:
    book = jobs.JobBook(num_ranks=2, timeout_s=10.0, clock=FakeClock())
    job = book.start_load(
        "r", [1, 2], [11, 12], [BlockKey(bytes(36))] * 2,
        local_tokens=0, ram_tokens=32, computed_tokens=1, refused=False, with_step=False,
    )  # fmt: skip
    bad = JobResult(job.job_id, Direction.LOAD, Outcome.FAILED, 0.1, 0, "changed", corrupt_slots=(12,))
    assert book.answer(1, bad) is None
    assert book.answer(0, JobResult(job.job_id, Direction.LOAD, Outcome.DONE, 0.1, 2)) is job
    assert (job.failed, job.corrupt_slots) == (True, {12})
    assert "on rank 1" in job.detail


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(2, "little") + bytes(34))


def test_a_sixteenth_of_the_keys_is_sampled_and_ranks_are_told_which() -> None:
    book = jobs.JobBook(num_ranks=2, timeout_s=10.0, clock=FakeClock(), sample=True)
    keys = [key(number) for number in range(256)]
    book.start_store([Candidate(i, k, i) for i, k in enumerate(keys)], slots=list(range(256)), written_by=1)
    (order,) = book.take_plan().stores
    assert order.sampled is not None
    assert order.sampled.tolist() == [in_sample(k) for k in keys]
    assert order.sampled.sum() == 256 // SAMPLE_EVERY
    plain = jobs.JobBook(num_ranks=2, timeout_s=10.0, clock=FakeClock())
    plain.start_store([Candidate(1, keys[0], 1)], slots=[1], written_by=1)
    assert plain.take_plan().stores[0].sampled is None


def test_of_a_sample_only_its_blocks_count_as_verified() -> None:
    engine = mini_vllm.MiniVllm(prefetch=False, verify="sample")
    keys = conversation(engine, 1, 20)
    again(engine, "second", 1, 20)
    snapshot = settled(engine)
    assert snapshot["load"]["blocks"] == 20
    assert snapshot["verify"]["intact_blocks"] == sum(map(in_sample, keys))


def test_the_statistics_of_several_engines_add_up() -> None:
    one = mini_vllm.MiniVllm(verify="all").side.snapshot()
    assert engines._added(one, one)["verify"]["mode"] == "all"


@pytest.mark.parametrize(("verify", "share"), [("off", None), ("sample", 1 / SAMPLE_EVERY), ("all", 1.0)])
def test_a_worker_verifies_only_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch, verify: str, share: Any) -> None:
    layout = base.KVLayout((torch.zeros(4, 64, dtype=torch.uint8),))
    settings = SimpleNamespace(verify=verify, num_streams=2)
    facts = SimpleNamespace(settings=settings, rank_block_bytes=64, num_slots=8)
    side = worker.WorkerSide(facts, SimpleNamespace(kv_cache_groups=[None]), 0)
    slab = worker.HostSlab(8, 64)
    copies = HeldEngine(layout, slab)
    monkeypatch.setattr(worker.compat, "kv_layout", lambda *_: layout)
    monkeypatch.setattr(side, "_open_engine", lambda _: (slab, copies))
    side.register({})
    if share is None:
        assert side.engine is copies
    else:
        assert isinstance(side.engine, verifying.VerifyingEngine)
        assert side.engine._share == share
    side.close()
    assert copies.closed
