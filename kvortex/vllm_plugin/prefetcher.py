"""Sessions and prefetch in the EngineCore process: hears of requests and blocks, takes and gives back GPU blocks.

    request queued   its session has come back; it may wait, and what it waits for is brought meanwhile
    each step        a chunk at most: GPU blocks taken, slots pinned, a load ordered that no request waits for
    load ended       published in vLLM's prefix cache and free; failed or void, free and nothing else
    request served   blocks that it finds are used
    block taken      one that nobody used is wasted
    request ended    its session is silent; what VRAM loses of it may be brought back

Called under the scheduler side's lock. Holds GPU blocks only between an order and its last answer.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvortex.cache.costs import StepCosts
from kvortex.cache.index import BlockIndex
from kvortex.cache.prefetch.budget import Cause, PrefetchBudget
from kvortex.cache.prefetch.demand import Demand
from kvortex.cache.prefetch.planner import KEEP_S, LEAST_P, PrefetchPlanner
from kvortex.cache.prefetch.target import Target
from kvortex.cache.prefix import GroupShape
from kvortex.cache.residency import Residency
from kvortex.cache.sessions.book import SessionBook
from kvortex.cache.sessions.line import session_line
from kvortex.cache.sessions.session import Scope, Session
from kvortex.keys import BlockKey
from kvortex.vllm_plugin.jobs import JobBook, PrefetchJob
from kvortex.vllm_plugin.pool_blocks import PoolBlocks
from kvortex.vllm_plugin.session_names import scope_and_name

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_WARMED_A_LIFE: Final = 4
"""How often a session that is kept is made warm again, in the time that a block lasts in VRAM."""

_WARMED_A_STEP: Final = 512
_WARMED_A_S: Final = 20_000
"""Blocks that are made warm, and one session more: half a microsecond each, so a hundredth of the scheduler's time."""

_GIVES_WAY: Final = 2.0
"""A guess is kept no longer where who loses blocks next is so many times as likely to ask for them before they would go
again: VRAM for those who think for long is not to come from those who do not (docs/decisions.md)."""

_KEYS_A_SLOT: Final = 2
"""Keys that are remembered of silent sessions, for each block that VRAM and RAM can hold."""


@dataclass(frozen=True, slots=True)
class Hinted:
    """What became of a hint.

    Attributes:
        keys: of the session's blocks, or the prompt's.
        in_vram: how many of them VRAM has.
    """

    known: bool
    accepted: bool
    keys: Sequence[BlockKey]
    in_vram: int


