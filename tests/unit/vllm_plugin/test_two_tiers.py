"""The scheduler side over vLLM's own block pool, RAM full: who waits, and what is given up for whom."""

from __future__ import annotations

import importlib
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from kvortex.cache.gate import MAX_WAIT_S
from kvortex.cache.index import BlockIndex
from kvortex.cache.planner import Watermarks
from kvortex.cache.policies import make_policy
from kvortex.cache.prefix import GroupShape
from kvortex.keys import block_key
from kvortex.messages import CopyOrder, JobResult, Outcome, StepReport
from tests.fakes.clock import FakeClock

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed")
    block_pool = importlib.import_module("vllm.v1.core.block_pool")
    scheduler = importlib.import_module("kvortex.vllm_plugin.scheduler")

SIZE = 16


class Server:
    """vLLM's pool and scheduler side; the test says when copies end."""

    def __init__(self, vram: int, ram: int, threshold: float = 0.8) -> None:
        self.clock = FakeClock()
        facts = SimpleNamespace(
            settings=SimpleNamespace(transfer_timeout=30.0, prefetch_enabled=False, verify="off"),
            watermarks=Watermarks(threshold, threshold, batch_blocks=vram, idle_after_s=30.0),
            num_ranks=1,
            rank_block_bytes=1,
            server_block_bytes=1,
            loads_go_with_steps=False,
            vllm_version="",
            model="",
            block_size=SIZE,
        )
        self.index = BlockIndex(ram, make_policy("lru", ram, clock=self.clock))
        self.side = scheduler.SchedulerSide(
            facts, self.index, [GroupShape(0, SIZE)], drop_last_block=False, clock=self.clock
        )
        self.pool = block_pool.BlockPool(vram + 1, enable_caching=True, hash_block_size=SIZE)
        self.side.bind_pool(self.pool)
        self.orders: list[CopyOrder] = []
        self.asked = 0

    def request(self, talk: int, blocks: int) -> Any:
        self.asked += 1
        return SimpleNamespace(
            request_id=str(self.asked),
            num_tokens=blocks * SIZE + 1,
            block_hashes=[(100 * talk + i).to_bytes(32, "little") for i in range(blocks)],
            skip_reading_prefix_cache=False,
            cache_salt=None,
            num_preemptions=0,
            num_output_tokens=1,
        )

    def try_to_admit(self, request: Any) -> list[Any] | None:
        """The request's blocks, or None if it has to wait."""
        local: list[Any] = []
        for block_hash in request.block_hashes:
            if (found := self.pool.get_cached_block(block_hash, [0])) is None:
                break
            local += found
        tokens, _ = self.side.match(request, len(local) * SIZE)
        if tokens is None:
            return None
        self.pool.touch(local)
        blocks = local + self.pool.get_new_blocks(len(request.block_hashes) + 1 - len(local))
        self.side.allocated(request, SimpleNamespace(get_block_ids=lambda: ([b.block_id for b in blocks],)), tokens)
        self.loaded = tokens // SIZE
        return blocks

    def step(self) -> None:
        """Orders are given out, and stay unanswered."""
        plan = self.side.plan_step(SimpleNamespace(num_scheduled_tokens={}))
        self.orders += [*plan.loads, *plan.stores]

    def end_copies(self) -> None:
        results = [JobResult(o.job_id, o.direction, Outcome.DONE, 0.0, 0) for o in self.orders]
        self.orders = []
        self.side.answers(StepReport({0: results}))

    def finish(self, request: Any, blocks: list[Any]) -> None:
        self.clock.advance(1.0)
        for block, block_hash in zip(blocks, request.block_hashes, strict=False):
            self.pool._insert_block_hash(block_key(block_hash, 0), block, SIZE)
        self.side.finished(request, [[block.block_id for block in blocks]])
        self.pool.free_blocks(reversed(blocks))

    def ask(self, talk: int, blocks: int) -> int:
        """From begin to end; the blocks that RAM gave."""
        request = self.request(talk, blocks)
        for _ in range(10):
            admitted = self.try_to_admit(request)
            self.step()
            self.end_copies()
            if admitted is not None:
                self.finish(request, admitted)
                self.side._index.check()
                self.side._residency.check()
                return self.loaded
        raise AssertionError("the request waits for ever")


