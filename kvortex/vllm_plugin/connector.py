"""`KVortexConnector`: what vLLM calls. Translates vLLM's hooks to the scheduler side or the worker side, no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger

from kvortex.cache.index import BlockIndex
from kvortex.cache.policies import make_deferred
from kvortex.cache.usage import SlotUsage
from kvortex.keys import COLLISION_RESISTANT
from kvortex.messages import StepPlan, StepReport
from kvortex.vllm_plugin import compat
from kvortex.vllm_plugin.logs import share_vllms_log
from kvortex.vllm_plugin.parent_watch import end_with_parent
from kvortex.vllm_plugin.request_log import RequestLog, open_request_log
from kvortex.vllm_plugin.scheduler import SchedulerSide
from kvortex.vllm_plugin.setup import engine_facts
from kvortex.vllm_plugin.stats_socket import StatsServer
from kvortex.vllm_plugin.worker import WorkerSide, settle_workers

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionBackend, AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

UNSAFE_HASH = (
    "prefix_caching_hash_algo is %s: who knows how can make two prompts that share a block, and have another user's "
    "request answered from it. Where users do not trust each other, use sha256 or sha256_cbor."
)


@dataclass
class KVortexMetadata(KVConnectorMetadata):
    """A step's plan on its way to the workers."""

    plan: StepPlan = field(default_factory=StepPlan)


@dataclass
class KVortexWorkerMetadata(KVConnectorWorkerMetadata):
    """The workers' answers on their way back.

    Attributes:
        later: where worker and scheduler share a process: what has ended since the step was submitted. A worker of its
            own is not asked again.
    """

    report: StepReport = field(default_factory=StepReport)
    later: Callable[[], StepReport | None] | None = None

    def __reduce__(self) -> tuple[type[KVortexWorkerMetadata], tuple[StepReport]]:
        return KVortexWorkerMetadata, (self.report,)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVortexWorkerMetadata:
        assert isinstance(other, KVortexWorkerMetadata), type(other)
        return KVortexWorkerMetadata(self.report.merge(other.report))


class KVortexConnector(KVConnectorBase_V1, SupportsHMA):
    """KVortex in vLLM's EngineCore process (scheduler role) or in a worker process (worker role)."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        share_vllms_log()
        self._facts = facts = engine_facts(vllm_config, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._stats: StatsServer | None = None
        self._request_log: RequestLog | None = None
        if role is KVConnectorRole.SCHEDULER:
            compat.loads_wait_for_kernels(vllm_config)
            groups = compat.group_shapes(kv_cache_config)
            policy = make_deferred(
                facts.settings.eviction_policy, facts.num_slots, idle_after_s=facts.settings.idle_after
            )
            index = BlockIndex(facts.num_slots, policy, namespace=facts.namespace, usage=SlotUsage(facts.num_slots))
            self._request_log = open_request_log(facts, groups[0].block_size)
            self._scheduler = SchedulerSide(
                facts,
                index,
                groups,
                drop_last_block=compat.drops_last_block(vllm_config),
                settle=policy.settle,
                request_log=self._request_log,
            )
            if facts.hash_algorithm not in COLLISION_RESISTANT:
                logger.warning(UNSAFE_HASH, facts.hash_algorithm)
            if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
                logger.warning(
                    "kv_load_failure_policy is %r: a failed load fails its request. `kvortex serve` sets it to "
                    '"recompute"; with vllm serve, put "kv_load_failure_policy": "recompute" in --kv-transfer-config.',
                    vllm_config.kv_transfer_config.kv_load_failure_policy,
                )
        else:
            rank = vllm_config.parallel_config.rank
            self._worker = WorkerSide(facts, kv_cache_config, rank)

    @property
    def _scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None, "a scheduler hook was called in a worker"
        return self._scheduler

    @property
    def _worker_side(self) -> WorkerSide:
        assert self._worker is not None, "a worker hook was called in the scheduler"
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a dropped store is only a later miss

    # ---- scheduler role ----

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._scheduler_side.bind_pool(gpu_block_pool)
        end_with_parent()
        side = self._scheduler_side
        answers: dict[str, Callable[..., dict[str, Any]]] = {
            "stats": side.snapshot,
            "blocks": side.blocks,
            "sessions": side.sessions,
            "hint": side.hint,
            "may_prefetch": side.may_prefetch,
        }
        self._stats = StatsServer(self._facts.engine_id, answers)

    def on_new_request(self, request: Request) -> None:
        self._scheduler_side.queued(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler_side.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduler_side.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return KVortexMetadata(self._scheduler_side.plan_step(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, KVortexWorkerMetadata):
            self._scheduler_side.answers(meta.report)
            if meta.later is not None and (report := meta.later()) is not None:
                self._scheduler_side.answers(report)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler_side.finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._scheduler_side.busy

    def reset_cache(self) -> bool:
        self._scheduler_side.reset()
        return settle_workers()  # vLLM may unmap the KV memory next

    # ---- worker role ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker_side.register(kv_caches)

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return True  # where vLLM can, a block's bytes lie in one piece: fewer and larger copies

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: type[AttentionBackend]) -> None:
        self._worker_side.register({"all layers": kv_cache})

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, KVortexMetadata), type(connector_metadata)
        self._worker_side.bind(connector_metadata.plan)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._worker_side.begin_forward(compat.forward_kind(forward_context))

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._worker_side.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        return  # stores are whole blocks, chosen by the scheduler side

    def wait_for_save(self) -> None:
        self._worker_side.end_forward()
        self._worker_side.submit_stores()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._worker_side.collect()
        finished, failed = self._worker_side.take_finished()
        assert not failed, "a load of a model with several KV groups failed; this vLLM has no way to hear of it"
        return None, finished or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        self._worker_side.collect()
        finished, failed = self._worker_side.take_finished()
        return compat.transfer_results(finished, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker_side.take_invalid_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        worker = self._worker_side
        report = worker.take_report()
        if worker.may_report_late:
            return KVortexWorkerMetadata(report or StepReport(), worker.take_late_report)
        return None if report is None else KVortexWorkerMetadata(report)

    # ---- either role ----

    def shutdown(self) -> None:
        if self._scheduler is not None and self._stats is not None:
            self._stats.close()
            self._scheduler.log_totals()
        if self._request_log is not None:
            self._request_log.close()
        if self._worker is not None:
            self._worker.close()
