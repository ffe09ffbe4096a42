"""The scheduler side over vLLM's own block pool, with a stand-in for vLLM's scheduler and for the workers.

What a GPU block and a slot hold is the key of what was last written there, so every hit is checked: a request that
finds a block under a key must find that key's content in it.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool

from kvortex.cache.index import BlockIndex
from kvortex.cache.policies import make_policy
from kvortex.cache.prefix import GroupShape
from kvortex.config.settings import KVCacheSettings
from kvortex.keys import BlockKey, block_key
from kvortex.messages import CopyOrder, Direction, JobResult, LinkFacts, Outcome, StepPlan, StepReport
from kvortex.vllm_plugin.prefetcher import Prefetcher
from kvortex.vllm_plugin.scheduler import SchedulerSide
from kvortex.vllm_plugin.setup import EngineFacts
from tests.fakes.clock import FakeClock

BLOCK_SIZE = 16
BLOCK_BYTES = 1000
NOTHING = BlockKey(b"")


class Request(SimpleNamespace):
    """The fields of vLLM's request that KVortex reads, and what the stand-in keeps."""


def request(name: str, hashes: list[bytes], *, session: str | None = None, salt: str | None = None) -> Request:
    """A prompt of whole blocks and one token more."""
    tokens = len(hashes) * BLOCK_SIZE + 1
    return Request(
        request_id=name,
        block_hashes=hashes,
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        num_output_tokens=0,
        num_preemptions=0,
        skip_reading_prefix_cache=False,
        kv_transfer_params=None if session is None else {"session_id": session},
        cache_salt=salt,
        blocks=[],
        hit_blocks=0,
    )


def hashes_of(conversation: int, count: int) -> list[bytes]:
    return [f"{conversation:016}{i:016}".encode() for i in range(count)]


