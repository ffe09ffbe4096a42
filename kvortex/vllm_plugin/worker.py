"""The worker side: one a rank, moves bytes and decides nothing. Worker process, its main thread.

register     vLLM's KV memory -> layout, host slab, copy engine
each step    bind -> the plan; loads submitted, stores submitted after the step's kernels; answers collected
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from kvortex.errors import UnfitError
from kvortex.keys import SAMPLE_EVERY
from kvortex.messages import CopyOrder, Direction, JobId, JobResult, LinkFacts, Outcome, StepPlan, StepReport
from kvortex.sizes import format_bytes
from kvortex.transfer.base import CopyEngine, Fence, KVLayout, StepLoads, Stopwatch
from kvortex.transfer.cpu import CpuCopyEngine
from kvortex.transfer.slab import HostSlab
from kvortex.vllm_plugin import compat
from kvortex.vllm_plugin.layer_waits import LayerWaits
from kvortex.vllm_plugin.step_log import STEPS_REMEMBERED

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvortex.vllm_plugin.setup import EngineFacts

logger = logging.getLogger(__name__)

MAX_PROMISE_S = 0.1
"""Bound on how far ahead a load's end is promised; a step is rarely longer."""

LINK_TOLERANCE = 0.05
"""How far a link's rate may be from the one last told."""

CLOSE_TIMEOUT = 10.0
"""Seconds that a worker waits at its end for copies under way."""

_SETTLE_POLL_S: Final = 1e-3

_workers: Final[weakref.WeakSet[WorkerSide]] = weakref.WeakSet()
"""Of this process, those that have had vLLM's KV memory."""


def settle_workers() -> bool:
    """Has this process's workers wait until none of their copies touches KV memory; see `WorkerSide.settle`."""
    return all(worker.settle(CLOSE_TIMEOUT) for worker in list(_workers))