class Prefetcher:
    """One engine's; single full-attention KV group."""

    def __init__(
        self,
        pool: BlockPool,
        index: BlockIndex,
        residency: Residency,
        jobs: JobBook,
        costs: StepCosts,
        group: GroupShape,
        capacity_blocks: int,
        clock: Callable[[], float],
    ) -> None:
        assert group.window is None, group
        self._pool = PoolBlocks(pool, group.block_size)
        self._index = index
        self._residency = residency
        self._jobs = jobs
        self._group = group
        self._clock = clock
        self.book = SessionBook(_KEYS_A_SLOT * (index.num_slots + capacity_blocks))
        self.budget = PrefetchBudget(capacity_blocks)
        self._demand = Demand(capacity_blocks, clock())
        self._planner = PrefetchPlanner(
            self.book,
            index,
            self,
            self.budget,
            self._demand,
            costs,
            block_size=group.block_size,
            loading=jobs.loading,
        )
        self._sessions: dict[str, Session] = {}  # of live requests
        self._unserved: set[str] = set()  # asked for blocks since the last step, and did not get them yet
        self._owners: dict[int, Session] = {}  # of GPU blocks, by the last request that used them
        self._open: dict[int, Target] = {}  # GPU blocks that were prefetched and not used yet
        self._begun = 0  # blocks given to requests that began since the last step
        # What was brought or announced, by when it was made warm: the longest ago first.
        self._kept: OrderedDict[Hashable, tuple[Target, float]] = OrderedDict()
        self._may_warm: float = _WARMED_A_STEP
        self._may_warm_at = clock()
        self._in_flight: list[PrefetchJob] = []
        self._has_more = False

    # ---- VRAM, as the planner sees it

    @property
    def free_blocks(self) -> int:
        return self._pool.free

    def holds(self, key: BlockKey) -> bool:
        return self._residency.holds(key)

    def takeable(
        self, count: int, p_return: Callable[[Session], float], below: float, own: Collection[BlockKey]
    ) -> int:
        """How many of the next `count` free blocks may be taken: empty ones, and those that RAM holds too or that are
        not worth a copy, whose session is less likely than `below` to ask for them."""
        wanted_again: dict[int, bool] = {}
        taken = 0
        for block_id, key in self._pool.next_free():
            if taken == count:
                break
            if key is not None:
                if key in own:
                    continue
                if block_id in self._open or not self._is_safe(key):
                    break
                owner = self._owners.get(block_id)
                if owner is not None and owner.number not in wanted_again:
                    wanted_again[owner.number] = p_return(owner) >= below
                if owner is not None and wanted_again[owner.number]:
                    break
            taken += 1
        return taken

    def _is_safe(self, key: BlockKey) -> bool:
        """RAM has the block too, or it is not worth a copy."""
        return self._residency.is_clean(key) or self._residency.is_given_up(key)

    def keep(self, target: Target) -> None:
        now = self._clock()
        warmed_at = self._warm(target, now)
        if target.session is None:
            return  # nobody would know when to let go of a prompt that never comes
        name = target.cause, target.name
        self._kept[name] = target, warmed_at
        self._kept.move_to_end(name, last=warmed_at == now)

    def _warm(self, target: Target, now: float) -> float:
        """When its blocks were moved to the warm end: now, or never, where too much was moved lately."""
        if not self._has_time_to_warm(now):
            return -math.inf
        self._pool.warm(target.keys)
        self._may_warm -= len(target.keys)
        return now

    def _has_time_to_warm(self, now: float) -> bool:
        gained = _WARMED_A_S * (now - self._may_warm_at)
        self._may_warm, self._may_warm_at = min(_WARMED_A_STEP, self._may_warm + gained), now
        return self._may_warm > 0

    # ---- requests

    def request_waits(self, request: Request, keys: Sequence[BlockKey]) -> None:
        """vLLM has queued a request."""
        now = self._clock()
        scope, name = scope_and_name(request)
        session = self.book.arrived(scope, name, keys, now)
        self._sessions[request.request_id] = session
        if not request.skip_reading_prefix_cache:
            # Its last token must be computed, whatever is there.
            reusable = keys[: (request.num_tokens - 1) // self._group.block_size]
            self._planner.request_waits(request.request_id, reusable, session, now)

    def request_asks(self, request: Request, next_key: BlockKey | None) -> None:
        """vLLM considers the request: it has its turn now."""
        self._planner.request_is_served(request.request_id)
        self._unserved.add(request.request_id)
        if request.num_preemptions:
            self._demand.ran_short()
        for job in self._in_flight:
            if not job.late and next_key is not None and next_key in job.keys:
                job.late = True
                self.budget.count.late += len(job.keys)
                if job.chunk.target.session is not None:
                    job.chunk.target.session.late += len(job.keys)

    def request_waits_for_load(self, request: Request) -> None:
        """It was told to wait: that it gets no blocks in this step says nothing of how many there are."""
        self._unserved.discard(request.request_id)

    def request_served(self, request: Request, block_ids: Sequence[int], num_local: int) -> None:
        """vLLM has given the request its blocks; the first `num_local` it found in VRAM."""
        self._unserved.discard(request.request_id)
        self._begun += len(block_ids)
        if not self._open:
            return
        for block_id in self._open.keys() & block_ids[:num_local]:
            target = self._open.pop(block_id)
            self.budget.used(target.cause, 1)
            if target.session is not None:
                target.session.used += 1

    def request_ended(self, request: Request, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> None:
        """The request is over, by whatever cause; its blocks are still its own.

        Args:
            keys: of all complete blocks of its tokens, computed or not.
            block_ids: of its group.
        """
        self._planner.request_is_served(request.request_id)
        self._unserved.discard(request.request_id)
        session = self._sessions.pop(request.request_id, None)
        if session is None:
            return
        size = self._group.block_size
        # The last token's KV was never computed.
        computed = min(request.num_computed_tokens, request.num_tokens - 1) // size
        blocks = keys[:computed]
        self._owners.update(dict.fromkeys(block_ids[: len(blocks)], session))
        self.book.ended(session, blocks, request.num_prompt_tokens // size, request.num_tokens, self._clock())

    # ---- blocks

    def block_taken(self, block_id: int, key: BlockKey) -> None:
        """VRAM has given the block's content up."""
        self._owners.pop(block_id, None)
        target = self._open.pop(block_id, None)
        if target is not None:
            self._waste(target, 1)
        if not self._residency.holds(key):
            self.book.lost(key)

    def _waste(self, target: Target, count: int) -> None:
        self.budget.wasted(target.cause, count)
        if target.session is not None:
            target.session.wasted += count

    # ---- each step

    def plan(self, in_use: int, *, running: bool, requests_load: bool) -> PrefetchJob | None:
        """This step's chunk, ordered, if there is one.

        Args:
            in_use: GPU blocks that requests hold, KVortex's own not counted.
        """
        now = self._clock()
        self._demand.saw(in_use, self._begun, now)
        self._begun = 0
        if self._unserved:
            self._demand.ran_short()
            self._unserved.clear()
        self._keep_warm(now)
        chunk = self._planner.plan(now, running=running, requests_load=requests_load)
        self._has_more = chunk is not None
        if chunk is None:
            return None
        self._index.pin(chunk.slots)
        # What is there of it must not be what is taken for the rest.
        if chunk.start and not chunk.target.in_flight:
            self._pool.warm(chunk.target.keys[: chunk.start])
        gpu_blocks = self._pool.take(len(chunk.keys))
        job = self._jobs.start_prefetch(chunk, gpu_blocks)
        self._planner.issued(chunk)
        self._in_flight.append(job)
        if chunk.target.session is not None:
            chunk.target.session.issued += len(chunk.keys)
        return job

    def _keep_warm(self, now: float) -> None:
        """Moves the blocks of sessions that are still expected back to the warm end.

        vLLM may take them at any time; but then it first takes those of sessions that are less likely to return.
        """
        for _ in range(_WARMED_A_STEP):
            if not self._kept or not self._has_time_to_warm(now):
                return
            name, (target, warmed_at) = next(iter(self._kept.items()))
            if now - warmed_at < self._demand.lasts_s(self._pool.free) / _WARMED_A_LIFE:
                return
            del self._kept[name]
            if self._is_expected(target, now):
                self._kept[name] = target, self._warm(target, now)

    def _is_expected(self, target: Target, now: float) -> bool:
        session = target.session
        if session is None or not session.is_silent or not self._residency.holds(target.keys[0]):
            return False
        if self.book.p_return_within(session, now, KEEP_S) < LEAST_P:
            return False
        return target.cause is not Cause.GUESS or not self._gives_way(session, now)

    def _gives_way(self, session: Session, now: float) -> bool:
        """Whether whose blocks vLLM takes next needs the room more."""
        block_id, key = next(self._pool.next_free(), (-1, None))
        next_to_go = None if key is None else self._owners.get(block_id)
        if next_to_go is None or not next_to_go.is_silent:
            return False
        lasts_s = self._demand.lasts_s(self._pool.free)
        p, p_of_next = (self.book.p_return_within(s, now, lasts_s) for s in (session, next_to_go))
        return p_of_next > _GIVES_WAY * p

    def ended(self, job: PrefetchJob) -> int:
        """Every rank has answered. Returns how many blocks are found in VRAM from now on."""
        self._in_flight.remove(job)
        self._index.unpin(job.slots)
        self._has_more = True
        chunk = job.chunk
        failed = job.failed or job.void
        # What a request has computed or loaded meanwhile needs no second block.
        wanted = [] if failed else [i for i, key in enumerate(job.keys) if not self._residency.holds(key)]
        self._planner.ended(chunk, failed=failed)
        self._waste(chunk.target, len(job.keys) - len(wanted))
        for i in wanted:
            block_id = job.gpu_blocks[i]
            self._pool.publish([block_id], [job.keys[i]], chunk.start + i)
            self._open[block_id] = chunk.target
            if chunk.target.session is not None:
                self._owners[block_id] = chunk.target.session
        self._pool.give_back(job.gpu_blocks)
        end = chunk.start + len(job.keys)
        if wanted:
            name = (chunk.target.cause, chunk.target.name)
            _, warmed_at = self._kept.get(name, (None, self._clock()))
            self._kept[name] = chunk.target, warmed_at
        if wanted and end == len(chunk.target.keys):
            self._pool.warm(chunk.target.keys)
        return len(wanted)

    @property
    def held_blocks(self) -> int:
        """GPU blocks that are being written."""
        return sum(len(job.gpu_blocks) for job in self._in_flight)

    @property
    def wants_step(self) -> bool:
        """There may be more to order, so that vLLM must step although no request runs."""
        return self._has_more

    def may_plan(self) -> bool:
        """Whether a step may have something to order, if nothing runs. Reads no list of vLLM's: for any thread."""
        return self._planner.may_plan(self._clock())

    def heard_of_link(self, rank: int, blocks_per_s: float) -> None:
        self._planner.heard_of_link(rank, blocks_per_s)

    # ---- hints

    def hint(self, scope: Scope, name: str | None, keys: Sequence[BlockKey] | None) -> Hinted:
        """A session, or a prompt with these blocks, is about to come. Any thread, under the lock.

        Costs the same however long the prompt is, but for a session that is looked for by its end.
        """
        if keys is None:
            session = None if name is None else self.book.named(scope, name)
            keys = session.keys if session is not None and session.is_silent else ()
        else:
            session = self.book.continued_by(scope, keys)
        in_vram = self._planner.first_missing(keys)
        to_bring = bool(self._index.match(keys[in_vram : in_vram + 1]))
        there = to_bring or in_vram > 0
        accepted = not there or self._planner.hint(scope, keys, session, self._clock())
        if session is not None and accepted:
            self.book.announced(session, self._clock())
        if there and accepted:
            self._has_more = True
        return Hinted(known=session is not None, accepted=accepted, keys=keys, in_vram=in_vram)

    def found(self, hinted: Hinted) -> dict[str, Any]:
        """What a hint found: whether such a session is known in its scope, and its blocks, or the prompt's, by where
        they are. `accepted` is False when too many hints wait already. Any thread, without the lock: it goes through
        the whole prompt, entry by entry, while others may change.
        """
        keys, in_vram = hinted.keys, hinted.in_vram
        in_ram = len(self._index.match(itertools.islice(keys, in_vram, None)))
        blocks = {"blocks": len(keys), "vram_blocks": in_vram, "ram_blocks": in_ram}
        return {"known": hinted.known, "accepted": hinted.accepted, **blocks}

    # ---- forgetting

    def ram_reset(self) -> None:
        """RAM was emptied: what is on its way is not to be found."""
        for job in self._in_flight:
            job.void = True
        self._planner.forget_targets()

    def vram_reset(self) -> None:
        """vLLM forgot its prefix cache, RAM is emptied with it."""
        self.ram_reset()
        for target in self._open.values():
            self._waste(target, 1)
        self._open.clear()
        self._kept.clear()
        self._owners.clear()

    # ---- statistics

    def lines(self, limit: int, caller: str | None) -> list[dict[str, Any]]:
        """The sessions heard of last, of one caller or of all, as `/kvortex/sessions` has them."""
        now = self._clock()
        return [
            session_line(session, self.book, self._residency, self._index, now)
            for session in self.book.recent(limit, caller)
        ]

    def check(self) -> None:
        """Verifies what must hold; for tests and soaks."""
        self.book.check()
        open_blocks = len(self._open) + self.held_blocks
        assert self.budget.count.open == open_blocks, (self.budget.count, len(self._open), self.held_blocks)
        assert sum(self.budget._open[cause] for cause in Cause) == open_blocks
