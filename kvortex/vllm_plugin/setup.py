"""What both sides of the connector work out from vLLM's configuration, the same in every process."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import vllm

from kvortex.cache.planner import Watermarks
from kvortex.config.settings import KVCacheSettings
from kvortex.config.verify import check_can_verify
from kvortex.errors import UnfitError, UsageError
from kvortex.hardware import usable_ram_bytes
from kvortex.keys import Namespace, Part, fingerprint_weights
from kvortex.sizes import format_bytes
from kvortex.vllm_plugin import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One engine's fixed facts.

    Attributes:
        num_ranks: workers that each hold a part of every block (tensor parallel size).
        rank_block_bytes: bytes of a block on one rank.
        step_blocks: blocks that the tokens of one step may fill.
        num_slots: host slots of each rank; slot `s` holds the parts of one block on all ranks.
        engine_id: vLLM's name of this engine, equal in all its processes.
        loads_go_with_steps: a request's load may be part of the step that runs it.
        hash_algorithm: vLLM's name of what hashes blocks.
    """

    settings: KVCacheSettings
    model: str
    vllm_version: str
    engine_id: str
    block_size: int
    num_ranks: int
    rank_block_bytes: int
    step_blocks: int
    num_slots: int
    namespace: bytes
    loads_go_with_steps: bool
    hash_algorithm: str

    @property
    def server_block_bytes(self) -> int:
        """Bytes of a block over all ranks."""
        return self.rank_block_bytes * self.num_ranks

    @property
    def watermarks(self) -> Watermarks:
        s = self.settings
        return Watermarks(
            threshold=s.offload_threshold,
            target=s.effective_offload_target,
            batch_blocks=max(1, s.offload_batch // self.server_block_bytes),
            idle_after_s=s.idle_after,
            ahead_blocks=2 * self.step_blocks,
        )


def engine_facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> EngineFacts:
    """Reads and checks what the connector needs.

    Raises:
        UnfitError, UsageError: this engine cannot run KVortex as configured; the message says what would.
    """
    compat.check_version()
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None, "vLLM makes a connector only from a kv_transfer_config"
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise UnfitError(
            f"KVortex does not support pipeline parallelism yet (pipeline_parallel_size is "
            f"{parallel.pipeline_parallel_size})",
            hint="use tensor_parallel_size, or run without KVortex: kv_cache.backend: none",
        )
    # In workers too: they come first, and would take all the RAM before the scheduler side refuses the model.
    compat.group_shapes(kv_cache_config)
    if not vllm_config.cache_config.enable_prefix_caching:
        raise UsageError(
            "KVortex finds blocks by vLLM's prefix hashes, and prefix caching is off",
            hint="leave --no-enable-prefix-caching out; where it was not given, vLLM turned prefix caching off itself, "
            f"for this model or machine: {compat.RUN_WITHOUT}",
        )
    settings = KVCacheSettings.from_extra_config(
        transfer.kv_connector_extra_config, available_ram_bytes=usable_ram_bytes()
    )
    if settings.verify != "off":
        check_can_verify()
    block_size = int(vllm_config.cache_config.block_size)
    if "block_size" in transfer.kv_connector_extra_config and settings.block_size != block_size:
        logger.warning(
            "vLLM's blocks have %d tokens: kv_connector_extra_config cannot set block_size to %d, --block-size can",
            block_size,
            settings.block_size,
        )
    num_ranks = int(parallel.world_size)
    engines = int(parallel.data_parallel_size)
    rank_block_bytes = compat.block_bytes(kv_cache_config)
    least = rank_block_bytes * num_ranks * engines
    num_slots = settings.ram_cache_size // least
    if num_slots < 1:
        raise UsageError(
            f"kv_cache.ram_cache_size is {format_bytes(settings.ram_cache_size)}, less than one block",
            hint=f"a block of this model takes {format_bytes(least)} over all ranks; give at least that",
        )
    return EngineFacts(
        settings=settings,
        model=str(vllm_config.model_config.model),
        vllm_version=str(vllm.__version__),
        engine_id=str(transfer.engine_id),
        block_size=block_size,
        num_ranks=num_ranks,
        rank_block_bytes=rank_block_bytes,
        step_blocks=-(-int(vllm_config.scheduler_config.max_num_batched_tokens) // block_size),
        num_slots=num_slots,
        namespace=_namespace(vllm_config, kv_cache_config).digest(),
        hash_algorithm=str(vllm_config.cache_config.prefix_caching_hash_algo),
        # Such a load cannot fail any more when its checksums are compared.
        loads_go_with_steps=settings.verify == "off"
        and compat.loads_may_go_with_steps(vllm_config, len(kv_cache_config.kv_cache_groups)),
    )


def _namespace(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Namespace:
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    text = model.hf_text_config
    rope = {
        name: str(getattr(text, name))
        for name in ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
        if getattr(text, name, None) is not None
    }
    return Namespace(
        model=str(model.model),
        revision=str(getattr(model.hf_config, "_commit_hash", None) or model.revision or ""),
        config=json.dumps(model.hf_config.to_dict(), default=repr),
        weights=fingerprint_weights(Path(model.model)),
        dtype=str(model.dtype),
        kv_cache_dtype=str(cache.cache_dtype),
        kv_layout=repr([(g.layer_names, g.kv_cache_spec) for g in kv_cache_config.kv_cache_groups]),
        block_size=int(cache.block_size),
        tensor_parallel=Part(0, int(parallel.tensor_parallel_size)),
        pipeline_parallel=Part(0, int(parallel.pipeline_parallel_size)),
        prefill_context_parallel=Part(0, int(getattr(parallel, "prefill_context_parallel_size", 1))),
        decode_context_parallel=Part(0, int(parallel.decode_context_parallel_size)),
        rope=rope,
        max_model_len=int(model.max_model_len),
        hash_algorithm=str(cache.prefix_caching_hash_algo),
        quantization=str(model.quantization or ""),
        speculative=repr(vllm_config.speculative_config) if vllm_config.speculative_config else "",
    )
