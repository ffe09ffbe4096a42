"""The scheduler side, over vLLM's own block pool, against the replay: one trace, the same policies, the same hits."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvortex.cache.index import BlockIndex
from kvortex.cache.planner import Watermarks
from kvortex.cache.policies import EVICTION_POLICIES, LRU, make_policy
from kvortex.cache.policies.base import EvictionPolicy
from kvortex.cache.prefix import GroupShape
from kvortex.keys import BlockKey, block_key
from kvortex.messages import CopyOrder, JobResult, Outcome, StepReport
from kvortex.replay.synthesis import mixed_trace
from kvortex.replay.tiers import IndexTier, VramTier
from kvortex.replay.trace import BLOCK_TOKENS, TracedRequest
from tests.fakes.clock import FakeClock

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed")
    block_pool = importlib.import_module("vllm.v1.core.block_pool")
    scheduler = importlib.import_module("kvortex.vllm_plugin.scheduler")

VRAM_BLOCKS = 300


class Server:
    """Requests one after another through the scheduler side, as vLLM's scheduler calls it; copies succeed at once."""

    def __init__(self, policy: EvictionPolicy, ram_blocks: int, clock: FakeClock) -> None:
        facts = SimpleNamespace(
            settings=SimpleNamespace(transfer_timeout=30.0, prefetch_enabled=False, verify="off"),
            watermarks=Watermarks(threshold=0.0, target=0.0, batch_blocks=VRAM_BLOCKS, idle_after_s=30.0),
            num_ranks=1,
            rank_block_bytes=1,
            server_block_bytes=1,
            loads_go_with_steps=False,
        )
        self.index = BlockIndex(ram_blocks, policy)
        group = GroupShape(0, BLOCK_TOKENS)
        self.side = scheduler.SchedulerSide(facts, self.index, [group], drop_last_block=False, clock=clock)
        self.pool = block_pool.BlockPool(VRAM_BLOCKS + 1, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        self.side.bind_pool(self.pool)
        self.asked = 0

    def play(self, traced: TracedRequest) -> int:
        """Blocks found, in VRAM and RAM. VRAM holds the whole prompt while it runs."""
        self.asked += 1
        hashes = [block.to_bytes(32, "little") for block in traced.blocks]
        request = SimpleNamespace(
            request_id=str(self.asked),
            num_tokens=len(hashes) * BLOCK_TOKENS + 1,  # the last token is always computed
            block_hashes=hashes,
            skip_reading_prefix_cache=False,
            cache_salt=None,
            num_preemptions=0,
            num_output_tokens=traced.output_tokens,
        )
        local: list[Any] = []
        for block_hash in hashes:
            if (found := self.pool.get_cached_block(block_hash, [0])) is None:
                break
            local += found
        self.pool.touch(local)
        ram_tokens, waits = self.side.match(request, len(local) * BLOCK_TOKENS)
        assert waits is (ram_tokens > 0)
        blocks = local + self.pool.get_new_blocks(len(hashes) - len(local))
        block_ids = [block.block_id for block in blocks]
        self.side.allocated(request, SimpleNamespace(get_block_ids=lambda: (block_ids,)), ram_tokens)
        self._step()
        for block, block_hash in zip(blocks[len(local) :], hashes[len(local) :], strict=True):
            self.pool._insert_block_hash(block_key(block_hash, 0), block, BLOCK_TOKENS)
        self._step()
        self.side.finished(request, [block_ids])
        self.pool.free_blocks(reversed(blocks))
        self._step()
        return len(local) + ram_tokens // BLOCK_TOKENS

    def _step(self) -> None:
        plan = self.side.plan_step(SimpleNamespace(num_scheduled_tokens={}))
        results = [_done(order) for order in [*plan.loads, *plan.stores]]
        self.side.answers(StepReport({0: results}))


def _done(order: CopyOrder) -> JobResult:
    return JobResult(order.job_id, order.direction, Outcome.DONE, 0.0, 0)


class Listens(LRU):
    """LRU that writes down what it is told."""

    def __init__(self, num_slots: int) -> None:
        self.heard: list[tuple[str, tuple[BlockKey, ...], int]] = []
        super().__init__(num_slots)

    def prompt(self, keys: Sequence[BlockKey], num_tokens: int) -> None:
        self.heard.append(("prompt", tuple(keys), num_tokens))

    def answered(self, keys: Sequence[BlockKey], num_output_tokens: int) -> None:
        self.heard.append(("answered", tuple(keys), num_output_tokens))


def small_requests(seed: int) -> list[TracedRequest]:
    """Some hundred requests of complete blocks, each of which fits VRAM."""
    requests = []
    for request in mixed_trace(seed, seconds=900, chats=0.6, agents=0.05, documents=0.35, a_second=1.0):
        blocks = request.blocks[: min(VRAM_BLOCKS, request.input_tokens // BLOCK_TOKENS)]
        if blocks:
            tokens = len(blocks) * BLOCK_TOKENS + 1
            requests.append(TracedRequest(request.arrival_s, tokens, request.output_tokens, blocks))
    return requests


# Share of the blocks asked for. The server offers blocks once they are computed and again when their request ended; the
# replay, all at once. `priority` counts a block's use at both.
TOLERANCE = {"lru": 0.0, "adaptive": 0.005, "priority": 0.025}


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_a_trace_hits_the_same_on_the_server_and_in_the_replay(policy: str) -> None:
    requests = small_requests(seed=5)
    ram_blocks = 800
    clock = FakeClock(0.0)
    server = Server(make_policy(policy, ram_blocks, clock=clock), ram_blocks, clock)
    tier, vram = IndexTier(policy, ram_blocks), VramTier(VRAM_BLOCKS)
    served = replayed = asked = 0
    for request in requests:
        clock.now_s = request.arrival_s
        asked += len(request.blocks)
        served += server.play(request)
        in_vram = vram.prefix(request.blocks)
        replayed += in_vram + tier.play(request, in_vram).loaded
        vram.put(request.blocks)
    assert tier.index.evictions > ram_blocks
    assert abs(served - replayed) <= TOLERANCE[policy] * asked, (served, replayed, asked)
    server.index.check()
    server.side._residency.check()


def test_blocks_that_are_not_worth_a_copy_are_counted_and_not_missed() -> None:
    clock = FakeClock(0.0)
    server = Server(make_policy("adaptive", 200, clock=clock), 200, clock)
    for request in small_requests(seed=7)[:300]:
        clock.now_s = request.arrival_s
        server.play(request)
    counted = server.side._ledger.as_dict()
    assert counted["refused"]["not_worth"] > 200
    assert counted["evicted"]["vram_blocks"] > 10 * VRAM_BLOCKS
    assert counted["evicted"]["vram_uncopied_blocks"] == 0
    assert server.side.planner.extra_room_blocks == 0
    assert counted["refused"]["ram_pinned"] == 0


def test_the_policy_hears_the_same_prompts_and_answers() -> None:
    requests = small_requests(seed=6)[:200]
    clock = FakeClock(0.0)
    heard_by_server, heard_by_replay = Listens(500), Listens(500)
    server = Server(heard_by_server, 500, clock)
    tier = IndexTier("lru", 500)
    tier.index = BlockIndex(500, heard_by_replay)
    for request in requests:
        server.play(request)
        tier.play(request, 0)
    assert heard_by_server.heard == heard_by_replay.heard
    assert len(heard_by_server.heard) == 2 * len(requests)
