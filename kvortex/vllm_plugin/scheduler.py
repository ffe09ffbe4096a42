"""The scheduler side: what is where, what to move. EngineCore process; never touches bytes.

    vLLM asks            get_num_new_matched_tokens -> how much of the prompt RAM has
    vLLM has allocated   update_state_after_alloc   -> slots pinned, a load ordered
    each step            build_connector_meta       -> this step's loads and stores
    workers answer       update_connector_output    -> slots published or unpinned, tokens counted
    request ends         request_finished           -> its blocks are cold

vLLM calls all of these from one thread. Another thread reads the statistics and brings hints, hence the lock; nothing
waits under it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvortex.cache.costs import StepCosts
from kvortex.cache.gate import Gate
from kvortex.cache.holdings import BlockOrder
from kvortex.cache.index import BlockIndex
from kvortex.cache.load_choice import LoadChoice
from kvortex.cache.losses import LossRecord
from kvortex.cache.misses import Miss, MissExplainer
from kvortex.cache.planner import OffloadPlanner
from kvortex.cache.prefix import GroupShape, PrefixHit, PrefixMatcher
from kvortex.cache.residency import Residency
from kvortex.cache.sessions.session import scope_of, session_name
from kvortex.cache.stats import Ledger, Refusal, Verification
from kvortex.keys import BlockKey
from kvortex.messages import StepPlan, StepReport
from kvortex.vllm_plugin import compat
from kvortex.vllm_plugin.admission import LATER, Admission, Answer
from kvortex.vllm_plugin.copy_ends import CopyEnds
from kvortex.vllm_plugin.jobs import JobBook, LoadJob
from kvortex.vllm_plugin.pool_view import PoolView
from kvortex.vllm_plugin.prefetcher import Prefetcher
from kvortex.vllm_plugin.request_log import EndedRequest, RequestLog
from kvortex.vllm_plugin.requests import RequestState
from kvortex.vllm_plugin.statistics import Statistics
from kvortex.vllm_plugin.step_log import StepLog

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvortex.vllm_plugin.setup import EngineFacts

logger = logging.getLogger(__name__)

_IDLE_AFTER_S: Final = 0.2
"""An engine that has not stepped for so long steps only if it is told to."""


class SchedulerSide:
    """Decides; hears of every block and every copy. See the module's text for the order of calls.

    Args:
        settle: does what can wait for a moment in which no request waits for this side: `Deferred.settle`.
    """

    def __init__(
        self,
        facts: EngineFacts,
        index: BlockIndex,
        groups: Sequence[GroupShape],
        *,
        drop_last_block: bool,
        settle: Callable[[], None] | None = None,
        request_log: RequestLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._facts = facts
        self._settle = settle
        self._index = index
        self._groups = groups
        self._clock = clock
        self._matcher = PrefixMatcher(groups, index, drop_last_block=drop_last_block)
        self._residency = Residency(clock)
        self._ledger = Ledger()
        self._request_log = request_log
        self._losses = LossRecord(index.num_slots)
        self._explainer = MissExplainer(groups, index, self._losses, self._residency.holds)
        self._verifies = Verification(facts.settings.verify)
        timeout_s = facts.settings.transfer_timeout
        self._jobs = JobBook(facts.num_ranks, timeout_s, clock, sample=self._verifies is Verification.SAMPLE)
        self._gate = Gate(clock)
        self._requests: dict[str, RequestState] = {}
        self._costs = StepCosts()
        self._choice = LoadChoice(self._costs, clock)
        self._steps = StepLog()
        self._planned_at = clock()
        self._lock = threading.RLock()  # taken again where vLLM's pool tells of what is done under it
        self._view: PoolView | None = None
        self._planner: OffloadPlanner | None = None
        self._prefetcher: Prefetcher | None = None
        self._admission: Admission | None = None
        self._ends: CopyEnds | None = None
        self._statistics: Statistics | None = None

    def bind_pool(self, pool: BlockPool) -> None:
        """vLLM has built its block pool; called once, before any request."""
        with self._lock:
            self._view = PoolView(pool, _PoolEvents(self))
            self._planner = OffloadPlanner(
                self._facts.watermarks, self._view.capacity_blocks, self._residency, self._index, self._clock
            )
            self._admission = Admission(
                self._facts,
                self._groups,
                self.view,
                self._matcher,
                self._explainer,
                self._residency,
                self._jobs,
                self._gate,
                self._choice,
                self._steps,
            )
            self._prefetcher = self._make_prefetcher(pool)
            self._ends = CopyEnds(
                self._facts,
                self._index,
                self._residency,
                self._ledger,
                self._jobs,
                self._requests,
                self._planner,
                self._prefetcher,
            )
            self._statistics = Statistics(
                self._facts,
                self._index,
                self._residency,
                self._ledger,
                self._gate,
                self.view,
                self._prefetcher,
                self._request_log,
                self._clock,
            )

    def _make_prefetcher(self, pool: BlockPool) -> Prefetcher | None:
        if not self._facts.settings.prefetch_enabled:
            return None
        if len(self._groups) > 1 or self._groups[0].window is not None:
            logger.info("no prefetch: it knows models with full attention in every layer only")
            return None
        capacity = self.view.capacity_blocks
        return Prefetcher(
            pool, self._index, self._residency, self._jobs, self._costs, self._groups[0], capacity, self._clock
        )

    @property
    def view(self) -> PoolView:
        assert self._view is not None, "vLLM has not bound its block pool yet"
        return self._view

    @property
    def planner(self) -> OffloadPlanner:
        assert self._planner is not None, "vLLM has not bound its block pool yet"
        return self._planner

    @property
    def admission(self) -> Admission:
        assert self._admission is not None, "vLLM has not bound its block pool yet"
        return self._admission

    @property
    def ends(self) -> CopyEnds:
        assert self._ends is not None, "vLLM has not bound its block pool yet"
        return self._ends

    @property
    def statistics(self) -> Statistics:
        assert self._statistics is not None, "vLLM has not bound its block pool yet"
        return self._statistics

    # ---- a request arrives ---------------------------------------------------------------------------------------

    def queued(self, request: Request) -> None:
        """vLLM has queued a new request."""
        if self._prefetcher is None:
            return
        with self._lock:
            self.view.refresh()
            state = self._requests.setdefault(request.request_id, RequestState())
            keys = state.keys(request, self._groups[0], self.view.hash_block_size)
            self._prefetcher.request_waits(request, keys)

    def match(self, request: Request, local_tokens: int) -> Answer:
        """What RAM can restore of the request's prompt beyond `local_tokens`; see `Answer`."""
        with self._lock:
            self.view.refresh()
            state = self._requests.setdefault(request.request_id, RequestState())
            if self._prefetcher is not None:
                self._prefetcher.request_asks(request, self.admission.next_key(request, state, local_tokens))
            answer = self.admission.answer(request, state, local_tokens, len(self._requests))
            return self._later(request) if answer is LATER else answer

    def _later(self, request: Request) -> Answer:
        if self._prefetcher is not None:
            self._prefetcher.request_waits_for_load(request)
        return LATER

    def allocated(self, request: Request, blocks: KVCacheBlocks, ram_tokens: int) -> None:
        """vLLM took GPU blocks for the request; `ram_tokens` of the last answer are to be loaded into them."""
        with self._lock:
            self.view.refresh()
            state = self._requests.setdefault(request.request_id, RequestState())
            hit, state.hit = state.hit, None
            if hit is None:
                return  # the second call for one load
            if self._prefetcher is not None:
                num_local = hit.local_tokens // self._groups[0].block_size
                self._prefetcher.request_served(request, blocks.get_block_ids()[0], num_local)
            first_time = not state.counted and request.num_preemptions == 0
            state.counted = True
            if first_time:
                self._ledger.refused[Refusal.QUICKER_COMPUTED] += state.declined
                state.prompted = True
                state.admitted_s = time.time()
                for group in self._groups:
                    keys = state.keys(request, group, self.view.hash_block_size)
                    self._index.prompt(keys, request.num_tokens)
            self._touch_local(request, state, hit.local_tokens)
            computed = request.num_tokens - hit.local_tokens - ram_tokens
            if ram_tokens == 0:
                if first_time:
                    unasked = Miss.NOT_ASKED if request.skip_reading_prefix_cache else Miss.UNUSABLE
                    self._ledger.count_tokens(
                        vram_hit=hit.local_tokens,
                        ram_hit=0,
                        missed=state.explanation.settled(computed, otherwise=unasked),
                        seen_tokens=state.explanation.seen_tokens,
                    )
                return
            self._order_load(request, state, hit, blocks, ram_tokens, first_time)

    def _touch_local(self, request: Request, state: RequestState, local_tokens: int) -> None:
        """A hit in VRAM is a use of the copy in RAM too."""
        for group in self._groups:
            keys = state.keys(request, group, self.view.hash_block_size)
            held = self._index.ready_slots(keys[: local_tokens // group.block_size])
            slots = list(held.values())
            self._index.touch(slots)
            self.planner.in_vram_too(slots)

    def _order_load(
        self,
        request: Request,
        state: RequestState,
        hit: PrefixHit,
        blocks: KVCacheBlocks,
        ram_tokens: int,
        first_time: bool,
    ) -> None:
        gpu_blocks: list[int] = []
        slots: list[int] = []
        keys: list[BlockKey] = []
        complete = True
        ids_of_group = blocks.get_block_ids()
        end = hit.local_tokens + ram_tokens
        for group in self._groups:
            group_keys = state.keys(request, group, self.view.hash_block_size)
            planned = hit.slots[group.group_id]
            for i in range(hit.local_tokens // group.block_size, end // group.block_size):
                block_id = ids_of_group[group.group_id][i]
                if self.view.is_null(block_id):
                    continue  # outside the sliding window
                gpu_blocks.append(block_id)
                if i not in planned:
                    complete = False  # vLLM would take the block's old bytes for this key's
                    continue
                slots.append(planned[i])
                keys.append(group_keys[i])
        if not complete:
            assert not state.with_step, "the blocks of a single group are always complete"
            self._ledger.refused[Refusal.LAYOUT] += len(gpu_blocks)
            slots, keys = [], []
        load_bytes, work = self.admission.load_and_work(request, hit)
        if state.with_step:
            self._choice.goes_with_step(load_bytes, work)
        else:
            self._choice.goes_before_step(load_bytes)
        self._index.touch(slots)
        self._index.pin(slots)
        computed = request.num_tokens - end
        is_counted = not first_time
        if first_time and state.with_step:
            # Such a load does not fail, and its request may have ended before its end is told.
            state.count(self._ledger, vram_hit=hit.local_tokens, ram_hit=ram_tokens, computed=computed)
            is_counted = True
        job = self._jobs.start_load(
            request.request_id,
            gpu_blocks,
            slots,
            keys,
            local_tokens=hit.local_tokens,
            ram_tokens=ram_tokens,
            computed_tokens=None if is_counted else computed,
            refused=not complete,
            with_step=state.with_step,
        )
        self._ledger.load.in_flight += len(job.slots)

    def hint(
        self, session: str | None, tokens: list[int] | None, cache_salt: str | None = None, caller: str = ""
    ) -> dict[str, Any]:
        """A session, by its name, or a prompt, by its token ids, is about to come. Any thread.

        Returns:
            `enabled`, and, if so, what `Prefetcher.found` says.
        """
        if self._prefetcher is None:
            return {"enabled": False}
        keys = None
        if tokens is not None:
            group, algorithm = self._groups[0], self._facts.hash_algorithm
            keys = compat.prompt_keys(tokens, cache_salt, group, self.view.hash_block_size, algorithm)
            keys = keys[: (len(tokens) - 1) // group.block_size]  # a prompt's last token is always computed
        with self._lock:
            hinted = self._prefetcher.hint(scope_of(cache_salt, caller), session_name(session), keys)
        return {"enabled": True, **self._prefetcher.found(hinted)}

    def may_prefetch(self) -> dict[str, Any]:
        """Whether a step may have something to prefetch, in an engine that takes none. Any thread."""
        with self._lock:
            idle = self._clock() - self._planned_at > _IDLE_AFTER_S
            return {"due": idle and self._prefetcher is not None and self._prefetcher.may_plan()}

    def sessions(self, top: int, caller: str | None = None) -> dict[str, Any]:
        """The engine's part of `/kvortex/sessions`: the `top` sessions heard of last, of one caller or of all."""
        with self._lock:
            if self._prefetcher is None:
                return {"enabled": False, "known": 0, "sessions": []}
            lines = self._prefetcher.lines(top, caller)
            return {"enabled": True, "known": len(self._prefetcher.book), "sessions": lines}

    # ---- each step -----------------------------------------------------------------------------------------------

    def plan_step(self, scheduler_output: SchedulerOutput) -> StepPlan:
        """This step's orders. Costs what it orders and what it computes; a few comparisons when nothing is due."""
        with self._lock:
            self.view.refresh()
            self._planned_at = self._clock()
            self._choice.begin_step(len(self._requests))
            self.ends.give_up_overdue_stores()
            line = self._gate.take_line()
            if line.blocks:
                self.planner.outrun()
            decision = self.planner.plan(self.view, line)
            if decision.refused:
                self._ledger.refused[Refusal.RAM_PINNED] += decision.refused
            if decision.not_worth:
                self._ledger.refused[Refusal.NOT_WORTH] += decision.not_worth
            self._ledger.ram_evicted += len(decision.evicted)
            self._losses.evicted(decision.evicted)
            if decision.reservation is not None:
                written_by = self._steps.written_by(max(c.completion for c in decision.candidates))
                self._jobs.start_store(decision.candidates, decision.reservation.slots, written_by)
                self._ledger.store.in_flight += len(decision.candidates)
            if self._prefetcher is not None:
                self._prefetch(self._prefetcher, running=bool(scheduler_output.num_scheduled_tokens))
            plan = self._jobs.take_plan()
            plan.timed_as = self._steps.begin(
                scheduler_output, self._residency.completions, loads=bool(plan.step_loads)
            )
            plan.number = self._steps.number
            if self._settle is not None and not scheduler_output.scheduled_new_reqs:
                self._settle()
            return plan

    def _prefetch(self, prefetcher: Prefetcher, *, running: bool) -> None:
        held = prefetcher.held_blocks
        job = prefetcher.plan(
            self.view.in_use_blocks - held, running=running, requests_load=self._ledger.load.in_flight > held
        )
        if job is not None:
            self._ledger.load.in_flight += len(job.slots)
            self._choice.goes_before_step(len(job.slots) * self._facts.rank_block_bytes)

    @property
    def busy(self) -> bool:
        """Orders are unanswered, so vLLM must keep stepping for the answers to come in; or there is more to order."""
        return self._jobs.awaited > 0 or (self._prefetcher is not None and self._prefetcher.wants_step)

    def answers(self, report: StepReport) -> None:
        """Workers' answers, one a rank for each order, in any order."""
        with self._lock:
            self.view.refresh()
            for rank, link in report.links.items():
                self._choice.heard_of(rank, link)
                if self._prefetcher is not None:
                    self._prefetcher.heard_of_link(rank, link.bytes_per_s / self._facts.rank_block_bytes)
            for number, seconds in report.step_seconds.items():
                if (work := self._steps.work_of(number)) is not None:
                    self._costs.saw(work, seconds)
            for rank, results in report.results.items():
                for result in results:
                    if (ended := self._jobs.answer(rank, result)) is not None:
                        self.ends.ended(ended)
            self._ledger.ignored_answers = self._jobs.ignored_answers
            if self._settle is not None:
                self._settle()

    # ---- a request ends, the cache is reset ------------------------------------------------------------------------

    def finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """The request is over, by whatever cause; vLLM frees its blocks after this, the prompt's tail first."""
        with self._lock:
            self.view.refresh()
            state = self._requests.pop(request.request_id, None)
            if state is not None and state.prompted:
                for group in self._groups:
                    keys = state.keys(request, group, self.view.hash_block_size)
                    # Blocks were told of as they were found or stored; a policy orders them by the whole prompt.
                    self._index.touch(list(self._index.ready_slots(keys).values()))
                    self._index.answered(keys, request.num_output_tokens)
                self._log(request, state)
            if self._prefetcher is not None and state is not None:
                keys = state.keys(request, self._groups[0], self.view.hash_block_size)
                self._prefetcher.request_ended(request, keys, block_ids[0])
            load = self._jobs.request_ended(request.request_id)
            if load is not None and state is not None and (load.runs or request.num_output_tokens):
                self._ran_before_its_load_was_told(load, state)
            self._steps.request_ended(request.request_id)
            for ids in block_ids:
                self._residency.used(reversed(ids))

    def _ran_before_its_load_was_told(self, load: LoadJob, state: RequestState) -> None:
        load.runs = True
        failed_tokens = load.ram_tokens if load.failed else 0
        self._ledger.recomputed_tokens += failed_tokens
        if load.computed_tokens is not None:
            ram_hit = load.ram_tokens - failed_tokens
            state.count(
                self._ledger,
                vram_hit=load.local_tokens,
                ram_hit=ram_hit,
                computed=load.computed_tokens,
                failed_tokens=failed_tokens,
            )
            load.computed_tokens = None

    def _log(self, request: Request, state: RequestState) -> None:
        if self._request_log is not None:
            group = self._groups[0]
            keys = state.keys(request, group, self.view.hash_block_size)
            # The last token was sampled and never computed: a block that ends with it is in no cache.
            computed = max(request.num_prompt_tokens, request.num_tokens - 1) // group.block_size
            tokens = request.num_prompt_tokens, request.num_output_tokens
            self._request_log.add(EndedRequest(state.admitted_s, *tokens, tuple(keys[:computed])))

    def reset(self) -> None:
        """Forgets every block in RAM; copies under way end without being seen again."""
        with self._lock:
            self.view.refresh()
            self._drop_ram("a reset of the connector")
            self._residency.all_copies_lost()

    def _drop_ram(self, cause: str) -> None:
        dropped = self._index.reset()
        self._losses.reset()
        self._ledger.refused[Refusal.RESET] += dropped
        for state in self._requests.values():
            state.hit = None
        if self._prefetcher is not None:
            self._prefetcher.ram_reset()
        logger.info("%s: %d blocks in RAM were dropped", cause, dropped)

    def prefix_cache_reset(self) -> None:
        """vLLM forgot its prefix cache: for new weights, or to measure from cold. What RAM holds is as old."""
        self._drop_ram("vLLM has reset its prefix cache")
        self._residency.clear()
        self._jobs.forget_sources()
        if self._prefetcher is not None:
            self._prefetcher.vram_reset()

    # ---- statistics ------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """The document of `/kvortex/stats`. Any thread; costs the same however many blocks there are."""
        with self._lock:
            return self.statistics.snapshot(active=len(self._requests))

    def blocks(self, top: int, by: str) -> dict[str, Any]:
        """The engine's part of `/kvortex/blocks`. Any thread; takes no lock, so the scheduler never waits for it."""
        return self.statistics.blocks(top, BlockOrder(by))

    def log_totals(self) -> None:
        """One line at the end: did it help?"""
        with self._lock:
            logger.info("KVortex at its end: %s", self._ledger.in_words())


class _PoolEvents:
    """Turns what the pool view hears into the scheduler side's state. Runs inside vLLM's calls, for each block.

    Only what the other thread also changes or goes through takes the lock, the sessions; of all else it reads single
    counters and entries.
    """

    def __init__(self, side: SchedulerSide) -> None:
        self._side = side

    def block_cached(self, block_id: int, key: BlockKey) -> None:
        side = self._side
        in_ram = side._index.is_ready(key)
        if in_ram:
            side._ledger.dedup_references += 1
        side._losses.found_again(key)
        side._residency.block_cached(block_id, key, in_ram=in_ram)
        side._jobs.target_completed(block_id)

    def block_uncached(self, block_id: int, key: BlockKey) -> None:
        side = self._side
        missed = not side._residency.is_clean(key) and not side._residency.is_given_up(key)
        if side._residency.block_uncached(block_id, key):
            side._ledger.vram_evicted += 1
            side._jobs.source_reused(block_id)
            if missed:
                side._ledger.vram_lost += 1
                side.planner.outrun()
                side._losses.not_stored(key)
            if side._prefetcher is not None:
                with side._lock:
                    side._prefetcher.block_taken(block_id, key)

    def prefix_cache_reset(self) -> None:
        with self._side._lock:
            self._side.prefix_cache_reset()