def test_conversations_in_turn_that_fit_both_tiers_are_found_and_none_waits_for_ever() -> None:
    server = Server(vram=20, ram=24)
    for turn in range(4):
        found = [server.ask(talk, 4) for talk in range(9)]
        assert found == ([0] * 9 if turn == 0 else [4] * 9), turn
    assert server.side.snapshot()["evicted"]["vram_uncopied_blocks"] == 0
    assert server.side.snapshot()["admission"]["overdue"] == 0


def test_a_request_waits_while_the_blocks_that_it_would_take_are_being_copied() -> None:
    server = Server(vram=10, ram=100)
    server.ask(0, 4)
    server.ask(1, 4)
    request = server.request(2, 4)
    assert server.try_to_admit(request) is None
    server.step()
    assert [len(order.slots) for order in server.orders] == [8], "all, while RAM has room: the next one shall not wait"
    assert server.try_to_admit(request) is None, "they are not there yet"
    behind = server.request(3, 1)
    assert server.try_to_admit(behind) is None, "it would take what the first in line waits for"
    server.step()
    server.end_copies()
    server.clock.advance(0.5)
    assert server.try_to_admit(request) is not None
    server.step()
    assert server.side.snapshot()["evicted"]["vram_uncopied_blocks"] == 0
    assert server.side.snapshot()["admission"] == {"waited": 1, "overdue": 0, "seconds": 0.5}


def test_where_nothing_is_ever_found_nobody_waits_for_copies_but_who_comes_back() -> None:
    def full() -> Server:
        server = Server(vram=10, ram=100)
        server.ask(0, 4)
        server.ask(1, 4)
        for _ in range(30):
            server.side.match(server.request(99, 8), 0)  # asks, and is never answered
            server.side.plan_step(SimpleNamespace(num_scheduled_tokens={}))
        return server

    server = full()
    assert server.try_to_admit(server.request(2, 4)) is not None
    server = full()
    assert server.try_to_admit(server.request(0, 8)) is None, "VRAM has half of it"


def test_a_copy_that_does_not_end_holds_a_request_up_until_the_deadline_only() -> None:
    server = Server(vram=10, ram=100)
    server.ask(0, 4)
    server.ask(1, 4)
    request = server.request(2, 4)
    assert server.try_to_admit(request) is None
    server.step()
    server.clock.advance(MAX_WAIT_S)
    assert server.try_to_admit(request) is not None
    assert server.side.snapshot()["admission"] == {"waited": 1, "overdue": 1, "seconds": MAX_WAIT_S}
    server.end_copies()
    assert server.index.ready == 5, "VRAM took two blocks that held nothing, and three before they were copied"
    server.side._index.check()


def test_a_block_that_the_request_itself_finds_in_vram_holds_it_up_not() -> None:
    server = Server(vram=5, ram=100, threshold=1.0)
    server.ask(0, 4)
    server.pool.get_new_blocks(1)
    assert server.side._residency.is_due(next(iter(server.side.view.next_taken())))
    assert server.side.match(server.request(0, 4), 4 * SIZE) != (None, False), "all that is due is its own"
    assert server.side.match(server.request(0, 4), 3 * SIZE) == (None, False), "what it does not use is not"


def test_blocks_that_are_not_worth_a_copy_hold_nobody_up() -> None:
    server = Server(vram=10, ram=8)
    server.ask(0, 4)
    server.ask(1, 4)
    blocks = [b.block_id for b in server.pool.blocks if not b.is_null]
    server.side._residency.take_these(blocks)
    server.side._residency.declined([block_key(h, 0) for t in range(2) for h in server.request(t, 4).block_hashes])
    assert server.try_to_admit(server.request(2, 4)) is not None