class WorkerSide:
    """Carries a plan to the copy engine and its answers back."""

    def __init__(self, facts: EngineFacts, kv_cache_config: KVCacheConfig, rank: int) -> None:
        self._facts = facts
        self._kv_cache_config = kv_cache_config
        self._rank = rank
        self._one_group = len(kv_cache_config.kv_cache_groups) == 1
        self._slab: HostSlab | None = None
        self._engine: CopyEngine | None = None
        self._layer_waits = LayerWaits({})
        self._num_regions = 0
        self._step_loads: StepLoads | None = None
        self._stopwatch: Stopwatch | None = None
        self._stopwatches: dict[int, Stopwatch] = {}
        self._told_link: LinkFacts | None = None
        self._before_kernels: Fence | None = None
        self._loads: list[CopyOrder] = []
        self._for_step: list[CopyOrder] = []
        self._prefetches: list[CopyOrder] = []
        self._stores: list[CopyOrder] = []
        self._plan_number: int | None = None
        self._step_ends: deque[tuple[int, Fence]] = deque(maxlen=STEPS_REMEMBERED)
        self._refused: list[CopyOrder] = []
        self._waiting: dict[JobId, tuple[str, CopyOrder]] = {}
        self._promised: set[JobId] = set()
        self._unpromisable: set[JobId] = set()
        self._unheard: set[JobId] = set()
        self._set_aside: list[JobResult] = []
        self._thread_id = 0
        self._is_launching = False
        self._clock = time.monotonic
        self._collected_at = self._clock()
        self._report: list[JobResult] = []
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._invalid_blocks: set[int] = set()

    def register(self, kv_caches: dict[str, Any]) -> None:
        """vLLM's KV memory is there: makes the host slab and the engine."""
        layout = compat.kv_layout(kv_caches, self._kv_cache_config)
        if layout.block_bytes != self._facts.rank_block_bytes:
            raise UnfitError(
                f"rank {self._rank} has {layout.block_bytes} bytes a block, the scheduler side counts "
                f"{self._facts.rank_block_bytes}",
                hint="run this model without KVortex: kv_cache.backend: none",
            )
        self._slab, engine = self._open_engine(layout)
        self._engine = engine if self._facts.settings.verify == "off" else self._verified(engine, layout, self._slab)
        self._layer_waits = LayerWaits(layout.regions_of)
        self._num_regions = len(layout.regions)
        _workers.add(self)
        logger.info(
            "rank %d: %d slots of %s in host RAM, %s in all",
            self._rank,
            self._facts.num_slots,
            format_bytes(layout.block_bytes),
            format_bytes(self._facts.num_slots * layout.block_bytes),
        )

    def _open_engine(self, layout: KVLayout) -> tuple[HostSlab, CopyEngine]:
        device = layout.regions[0].device
        num_slots, num_streams = self._facts.num_slots, self._facts.settings.num_streams
        if device.type == "cpu":
            slab = HostSlab(num_slots, layout.block_bytes)
            return slab, CpuCopyEngine(layout, slab, num_streams)
        if device.type == "cuda":
            from kvortex.transfer.cuda import open_cuda

            return open_cuda(layout, num_slots, num_streams, lambda: self._is_launching)
        raise UnfitError(
            f"KVortex has no copy engine for {device.type}",
            hint="run this model without KVortex: kv_cache.backend: none",
        )

    def _verified(self, engine: CopyEngine, layout: KVLayout, slab: HostSlab) -> CopyEngine:
        from kvortex.transfer.verifying import VerifyingEngine

        share = 1.0 if self._facts.settings.verify == "all" else 1 / SAMPLE_EVERY
        return VerifyingEngine(engine, layout, slab, self._facts.settings.num_streams, share=share)

    @property
    def engine(self) -> CopyEngine:
        assert self._engine is not None, "vLLM has not registered its KV memory yet"
        return self._engine

    def bind(self, plan: StepPlan) -> None:
        """A step begins. Stores of an earlier step that vLLM ended without a forward pass are submitted now."""
        self._thread_id = threading.get_ident()
        self.submit_stores()
        self._is_launching = True
        assert self._step_loads is None, "a step began before the last one's kernels were submitted"
        self._layer_waits.begin_step()
        if needed := [job_id for job_id in plan.needed if job_id in self._promised]:
            self.engine.hold_kernels(needed)
        # Behind the wait for those loads: it is not what the step computes.
        if plan.timed_as and self._rank == 0:
            self._stopwatch = self._stopwatches[plan.timed_as] = self.engine.stopwatch()
        # Taken before this step's kernels are submitted: none of them reads a block that the step loads into, so a
        # load need not wait for them. Taken behind the loads above: their blocks may be this step's targets.
        loads = plan.loads or plan.step_loads or plan.prefetches
        self._before_kernels = self.engine.fence() if loads else None
        # Of a request that has ended: nobody would make kernels wait for these any more, so they are told at their end.
        self._unpromisable.update(job_id for job_id in plan.needed if job_id in self._waiting)
        self._loads = plan.loads
        self._for_step = plan.step_loads
        self._prefetches = plan.prefetches
        self._stores = plan.stores
        self._plan_number = plan.number
        self._refused = plan.refused
        for order in [*plan.loads, *plan.refused]:
            self._waiting[order.job_id] = (plan.requests[order.job_id], order)

    def begin_forward(self, kind: str | None) -> None:
        """Submits the loads. They wait for the kernels of earlier steps, which may still read the blocks they write.

        Args:
            kind: of the forward pass whose kernels come next (or, where no load goes with the step, have come).
        """
        layers_tell = self._layer_waits.begin_forward(kind)
        for_step, self._for_step = self._for_step, []
        if for_step:
            assert self._before_kernels is not None
            self._step_loads = self.engine.load_for_step(for_step, after=self._before_kernels)
            if not layers_tell:
                self._step_loads.hold_kernels(range(self._num_regions))
        # No request hears of a prefetch, so there is nobody whom its end could be promised to.
        prefetched = [order.job_id for order in self._prefetches]
        self._unpromisable.update(prefetched)
        self._unheard.update(prefetched)
        loads, self._loads, self._prefetches = [*self._loads, *self._prefetches], [], []
        if loads:
            self.engine.submit(loads, after=self._before_kernels)
        refused, self._refused = self._refused, []
        for order in refused:
            detail = "the blocks that vLLM allocated are not those that RAM holds"
            self._answer(JobResult(order.job_id, Direction.LOAD, Outcome.FAILED, 0.0, 0, detail))

    def wait_for_layer(self, layer_name: str) -> None:
        """The kernels of this layer are about to be submitted."""
        regions = self._layer_waits.tells(layer_name)
        if self._step_loads is not None:
            self._step_loads.hold_kernels(regions)

    def end_forward(self) -> None:
        """The step's kernels are submitted. May be called again."""
        self._is_launching = False
        loads, self._step_loads = self._step_loads, None
        # The step cannot be taken back, and its answers may be wrong: no answer is better.
        if loads is not None and not loads.end():
            raise RuntimeError("a layer's kernels ran before its KV was loaded")
        self._layer_waits.end_forward()
        if self._stopwatch is not None:
            self._stopwatch.stop()
            self._stopwatch = None

    def submit_stores(self) -> None:
        """Stores wait for the kernels that may still write the blocks that they read; mostly those of steps that have
        long ended, so that copies do not stand still through a long step. May be called again."""
        if self._plan_number is not None:
            self._step_ends.append((self._plan_number, self.engine.fence()))
            self._plan_number = None
        stores, self._stores = self._stores, []
        for store in stores:
            self._unheard.add(store.job_id)
            self.engine.submit([store], after=self._end_of(store.written_by))

    def _end_of(self, plan_number: int | None) -> Fence | None:
        """Behind the kernels of this plan's step; behind those of a later one where that was too long ago."""
        if plan_number is None:
            return None
        return next(fence for number, fence in self._step_ends if number >= plan_number)

    def collect(self) -> None:
        """Takes what the engine has ended since the last call."""
        if self._engine is None:
            return
        self.end_forward()
        now = self._clock()
        step_s, self._collected_at = now - self._collected_at, now
        self._take_answers(self._engine)
        if not self._waiting:
            return
        # vLLM hears of a load at the end of a step and runs its request a step later. A load that ends by then is told
        # now, and the kernels that need it wait for it on the device, should it be late.
        for job_id in self._engine.promise(min(step_s, MAX_PROMISE_S), self._unpromisable):
            request_id, _ = self._waiting.pop(job_id)
            self._promised.add(job_id)
            self._finished.add(request_id)

    def _take_answers(self, engine: CopyEngine) -> None:
        set_aside, self._set_aside = self._set_aside, []
        for result in [*set_aside, *engine.poll()]:
            self._answer(result)

    def _answer(self, result: JobResult) -> None:
        self._report.append(result)
        self._unheard.discard(result.job_id)
        if result.direction is Direction.STORE:
            return
        if result.job_id in self._promised:
            self._promised.remove(result.job_id)
            # Its request runs already, on bytes that may be wrong: nothing but the device's failure leads here.
            assert result.outcome is Outcome.DONE, f"a promised load failed: {result.detail}"
            return
        self._unpromisable.discard(result.job_id)
        waiting = self._waiting.pop(result.job_id, None)
        if waiting is None:
            return  # told before; the scheduler side counts it
        request_id, order = waiting
        self._finished.add(request_id)
        if result.outcome is Outcome.DONE:
            return
        if self._one_group:
            self._invalid_blocks.update(order.gpu_blocks.tolist())
        else:
            self._failed.add(request_id)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """(requests whose load ended, those of them whose load failed), since the last call."""
        finished, self._finished = self._finished, set()
        failed, self._failed = self._failed, set()
        return finished, failed

    def take_invalid_blocks(self) -> set[int]:
        """GPU blocks whose load failed, since the last call."""
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def take_report(self) -> StepReport | None:
        """The answers since the last call, or None when there are none."""
        results, self._report = self._report, []
        report = StepReport()
        if results:
            report.results[self._rank] = results
        if (link := self._untold_link()) is not None:
            report.links[self._rank] = link
        for number, stopwatch in list(self._stopwatches.items()):
            if (seconds := stopwatch.seconds()) is not None:
                report.step_seconds[number] = seconds
                del self._stopwatches[number]
        return report if report.results or report.links or report.step_seconds else None

    @property
    def may_report_late(self) -> bool:
        """Whether stores or prefetches are under way."""
        return bool(self._unheard)

    def take_late_report(self) -> StepReport | None:
        """The stores and prefetches that have ended since the step was submitted, told when its output is taken: where
        steps overlap, one step earlier or two, and a request may wait for it. Only for the thread that runs the steps.
        """
        if self._engine is None or threading.get_ident() != self._thread_id:
            return None
        ended: list[JobResult] = []
        for result in self._engine.poll():
            # vLLM hears of other loads in a step's own answer, and the scheduler side hears of them with it.
            (ended if result.job_id in self._unheard else self._set_aside).append(result)
        ended_ids = {result.job_id for result in ended}
        self._unheard -= ended_ids
        self._unpromisable -= ended_ids
        return StepReport({self._rank: ended}) if ended else None

    def settle(self, timeout_s: float) -> bool:
        """Waits until every copy submitted has ended; their answers go with the next step's. True if all ended.

        An engine in its caller's process is put to sleep between two steps, however many copies wait for later ones;
        vLLM then unmaps the memory that they would touch. An engine in a process of its own first makes steps until
        each is answered or given up. Only for the thread that runs the steps; of another's engine nothing is asked.
        """
        if self._engine is None or threading.get_ident() != self._thread_id:
            return True
        self.end_forward()
        end_s = time.monotonic() + timeout_s
        while True:
            self._take_answers(self._engine)
            if not (self._unheard or self._waiting or self._promised):
                return True
            if time.monotonic() >= end_s:
                logger.warning("rank %d: copies were still under way after %.0f s", self._rank, timeout_s)
                return False
            time.sleep(_SETTLE_POLL_S)

    def _untold_link(self) -> LinkFacts | None:
        """The link, where it is not what the scheduler side was told."""
        link = None if self._engine is None else self._engine.link
        told = self._told_link
        if link is None or (
            told is not None
            and told.by_layer == link.by_layer
            and abs(link.bytes_per_s - told.bytes_per_s) < LINK_TOLERANCE * told.bytes_per_s
        ):
            return None
        self._told_link = link
        return link

    def close(self) -> None:
        """Gives the slab back. Idempotent."""
        engine, self._engine = self._engine, None
        slab, self._slab = self._slab, None
        ended = engine is None or engine.close(CLOSE_TIMEOUT)
        if not ended:
            logger.warning("rank %d: copies were still under way after %.0f s", self._rank, CLOSE_TIMEOUT)
        elif slab is not None:
            slab.close()