class MiniVllm:
    """One engine: `submit` and `step`."""

    def __init__(
        self, num_blocks: int = 60, num_slots: int = 500, *, prefetch: bool = True, verify: str = "off"
    ) -> None:
        settings = KVCacheSettings(
            ram_cache_size=num_slots * BLOCK_BYTES, offload_threshold=0.0, prefetch_enabled=prefetch, verify=verify
        )
        facts = EngineFacts(
            settings=settings,
            model="mini",
            vllm_version="0",
            engine_id="mini",
            block_size=BLOCK_SIZE,
            num_ranks=1,
            rank_block_bytes=BLOCK_BYTES,
            num_slots=num_slots,
            namespace=b"",
            loads_go_with_steps=False,
            hash_algorithm="sha256",
            step_blocks=16,
        )
        self.clock = FakeClock()
        index = BlockIndex(num_slots, make_policy("lru", num_slots, idle_after_s=30.0))
        self.side = SchedulerSide(facts, index, [GroupShape(0, BLOCK_SIZE)], drop_last_block=False, clock=self.clock)
        self.pool = BlockPool(num_blocks + 1, True, BLOCK_SIZE)
        self.side.bind_pool(self.pool)
        self.in_vram: dict[int, BlockKey] = {}
        self.in_ram: dict[int, BlockKey] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.max_running = 4
        self.loading: dict[str, Request] = {}
        self.request_of: dict[int, str] = {}
        self.orders: list[tuple[CopyOrder, list[BlockKey]]] = []
        self.fail_loads = False
        self.corrupt: set[int] = set()  # slots whose bytes have changed, as loads find
        self.answers_held = False

    @property
    def prefetcher(self) -> Prefetcher:
        found = self.side._prefetcher
        assert found is not None
        return found

    def submit(self, asked: Request) -> None:
        self.waiting.append(asked)
        self.side.queued(asked)

    def abort(self, asked: Request) -> None:
        for requests in (self.waiting, self.running):
            if asked in requests:
                requests.remove(asked)
        self._finish(asked)

    def step(self) -> StepPlan:
        """Schedules, orders, computes, answers."""
        scheduled = self._schedule()
        output: Any = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys((r.request_id for r in scheduled), 1),
            total_num_scheduled_tokens=len(scheduled),
        )
        plan = self.side.plan_step(output)
        self._submit(plan)
        for asked in scheduled:
            self._compute(asked)
        if not self.answers_held:
            self.answer()
        self.side._residency.check()
        self.side._index.check()
        if self.side._prefetcher is not None:
            self.side._prefetcher.check()
        return plan

    def run(self, *requests: Request, steps: int = 50) -> None:
        """Submits, and steps until all of it has ended, stores too, and nothing more is prefetched."""
        for asked in requests:
            self.submit(asked)
        quiet = 0
        for _ in range(steps):
            # vLLM steps once more for the requests that have ended, and stores are ordered then.
            quiet = 0 if self.waiting or self.running or self.loading or self.side.busy else quiet + 1
            if quiet > 2:
                return
            self.clock.advance(0.01)
            self.step()
        raise AssertionError(f"not done after {steps} steps: {self.waiting}, {self.running}, {self.side.busy}")

    def _schedule(self) -> list[Request]:
        for asked in list(self.waiting):
            if len(self.running) + len(self.loading) >= self.max_running:
                break
            keys = [block_key(h, 0) for h in asked.block_hashes]
            local = []
            for key in keys:
                block = self.pool.cached_block_hash_to_block.get_one_block(key)
                if block is None or asked.skip_reading_prefix_cache:
                    break
                assert self.in_vram.get(block.block_id) == key, f"block {block.block_id} is not what it is found as"
                local.append(block)
            tokens, loads = self.side.match(asked, len(local) * BLOCK_SIZE)
            if tokens is None:
                continue
            num_new = len(keys) + 1 - len(local)
            free = self.pool.get_num_free_blocks() - sum(block.ref_cnt == 0 for block in local)
            if num_new > free:
                break
            self.pool.touch(local)
            asked.blocks = [*local, *self.pool.get_new_blocks(num_new)]
            asked.hit_blocks = len(local) + tokens // BLOCK_SIZE
            ids = [block.block_id for block in asked.blocks]
            self.side.allocated(asked, SimpleNamespace(get_block_ids=lambda ids=ids: (ids,)), tokens)  # type: ignore[arg-type]
            self.waiting.remove(asked)
            if loads:
                self.loading[asked.request_id] = asked
            else:
                self.running.append(asked)
        return list(self.running)

    def _submit(self, plan: StepPlan) -> None:
        assert not plan.step_loads
        assert all(load.is_prefetch for load in plan.prefetches)
        assert not any(load.is_prefetch for load in plan.loads)
        self.request_of.update(plan.requests)
        for store in plan.stores:
            content = [self.in_vram.get(block_id, NOTHING) for block_id in store.gpu_blocks.tolist()]
            self.orders.append((store, content))
        for load in [*plan.loads, *plan.prefetches]:
            self.orders.append((load, [self.in_ram[slot] for slot in load.slots.tolist()]))
            self.in_vram.update(dict.fromkeys(load.gpu_blocks.tolist(), NOTHING))

    def _compute(self, asked: Request) -> None:
        for i, h in enumerate(asked.block_hashes):
            block, key = asked.blocks[i], block_key(h, 0)
            if i < asked.hit_blocks:
                assert self.in_vram.get(block.block_id) == key, f"{asked.request_id} reads what is not its own"
            self.in_vram[block.block_id] = key
            self.pool._insert_block_hash(key, block, num_tokens=(i + 1) * BLOCK_SIZE)
        asked.num_computed_tokens = asked.num_tokens
        self.running.remove(asked)
        self._finish(asked)

    def _finish(self, asked: Request) -> None:
        self.side.finished(asked, ([block.block_id for block in asked.blocks],))
        self.pool.free_blocks(reversed(asked.blocks))
        asked.blocks = []

    def answer(self, rng: random.Random | None = None) -> None:
        """The workers' answers to all orders, or to some of them."""
        report = StepReport(links={0: LinkFacts(1000.0 * BLOCK_BYTES, by_layer=False)})
        answered = [entry for entry in self.orders if rng is None or rng.random() < 0.5]
        self.orders = [entry for entry in self.orders if entry not in answered]
        for order, content in answered:
            is_load = order.direction is Direction.LOAD
            corrupt = tuple(s for s in order.slots.tolist() if s in self.corrupt) if is_load else ()
            failed = is_load and (self.fail_loads or bool(corrupt))
            if not failed and order.direction is Direction.LOAD:
                self.in_vram.update(zip(order.gpu_blocks.tolist(), content, strict=True))
            elif not failed:
                self.in_ram.update(zip(order.slots.tolist(), content, strict=True))
            outcome = Outcome.FAILED if failed else Outcome.DONE
            answer = JobResult(order.job_id, order.direction, outcome, 0.01, 1, corrupt_slots=corrupt)
            report.results.setdefault(0, []).append(answer)
            asked = self.loading.pop(self.request_of.pop(order.job_id, ""), None)
            if asked is not None:
                asked.hit_blocks = 0 if failed else asked.hit_blocks
                self.running.append(asked)
        self.side.answers(report)
