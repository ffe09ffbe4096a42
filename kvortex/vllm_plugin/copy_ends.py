"""What has changed when a copy has ended: blocks that are found from now on, pins that are gone, counters.

EngineCore process, under the scheduler side's lock. A failed copy changes no answer: its blocks are computed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvortex.cache.index import BlockIndex, KeyState
from kvortex.cache.planner import OffloadPlanner
from kvortex.cache.residency import Residency
from kvortex.cache.stats import Ledger, Refusal, Verification
from kvortex.keys import in_sample
from kvortex.vllm_plugin.jobs import JobBook, LoadJob, PrefetchJob, StoreJob
from kvortex.vllm_plugin.prefetcher import Prefetcher
from kvortex.vllm_plugin.requests import RequestState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvortex.vllm_plugin.setup import EngineFacts

logger = logging.getLogger(__name__)


class CopyEnds:
    """Args:
    requests: the live ones by id, as they are at each call.
    prefetcher: None where nothing is prefetched.
    """

    def __init__(
        self,
        facts: EngineFacts,
        index: BlockIndex,
        residency: Residency,
        ledger: Ledger,
        jobs: JobBook,
        requests: Mapping[str, RequestState],
        planner: OffloadPlanner,
        prefetcher: Prefetcher | None,
    ) -> None:
        self._facts = facts
        self._verifies = Verification(facts.settings.verify)
        self._index = index
        self._residency = residency
        self._ledger = ledger
        self._jobs = jobs
        self._requests = requests
        self._planner = planner
        self._prefetcher = prefetcher

    def ended(self, job: StoreJob | LoadJob | PrefetchJob) -> None:
        """Every rank has answered."""
        if isinstance(job, StoreJob):
            self._store(job)
        elif isinstance(job, LoadJob):
            self._load(job)
        else:
            self._prefetch(job)

    def _store(self, job: StoreJob) -> None:
        self._ledger.store.in_flight -= len(job.slots)
        self._planner.ended(len(job.slots))
        if job.failed:
            self._index.abandon(job.slots)
            if not job.overdue:
                self._ledger.store_failures += len(job.slots)
                logger.warning("a store of %d blocks failed: %s", len(job.slots), job.detail)
            return
        kept = [i for i in range(len(job.slots)) if i not in job.lost]
        self._index.abandon([job.slots[i] for i in job.lost])
        self._ledger.refused[Refusal.SOURCE_REUSED] += len(job.lost)
        stored = self._index.publish([job.slots[i] for i in kept]).published
        for i in kept:
            if self._index.state_of(job.keys[i]) is KeyState.READY:
                self._residency.copied(job.keys[i])
        self._ledger.store.blocks += stored
        self._ledger.store.bytes += stored * self._facts.server_block_bytes
        self._ledger.store.seconds += job.seconds
        self._ledger.dedup_references += stored
        self._ledger.dedup_unique += stored

    def _load(self, job: LoadJob) -> None:
        self._ledger.load.in_flight -= len(job.slots)
        self._quarantine(job)
        self._index.unpin(job.slots)
        state = self._requests.get(job.request_id)
        if job.failed:
            self._ledger.load_failures += len(job.gpu_blocks)
            if state is not None:
                state.load_failed = True
                self._ledger.recomputed_tokens += job.ram_tokens
                logger.warning("a load for request %s failed, it is computed instead: %s", job.request_id, job.detail)
        else:
            self._planner.in_vram_too(job.slots)
            self._ledger.load.blocks += len(job.slots)
            self._ledger.with_step_blocks += len(job.slots) if job.with_step else 0
            self._ledger.load.bytes += len(job.slots) * self._facts.server_block_bytes
            self._ledger.load.seconds += job.seconds
            self._verified(job)
            if self._prefetcher is not None:
                self._prefetcher.budget.requests_loaded(len(job.slots))
        if state is None:
            self._ledger.refused[Refusal.ABORTED] += 0 if job.with_step or job.runs else len(job.gpu_blocks)
        elif job.computed_tokens is not None:
            failed_tokens = job.ram_tokens if job.failed else 0
            state.count(
                self._ledger,
                vram_hit=job.local_tokens,
                ram_hit=job.ram_tokens - failed_tokens,
                computed=job.computed_tokens,
                failed_tokens=failed_tokens,
            )

    def _prefetch(self, job: PrefetchJob) -> None:
        assert self._prefetcher is not None, "an answer to a prefetch that nobody ordered"
        self._ledger.load.in_flight -= len(job.slots)
        self._quarantine(job)
        self._prefetcher.ended(job)
        if job.failed:
            self._ledger.load_failures += len(job.gpu_blocks)
            logger.warning("a prefetch of %d blocks failed: %s", len(job.gpu_blocks), job.detail)
            return
        self._ledger.load.blocks += len(job.slots)
        self._ledger.load.bytes += len(job.slots) * self._facts.server_block_bytes
        self._ledger.load.seconds += job.seconds
        self._verified(job)

    def _verified(self, job: LoadJob | PrefetchJob) -> None:
        """The load ended well, so every checksum that its blocks have was right."""
        if self._verifies is Verification.OFF:
            return
        is_all = self._verifies is Verification.ALL
        self._ledger.verified_blocks += len(job.keys) if is_all else sum(map(in_sample, job.keys))

    def _quarantine(self, job: LoadJob | PrefetchJob) -> None:
        """What changed the bytes in these slots may change others there: nothing is stored in them again."""
        if not job.corrupt_slots:
            return
        slots = sorted(job.corrupt_slots)
        lost = self._index.quarantine(slots)
        self._residency.copies_spared([key for key in lost if self._residency.is_clean(key)])
        self._ledger.corrupt_blocks += len(slots)
        self._ledger.checksum_failed_blocks += len(job.gpu_blocks)
        logger.error(
            "%d blocks in RAM are not what was stored there (%s). They are computed again, so answers stay right; "
            "their slots are out of use. Check this machine's memory.",
            len(slots),
            job.detail,
        )

    def give_up_overdue_stores(self) -> None:
        """A store without an answer past its deadline is a block that was not stored; its slot stays out of use until
        the answer comes, since the copy may still run."""
        for job in self._jobs.overdue_stores():
            self._index.discard(job.slots)
            self._ledger.store_failures += len(job.slots)
            logger.warning("a store of %d blocks got no answer in time", len(job.slots))
