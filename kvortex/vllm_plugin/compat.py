"""What differs between the vLLM versions supported, in one place. Nothing else in the package asks for a version.

    0.26 .. 0.29   KV tensors named by `shared_by`; failed loads reported by block id only
    0.30 .. 0.33   KV tensors placed by stride inside one allocation; failed loads reported by request
Both are told apart by what they have, not by their number, except for the range itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base as connector_base
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    get_request_block_hasher,
    make_block_hash_with_group_id,
    resolve_block_hashes,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    KVCacheTensor,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import Request

from kvortex.cache.costs import PromptWork, prompt_work
from kvortex.cache.prefix import GroupShape
from kvortex.config.vllm_install import check_supported
from kvortex.errors import UnfitError
from kvortex.keys import BlockKey
from kvortex.transfer.base import KVLayout
from kvortex.vllm_plugin.patient_hash import patient

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

REPORTS_FAILED_REQUESTS = hasattr(connector_base, "KVConnectorTransferResults")
"""vLLM takes failed loads by request, which models with several KV groups need."""

_TENSORS_PLACED_BY_STRIDE = "layer_stride" in {f.name for f in fields(KVCacheTensor)}


RUN_WITHOUT: Final = "run this model without KVortex: kv_cache.backend: none (or leave --kv-transfer-config out)"
"""What always helps against a refusal."""


def check_version() -> None:
    """Raises UnfitError when the vLLM imported is outside the supported range."""
    check_supported(str(vllm.__version__))


def group_shapes(kv_cache_config: KVCacheConfig) -> list[GroupShape]:
    """The KV groups as the prefix matcher needs them.

    Raises:
        UnfitError: there are none, or a group's attention is of a kind whose blocks KVortex cannot restore.
    """
    if not kv_cache_config.kv_cache_tensors:
        raise UnfitError("KVortex has nothing to keep: this model has no KV cache", hint=RUN_WITHOUT)
    shapes = [
        GroupShape(i, int(_uniform(group.kv_cache_spec).block_size), _window(_uniform(group.kv_cache_spec)))
        for i, group in enumerate(kv_cache_config.kv_cache_groups)
    ]
    several = len(shapes) > 1
    if several and not REPORTS_FAILED_REQUESTS:
        raise UnfitError(
            f"vLLM {vllm.__version__} cannot recompute a failed load of a model with several KV groups",
            hint=f"use a newer vLLM, or {RUN_WITHOUT}",
        )
    return shapes


def _uniform(spec: KVCacheSpec) -> KVCacheSpec:
    """Layers of one kind with differing head sizes come wrapped; any of them tells the kind."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return next(iter(spec.kv_cache_specs.values()))
    return spec


def _window(spec: KVCacheSpec) -> int | None:
    name = type(spec).__name__
    if isinstance(spec, SlidingWindowSpec) and name == "SlidingWindowSpec":
        # Tokens that some speculative decoders keep below the window are restored with it.
        return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
    if isinstance(spec, FullAttentionSpec) and name in ("FullAttentionSpec", "MLAAttentionSpec"):
        return None
    raise UnfitError(
        f"KVortex cannot restore the KV of {name} layers",
        hint=RUN_WITHOUT,
    )


def block_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Bytes of one block on one rank, over all layers that share a block id."""
    tensors = kv_cache_config.kv_cache_tensors
    assert tensors, "vLLM gave no KV tensors"
    # Placed by stride, every tensor names the size of the one allocation that they share.
    total = int(tensors[0].size) if _TENSORS_PLACED_BY_STRIDE else sum(int(t.size) for t in tensors)
    return total // int(kv_cache_config.num_blocks)


def kv_layout(kv_caches: Mapping[str, Any], kv_cache_config: KVCacheConfig) -> KVLayout:
    """vLLM's KV memory as regions [num_blocks, fragment_bytes] that share its storage.

    Args:
        kv_caches: layer name -> tensor (or list of tensors over one storage), as `register_kv_caches` gets it.
    """
    if _TENSORS_PLACED_BY_STRIDE:
        regions = _regions_by_stride(kv_caches, kv_cache_config)
    else:
        regions = _regions_by_storage(kv_caches, int(kv_cache_config.num_blocks))
    layout = KVLayout(tuple(regions), _regions_of_layers(kv_caches, regions))
    expected = block_bytes(kv_cache_config)
    assert layout.block_bytes == expected, (
        f"the KV regions hold {layout.block_bytes} bytes a block, vLLM says {expected}"
    )
    return layout


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _first_tensor(value: Any) -> torch.Tensor:
    tensor = value[0] if isinstance(value, (list, tuple)) else value
    assert isinstance(tensor, torch.Tensor), type(value)
    return tensor


def _regions_by_stride(kv_caches: Mapping[str, Any], config: KVCacheConfig) -> list[torch.Tensor]:
    num_blocks = int(config.num_blocks)
    regions: dict[int, torch.Tensor] = {}
    for placed in config.kv_cache_tensors:
        name = next((layer for layer in placed.layers if layer in kv_caches), None)
        if name is None:
            continue
        raw = _raw(_first_tensor(kv_caches[name]))
        block_stride = int(placed.block_stride)
        span = num_blocks * block_stride
        if placed.layer_stride >= span:  # each layer (or group of its heads) has blocks of its own
            start, length = int(placed.offset), len(placed.layers) * int(placed.layer_stride)
        else:  # a block holds all layers, one after the other
            start, length = 0, span
        for region in raw[start : start + length].view(-1, num_blocks, block_stride):
            regions.setdefault(region.data_ptr(), region)
    return list(regions.values())


def _regions_of_layers(kv_caches: Mapping[str, Any], regions: list[torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """The regions that each layer's tensor lies in, by address; regions are sorted into ranges that do not overlap."""
    spans = [(int(r.data_ptr()), int(r.data_ptr()) + (r.shape[0] - 1) * r.stride(0) + r.shape[1]) for r in regions]
    found: dict[str, tuple[int, ...]] = {}
    for name, value in kv_caches.items():
        tensor = _first_tensor(value)
        begin = int(tensor.data_ptr())
        length = sum((size - 1) * stride for size, stride in _dimensions(tensor)) + 1
        end = begin + length * tensor.element_size()
        found[name] = tuple(i for i, (first, last) in enumerate(spans) if first < end and begin < last)
    return found


