"""A copy that is held, fails, comes late, twice or never; a client that leaves: a right answer each time, no leak."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvortex.errors import UsageError
from kvortex.messages import Direction, JobId, StepReport
from tests.e2e.engine import BLOCK_BYTES, BLOCK_SIZE, WRITE_THROUGH, Engine, engine, greedy, prompt
from tests.fakes.copy_engines import HeldEngine

TOKENS = prompt(1, 600)
HIT_BLOCKS = 599 // BLOCK_SIZE


class Held:
    """An engine whose stores end at once and whose loads wait for the test."""

    def __init__(self) -> None:
        self.copier: HeldEngine | None = None

    def make(self, layout, slab) -> HeldEngine:
        self.copier = StoresPass(layout, slab)
        return self.copier


class StoresPass(HeldEngine):
    def submit(self, orders, *, after=None) -> None:
        super().submit(orders, after=after)
        for order in orders:
            if self.stores_pass if order.direction is Direction.STORE else self.loads_pass:
                self.release(order.job_id)

    stores_pass = True
    loads_pass = False


@contextmanager
def holding(model: str, *, transfer_timeout: float) -> Iterator[Engine]:
    holder = Held()
    settings = {**WRITE_THROUGH, "transfer_timeout": transfer_timeout}
    with engine(model, settings, make_engine=holder.make) as vllm:
        assert holder.copier is not None
        vllm.copier = holder.copier
        yield vllm
        holder.copier.release_all()


@pytest.fixture
def held(tiny_llama):
    """Nothing is given up, however slow the machine is."""
    with holding(tiny_llama, transfer_timeout=300.0) as vllm:
        yield vllm


@pytest.fixture
def soon_given_up(tiny_llama):
    """A store is, twice its timeout after it was ordered."""
    with holding(tiny_llama, transfer_timeout=0.2) as vllm:
        yield vllm


def start(vllm: Engine, name: str, tokens=TOKENS) -> None:
    """A request, as far as its load, which is held."""
    vllm.llm.llm_engine.add_request(name, {"prompt_token_ids": list(tokens)}, greedy())
    for _ in range(5):
        vllm.llm.llm_engine.step()


def finish(vllm: Engine) -> dict[str, tuple[int, ...]]:
    """Steps until nothing is left to answer; what each request said."""
    said: dict[str, tuple[int, ...]] = {}
    for _ in range(500):
        for output in vllm.llm.llm_engine.step():
            if output.finished:
                said[output.request_id.split("-")[0]] = tuple(output.outputs[0].token_ids)
        if not vllm.llm.llm_engine.has_unfinished_requests():
            return said
    raise AssertionError("requests do not end")


def loads(vllm: Engine) -> list[JobId]:
    return [o.job_id for o in vllm.copier.orders if o.direction is Direction.LOAD and o.job_id in vllm.copier.held]


def warm(vllm: Engine) -> tuple[int, ...]:
    """TOKENS in RAM and no longer in VRAM; the right answer."""
    answer, _ = vllm.ask(TOKENS)
    vllm.evict_vram()
    return answer


def test_a_held_load_holds_its_request_and_no_other(held):
    right = warm(held)
    start(held, "a")
    assert len(loads(held)) == 1
    assert held.stats()["tiers"]["ram"]["pinned_blocks"] == HIT_BLOCKS
    other = held.llm.llm_engine
    other.add_request("b", {"prompt_token_ids": prompt(9, 100)}, greedy())
    said = {}
    for _ in range(60):
        for output in other.step():
            if output.finished:
                said[output.request_id.split("-")[0]] = output
    assert "b" in said
    held.copier.release_all()
    assert finish(held)["a"] == right
    assert held.stats()["tiers"]["ram"]["pinned_blocks"] == 0


@pytest.mark.parametrize("end", ["release", "fail", "time_out"])
def test_an_abort_while_the_load_is_under_way_leaks_nothing(held, end):
    """Field trial B16: neither GPU blocks nor pins stay behind, whatever becomes of the load."""
    right = warm(held)
    free = held.free_blocks
    for round_number in range(5):
        start(held, f"gone{round_number}")
        (job,) = loads(held)
        held.llm.llm_engine.abort_request([f"gone{round_number}"])
        for _ in range(3):
            held.llm.llm_engine.step()
        assert held.stats()["tiers"]["ram"]["pinned_blocks"] == HIT_BLOCKS, "the copy may still run"
        getattr(held.copier, end)(job)
        for _ in range(3):
            held.llm.llm_engine.step()
        assert held.stats()["tiers"]["ram"]["pinned_blocks"] == 0
        assert held.free_blocks == free
    held.copier.loads_pass = True
    assert held.ask(TOKENS)[0] == right
    assert held.stats()["sessions"]["active"] == 0


@pytest.mark.parametrize("end", ["fail", "time_out"])
def test_a_failed_load_is_computed_and_the_request_does_not_fail(held, end):
    right = warm(held)
    before = held.stats()
    start(held, "a")
    (job,) = loads(held)
    getattr(held.copier, end)(job)
    assert finish(held)["a"] == right
    after = held.stats()
    assert after["failures"]["load"] - before["failures"]["load"] == HIT_BLOCKS
    assert after["failures"]["recomputed_tokens"] == HIT_BLOCKS * BLOCK_SIZE
    assert after["missed"]["load_failed"] == HIT_BLOCKS * BLOCK_SIZE
    assert after["tokens"]["ram_hit"] == before["tokens"]["ram_hit"]
    assert after["tokens"]["computed"] - before["tokens"]["computed"] == len(TOKENS)
    assert after["tiers"]["ram"]["pinned_blocks"] == 0


def test_an_answer_that_comes_twice_changes_nothing(held):
    right = warm(held)
    start(held, "a")
    (job,) = loads(held)
    held.copier.release(job)
    report = held.connector._scheduler_side
    assert finish(held)["a"] == right
    before = held.stats()
    results = list(held.copier._last_answer.values())
    report.answers(StepReport({0: results}))
    assert held.stats()["ignored_answers"] - before["ignored_answers"] == len(results)
    assert held.stats()["load"] == before["load"]
    assert held.stats()["store"] == before["store"]


def test_a_store_whose_block_is_reused_before_it_ends_is_never_found(held, monkeypatch):
    """Field trial B04: the copy reads whatever is in the block by then; its key must not lead to it."""
    monkeypatch.setattr(held.connector._scheduler_side._gate, "must_wait", lambda *_: False)  # or nobody reuses it
    held.copier.stores_pass = False
    right, _ = held.ask(TOKENS)
    stores = [o.job_id for o in held.copier.orders if o.direction is Direction.STORE]
    assert stores
    held.evict_vram()
    for job in stores:
        held.copier.release(job)  # copies the bytes of the prompts that came after
    for _ in range(3):
        held.llm.llm_engine.step()
    before = held.stats()
    assert before["refused"]["source_reused"] >= HIT_BLOCKS
    assert held.ask(TOKENS)[0] == right
    assert held.stats()["tokens"]["ram_hit"] == before["tokens"]["ram_hit"]


def test_a_pending_store_is_neither_found_nor_stored_twice(held):
    """Field trial B08: absent, pending and ready are three states."""
    held.copier.stores_pass = False
    held.ask(TOKENS)
    orders = [o for o in held.copier.orders if o.direction is Direction.STORE]
    held.ask(TOKENS)
    again = [o for o in held.copier.orders if o.direction is Direction.STORE]
    stored = [slot for o in again for slot in o.slots.tolist()]
    assert len(stored) == len(set(stored))
    assert sum(len(o.slots) for o in again) - sum(len(o.slots) for o in orders) <= 1, "only the new tail"
    assert held.stats()["tiers"]["ram"]["used_blocks"] == 0


def test_a_store_that_never_ends_is_given_up_and_its_slot_kept_out_of_use(soon_given_up):
    """Field trial B35."""
    held = soon_given_up
    held.copier.stores_pass = False
    right, _ = held.ask(TOKENS)
    time.sleep(0.5)  # twice the transfer timeout of 0.2 s, and some
    held.copier.stores_pass = True
    assert held.ask(prompt(5, 100))
    stats = held.stats()
    assert stats["failures"]["store"] >= HIT_BLOCKS
    assert held.side._index.doomed >= HIT_BLOCKS, "the copy may still write there"
    assert held.ask(TOKENS)[0] == right
    for job in list(held.copier.held):
        held.copier.release(job)
    for _ in range(3):
        held.llm.llm_engine.step()
    assert held.side._index.doomed == 0
    assert held.ask(TOKENS)[0] == right


def test_a_reset_of_vllms_prefix_cache_empties_ram_too(tiny_llama):
    """Field trial B15: a reset means new weights, or a measurement from cold."""
    with engine(tiny_llama, WRITE_THROUGH) as vllm:
        right = vllm.ask(TOKENS)
        assert vllm.stats()["tiers"]["ram"]["used_blocks"] > 0
        assert vllm.llm.reset_prefix_cache()
        assert vllm.ask(TOKENS) == right
        stats = vllm.stats()
        assert stats["tokens"]["ram_hit"] == stats["tokens"]["vram_hit"] == 0
        assert stats["refused"]["reset"] > 0
        vllm.evict_vram()
        assert vllm.ask(TOKENS) == right
        assert vllm.stats()["tokens"]["ram_hit"] > 0


def test_a_reset_while_a_store_is_held_lets_nothing_resurface(held, monkeypatch):
    monkeypatch.setattr(held.connector._scheduler_side._gate, "must_wait", lambda *_: False)  # stores stay held
    held.copier.stores_pass = False
    right, _ = held.ask(TOKENS)
    assert held.llm.reset_prefix_cache()
    held.copier.release_all()
    assert held.ask(TOKENS)[0] == right
    held.evict_vram()
    before = held.stats()["tokens"]["ram_hit"]
    assert held.ask(TOKENS)[0] == right
    assert held.stats()["tokens"]["ram_hit"] == before


def test_a_ram_of_two_blocks_answers_long_prompts(tiny_llama):
    """Field trial B36."""
    prompts = [prompt(seed, 900) for seed in range(4)]
    with engine(tiny_llama, None, num_blocks=200) as plain:
        right = [plain.ask(tokens, greedy(4))[0] for tokens in prompts]
    settings = {**WRITE_THROUGH, "ram_cache_size": 2 * BLOCK_BYTES}
    with engine(tiny_llama, settings, num_blocks=45) as vllm:
        for _ in range(2):
            assert [tokens for tokens, _ in vllm.ask_all(prompts, greedy(4))] == right
        assert vllm.stats()["tiers"]["ram"]["used_blocks"] <= 2


def test_a_ram_of_less_than_one_block_is_refused_before_any_request(tiny_llama):
    """Field trial B46."""
    refused = pytest.raises(UsageError, match=r"less than one block")
    with refused, engine(tiny_llama, {"ram_cache_size": BLOCK_BYTES - 1}):
        pass


def promised(vllm: Engine, name: str) -> JobId:
    """A request whose load was promised; its bytes come when the kernels are held, not before."""
    start(vllm, name)
    (job,) = loads(vllm)
    vllm.copier.promise_next = [job]
    return job


def test_a_promised_request_runs_behind_its_load(held):
    right = warm(held)
    job = promised(held, "a")
    assert finish(held)["a"] == right
    assert [job] in held.copier.held_for
    stats = held.stats()
    assert stats["tokens"]["ram_hit"] == HIT_BLOCKS * BLOCK_SIZE
    assert stats["tiers"]["ram"]["pinned_blocks"] == 0


def test_kernels_that_do_not_wait_for_a_promised_load_are_found_out(held):
    """The negative control: without the wait, the request runs on whatever is in its blocks."""
    right = warm(held)
    held.copier.hold_kernels = lambda job_ids: None
    job = promised(held, "a")
    assert finish(held)["a"] != right
    held.copier.release(job)
    finish(held)


def test_a_promised_load_keeps_its_slots_until_it_has_ended(held):
    warm(held)
    held.copier.hold_kernels = lambda job_ids: None
    job = promised(held, "a")
    finish(held)
    assert held.stats()["tiers"]["ram"]["pinned_blocks"] == HIT_BLOCKS
    held.copier.release(job)
    for _ in range(3):
        held.llm.llm_engine.step()
    assert held.stats()["tiers"]["ram"]["pinned_blocks"] == 0


def test_kernels_wait_for_the_load_of_a_promised_request_that_was_aborted(held):
    """Its blocks go to others at once; their kernels must not write under the load."""
    warm(held)
    job = promised(held, "a")
    held.llm.llm_engine.step()
    held.llm.llm_engine.abort_request(["a"])
    held.ask(prompt(31, 100))
    assert [job] in held.copier.held_for


def test_a_load_is_not_promised_any_more_once_its_request_has_ended(held):
    warm(held)
    start(held, "a")
    (job,) = loads(held)
    held.llm.llm_engine.abort_request(["a"])
    free = held.free_blocks
    held.llm.llm_engine.step()
    held.copier.promise_next = [job]
    for _ in range(3):
        held.llm.llm_engine.step()
    assert held.free_blocks == free, "vLLM holds the blocks until the load has ended"
    held.copier.release(job)
    for _ in range(3):
        held.llm.llm_engine.step()
    assert held.free_blocks > free
