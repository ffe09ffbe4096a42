"""The orders that workers have not answered yet.

A job ends when every rank has answered it, and counts as done only if every rank has done it. An answer that comes
twice, or to a job that is not known, changes nothing and is counted.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvortex.cache.prefetch.target import Chunk
from kvortex.cache.residency import Candidate
from kvortex.keys import BlockKey, in_sample
from kvortex.messages import CopyOrder, Direction, JobId, JobResult, Outcome, StepPlan

GRACE = 2.0
"""A rank gives an order up at its deadline; the scheduler side gives the rank up at this multiple of it."""


@dataclass(slots=True, kw_only=True)
class Job:
    """What all kinds of job share. `slots[i]` and `keys[i]` belong together.

    Attributes:
        corrupt_slots: in which a rank found other bytes than were stored; the job has failed.
    """

    job_id: JobId
    slots: Sequence[int]
    keys: Sequence[BlockKey]
    waiting_ranks: set[int]
    failed: bool = False
    detail: str = ""
    seconds: float = 0.0
    corrupt_slots: set[int] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class StoreJob(Job):
    """Attributes:
    block_ids: the GPU blocks read.
    lost: positions whose GPU block was taken for something else before the copy was reported.
    overdue: given up by the scheduler side; the answer is still awaited.
    """

    block_ids: list[int]
    lost: set[int] = field(default_factory=set)
    overdue: bool = False


@dataclass(slots=True, kw_only=True)
class LoadJob(Job):
    """Attributes:
    gpu_blocks: the GPU blocks written, held by the request until the load ends.
    local_tokens, ram_tokens: the request's hit in VRAM, and the tokens that this load brings.
    computed_tokens: the rest of its prompt; None when its tokens are counted already.
    with_step: the request runs in the step that loads.
    runs: vLLM was promised its end, and has taken its request up.
    """

    request_id: str
    gpu_blocks: list[int]
    local_tokens: int
    ram_tokens: int
    computed_tokens: int | None
    with_step: bool
    runs: bool = False


@dataclass(slots=True, kw_only=True)
class PrefetchJob(Job):
    """Attributes:
    gpu_blocks: the GPU blocks written; KVortex holds them until the load ends.
    chunk: what it brings.
    void: a reset came in between: what it brings must not be found.
    late: a request came for it meanwhile.
    """

    gpu_blocks: list[int]
    chunk: Chunk
    void: bool = False
    late: bool = False


class JobBook:
    """Numbers the jobs, collects the step's plan, matches answers to jobs. Scheduler thread.

    Args:
        sample: of the blocks stored, only those of the sample get a checksum.
    """

    def __init__(self, num_ranks: int, timeout_s: float, clock: Callable[[], float], *, sample: bool = False) -> None:
        self._ranks = frozenset(range(num_ranks))
        self._timeout_s = timeout_s
        self._clock = clock
        self._sample = sample
        self._next_id = 0
        self._jobs: dict[JobId, StoreJob | LoadJob | PrefetchJob] = {}
        self._store_deadlines: OrderedDict[JobId, float] = OrderedDict()
        self._source_of: dict[int, tuple[JobId, int]] = {}
        self._loading: Counter[BlockKey] = Counter()
        # Of loads that no step's kernels may wait for yet: the GPU blocks they write, the request that waits.
        self._target_of: dict[int, JobId] = {}
        self._load_of: dict[str, JobId] = {}
        self._runs_with: dict[str, LoadJob] = {}
        self._plan = StepPlan()
        self._num_overdue = 0
        self.ignored_answers = 0

    @property
    def unanswered(self) -> int:
        return len(self._jobs)

    @property
    def awaited(self) -> int:
        """Unanswered and not given up: worth a step of vLLM's for their answers."""
        return len(self._jobs) - self._num_overdue

    def loading(self, key: BlockKey | None) -> bool:
        """True while a load is bringing the block of this key."""
        return key is not None and key in self._loading

    @property
    def sources(self) -> Collection[int]:
        """The GPU blocks that stores read."""
        return self._source_of.keys()

    def start_store(self, candidates: Sequence[Candidate], slots: Sequence[int], written_by: int) -> StoreJob:
        """See `CopyOrder.written_by`."""
        job = StoreJob(
            job_id=self._new_id(),
            slots=slots,
            keys=[c.key for c in candidates],
            waiting_ranks=set(self._ranks),
            block_ids=[c.block_id for c in candidates],
        )
        self._jobs[job.job_id] = job
        self._store_deadlines[job.job_id] = self._clock() + GRACE * self._timeout_s
        for i, block_id in enumerate(job.block_ids):
            self._source_of[block_id] = (job.job_id, i)
        order = replace(self._order(job.job_id, Direction.STORE, job.block_ids, job.slots), written_by=written_by)
        if self._sample:
            order = replace(order, sampled=np.array([in_sample(key) for key in job.keys], np.bool_))
        self._plan.stores.append(order)
        return job

    def start_load(
        self,
        request_id: str,
        gpu_blocks: list[int],
        slots: list[int],
        keys: list[BlockKey],
        *,
        local_tokens: int,
        ram_tokens: int,
        computed_tokens: int | None,
        refused: bool,
        with_step: bool,
    ) -> LoadJob:
        job = LoadJob(
            job_id=self._new_id(),
            slots=slots,
            keys=keys,
            waiting_ranks=set(self._ranks),
            request_id=request_id,
            gpu_blocks=gpu_blocks,
            local_tokens=local_tokens,
            ram_tokens=ram_tokens,
            computed_tokens=computed_tokens,
            with_step=with_step,
        )
        self._jobs[job.job_id] = job
        if not with_step:
            self._loading.update(keys)
            self._target_of.update(dict.fromkeys(gpu_blocks, job.job_id))
            self._load_of[request_id] = job.job_id
        at_once = self._plan.step_loads if with_step else self._plan.loads
        orders = self._plan.refused if refused else at_once
        orders.append(self._order(job.job_id, Direction.LOAD, gpu_blocks, slots))
        self._plan.requests[job.job_id] = request_id
        return job

    def start_prefetch(self, chunk: Chunk, gpu_blocks: list[int]) -> PrefetchJob:
        job = PrefetchJob(
            job_id=self._new_id(),
            slots=chunk.slots,
            keys=chunk.keys,
            waiting_ranks=set(self._ranks),
            gpu_blocks=gpu_blocks,
            chunk=chunk,
        )
        self._jobs[job.job_id] = job
        self._loading.update(job.keys)
        order = self._order(job.job_id, Direction.LOAD, gpu_blocks, job.slots)
        self._plan.prefetches.append(replace(order, is_prefetch=True))
        return job

    def _new_id(self) -> JobId:
        self._next_id += 1
        return JobId(self._next_id)

    def _order(self, job_id: JobId, direction: Direction, gpu_blocks: Sequence[int], slots: Sequence[int]) -> CopyOrder:
        return CopyOrder(
            job_id,
            direction,
            np.asarray(gpu_blocks, dtype=np.int64),
            np.asarray(slots, dtype=np.int64),
            self._timeout_s,
        )

    def take_plan(self) -> StepPlan:
        plan, self._plan = self._plan, StepPlan()
        return plan

    def answer(self, rank: int, result: JobResult) -> StoreJob | LoadJob | PrefetchJob | None:
        """Takes one rank's answer; the job, if this was the last rank it waited for."""
        job = self._jobs.get(result.job_id)
        if job is None or rank not in job.waiting_ranks:
            self.ignored_answers += 1
            return None
        job.waiting_ranks.remove(rank)
        job.seconds = max(job.seconds, result.seconds)
        if result.outcome is not Outcome.DONE:
            job.failed = True
            job.detail = job.detail or f"{result.outcome.value} on rank {rank}: {result.detail}"
            job.corrupt_slots.update(result.corrupt_slots)
        if job.waiting_ranks:
            if job.failed and isinstance(job, LoadJob) and self._load_of.get(job.request_id) == job.job_id:
                self._need(job.job_id)  # another rank may have promised it, and vLLM frees its blocks now
                self._runs_with[job.request_id] = job
            return None
        del self._jobs[result.job_id]
        if isinstance(job, StoreJob):
            self._store_deadlines.pop(job.job_id, None)
            self._num_overdue -= job.overdue
            for block_id in job.block_ids:
                if self._source_of.get(block_id, (None, 0))[0] == job.job_id:
                    del self._source_of[block_id]
        elif isinstance(job, PrefetchJob):
            self._stop_loading(job.keys)
        elif not job.with_step:
            self._stop_loading(job.keys)
            for block_id in job.gpu_blocks:
                if self._target_of.get(block_id) == job.job_id:
                    del self._target_of[block_id]
            if self._load_of.get(job.request_id) == job.job_id:
                del self._load_of[job.request_id]
            if self._runs_with.get(job.request_id) is job:
                del self._runs_with[job.request_id]
        return job

    def _stop_loading(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._loading[key] -= 1
            if not self._loading[key]:
                del self._loading[key]

    def source_reused(self, block_id: int) -> None:
        """VRAM took the block for something else: what a store copies from now on is not its key's."""
        entry = self._source_of.pop(block_id, None)
        if entry is not None:
            job = self._jobs[entry[0]]
            assert isinstance(job, StoreJob)
            job.lost.add(entry[1])

    def target_completed(self, block_id: int) -> None:
        """vLLM files the block as complete: if a load still writes it, that load was promised, and this step's kernels
        may read it."""
        if (job_id := self._target_of.get(block_id)) is not None:
            job = self._need(job_id)
            job.runs = True
            self._runs_with[job.request_id] = job

    def request_ended(self, request_id: str) -> LoadJob | None:
        """Whatever the request's load still writes is about to belong to others.

        Returns:
            The load, if its end is not told yet and the request may have run: it was promised, or a rank failed it.
        """
        if (job_id := self._load_of.get(request_id)) is not None:
            self._need(job_id)
        return self._runs_with.get(request_id)

    def _need(self, job_id: JobId) -> LoadJob:
        job = self._jobs[job_id]
        assert isinstance(job, LoadJob)
        for block_id in job.gpu_blocks:
            self._target_of.pop(block_id, None)
        self._load_of.pop(job.request_id, None)
        self._plan.needed.append(job_id)
        return job

    def forget_sources(self) -> None:
        """VRAM forgot every block at once."""
        for block_id in list(self._source_of):
            self.source_reused(block_id)

    def overdue_stores(self) -> list[StoreJob]:
        """Stores whose ranks have not answered in time; each is returned once. Looks at the oldest only."""
        overdue: list[StoreJob] = []
        now = self._clock()
        while self._store_deadlines:
            job_id, deadline = next(iter(self._store_deadlines.items()))
            if deadline > now:
                break
            del self._store_deadlines[job_id]
            job = self._jobs[job_id]
            assert isinstance(job, StoreJob)
            job.failed = job.overdue = True
            self._num_overdue += 1
            job.detail = "no answer in time"
            overdue.append(job)
        return overdue