def _dimensions(tensor: torch.Tensor) -> list[tuple[int, int]]:
    return list(zip(tensor.shape, tensor.stride(), strict=True))


def _regions_by_storage(kv_caches: Mapping[str, Any], num_blocks: int) -> list[torch.Tensor]:
    regions: dict[int, torch.Tensor] = {}
    for value in kv_caches.values():
        tensor = _first_tensor(value)
        raw = _raw(tensor)
        if raw.data_ptr() in regions:
            continue
        # Kernels may cut a block into several of theirs. What has a larger stride lies outside the blocks: layers, or
        # K and V, one after the other.
        block_stride = max(stride for size, stride in _dimensions(tensor) if size % num_blocks == 0)
        count = math.prod(size for size, stride in _dimensions(tensor) if stride > block_stride)
        page = raw.numel() // num_blocks
        for region in raw[: page * num_blocks].view(count, num_blocks, -1):
            regions.setdefault(region.data_ptr(), region)
    return list(regions.values())


def request_keys(request: Request, group: GroupShape, hash_block_size: int, *, start: int = 0) -> list[BlockKey]:
    """A key for each complete block of the request's tokens from block `start` on: vLLM's chained hash, group's id."""
    hashes = resolve_block_hashes(request.block_hashes, hash_block_size, group.block_size)
    behind_hash = make_block_hash_with_group_id(BlockHash(b""), group.group_id)
    return [BlockKey(block_hash + behind_hash) for block_hash in hashes[start:]]


def prompt_keys(
    tokens: list[int], cache_salt: str | None, group: GroupShape, hash_block_size: int, algorithm: str
) -> list[BlockKey]:
    """The keys that a text request of these tokens would have, without a LoRA. EngineCore process only: vLLM may seed
    its hashes anew in each process."""
    request = Request(
        request_id="kvortex-hint",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=cache_salt,
        block_hasher=get_request_block_hasher(hash_block_size, patient(get_hash_fn_by_name(algorithm))),
    )
    return request_keys(request, group, hash_block_size)


def forward_kind(forward_context: ForwardContext) -> str | None:
    """How vLLM runs the forward pass, as far as it decides whether each layer calls `wait_for_layer_load`.

    None where none does: one graph for the whole model, or no kernels. Nor for two halves of a batch at a time.
    """
    metadata = forward_context.attn_metadata
    if not metadata or isinstance(metadata, list):
        return None
    mode = str(forward_context.cudagraph_runtime_mode.name)
    return None if mode == "FULL" else mode


def loads_may_go_with_steps(vllm_config: VllmConfig, num_groups: int) -> bool:
    """Whether a step's forward pass is all that reads its requests' KV: a drafting model runs after it."""
    return num_groups == 1 and vllm_config.speculative_config is None


def prompt_work_of(scheduler_output: SchedulerOutput) -> PromptWork:
    """What the step computes of prompts; a request with one token decodes."""
    num_tokens = scheduler_output.num_scheduled_tokens
    work = PromptWork()
    if scheduler_output.total_num_scheduled_tokens == len(num_tokens):
        return work
    cached = scheduler_output.scheduled_cached_reqs
    begins = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    begins.update((new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs)
    for request_id, count in num_tokens.items():
        if count > 1:
            begin = begins[request_id]
            work += prompt_work(begin, begin + count)
    return work


def loads_wait_for_kernels(vllm_config: VllmConfig) -> None:
    """Tells vLLM that what a preempted request lets go may be given to others at once, as without a connector.

    With async scheduling vLLM else keeps such blocks back until the step under way has ended, lest a load write them
    before that step's kernels do; and 0.26 preempts one request after another meanwhile, none of which frees a block
    (docs/trials.md, B23). KVortex's loads wait for those kernels. vLLM goes by whether the role is one that loads; its
    scheduler asks that for nothing else. It is changed here, for other processes keep asking theirs.
    """
    vllm_config.kv_transfer_config.kv_role = "kv_producer"


def drops_last_block(vllm_config: VllmConfig) -> bool:
    """Speculative decoding that needs the last matched block's hidden states recomputed."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return False
    if hasattr(speculative, "use_eagle_block_drop"):
        return bool(speculative.use_eagle_block_drop())
    return bool(speculative.use_eagle())


def transfer_results(finished: set[str], failed: set[str]) -> Any:
    """vLLM's own type for ended loads, where it has one."""
    return connector_base.KVConnectorTransferResults(
        finished_sending=set(), finished_recving=finished, failed_recving=failed
    )
