"""What suits this machine and model: the values of a new `kvortex.yaml`, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvortex.config.settings import KVCacheSettings, default_ram_cache_size
from kvortex.hardware.gpu import Gpu
from kvortex.hardware.memory import Ram
from kvortex.kv_shape import KVShape
from kvortex.sizes import counted, format_bytes, parse_size

_UTILIZATION = 0.85
_CONVERSATION_TOKENS = 8192
# On vLLM's CPU build, weights, KV pool and cache share one RAM.
_CPU_CACHE_SHARE = 0.25
_CPU_SERVER_SHARE = 0.4
_YOURS = "your choice"


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One value as it stands in the file, and why."""

    key: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Sizing:
    """The values that depend on the machine; `kv_cache` keys apart from vLLM's."""

    vllm: tuple[Suggestion, ...]
    kv_cache: tuple[Suggestion, ...]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the user has decided; None leaves it to the machine.

    Attributes:
        ram_cache_size: as written, such as 50%.
    """

    tensor_parallel_size: int | None = None
    gpu_memory_utilization: float | None = None
    ram_cache_size: str | None = None
    offload_threshold: float | None = None


def suggest(ram: Ram, gpus: Sequence[Gpu], shape: KVShape | None, chosen: Chosen | None = None) -> Sizing:
    """Sizes for serving on all of these GPUs, or without any on vLLM's CPU build.

    Args:
        shape: of the model; None when its configuration could not be read.
    """
    chosen = chosen or Chosen()
    tp, why_tp = chosen.tensor_parallel_size, _YOURS
    if tp is None:
        tp, why_tp = _tensor_parallel_size(len(gpus), shape)
    utilization, why_utilization = chosen.gpu_memory_utilization, f"{_YOURS}: share of each GPU for vLLM"
    if utilization is None:
        utilization, why_utilization = _utilization(ram, gpus[:tp])
    if chosen.ram_cache_size is None:
        size, why_size = _ram_cache_size(ram, has_gpu=bool(gpus))
    else:
        size = parse_size(chosen.ram_cache_size, of=ram.usable_bytes)
        why_size = f"{_YOURS}, {format_bytes(size)} of the {format_bytes(ram.usable_bytes)} usable now"
    block_size, streams, threshold = (
        KVCacheSettings.model_fields[key].default for key in ("block_size", "num_streams", "offload_threshold")
    )
    threshold = threshold if chosen.offload_threshold is None else chosen.offload_threshold
    why_block = "tokens; long copies use the link well"
    if shape is not None:
        block_bytes = shape.bytes_per_block(block_size, tp)
        blocks = size // block_bytes
        conversations = blocks // -(-_CONVERSATION_TOKENS // block_size)
        why_block += f": {format_bytes(block_bytes)} of KV a block here"
        why_size += (
            f"; {blocks * block_size:,} tokens, {counted(conversations, 'conversation')} of {_CONVERSATION_TOKENS:,}"
        )
    return Sizing(
        vllm=(
            Suggestion("tensor_parallel_size", str(tp), why_tp),
            Suggestion("gpu_memory_utilization", f"{utilization:.4g}", why_utilization),
        ),
        kv_cache=(
            Suggestion(
                "offload_threshold", f"{threshold:g}", "store cold blocks when this share of VRAM has no copy in RAM"
            ),
            Suggestion(
                "ram_cache_size", f'"{chosen.ram_cache_size or size_text(size)}"', f"the whole server: {why_size}"
            ),
            Suggestion(
                "num_streams",
                str(streams),
                "copy threads without a GPU; a GPU takes one stream a direction, and more gain nothing",
            ),
            Suggestion("block_size", str(block_size), why_block),
        ),
    )


def _tensor_parallel_size(num_gpus: int, shape: KVShape | None) -> tuple[int, str]:
    if num_gpus == 0:
        return 1, "no GPU: vLLM's CPU build"
    visible = f"{num_gpus} GPU{'s' if num_gpus > 1 else ''} visible"
    if shape is None:
        # Nearly every model's heads divide by powers of two.
        return 1 << (num_gpus.bit_length() - 1), f"{visible}; check that it divides the model's heads"
    tp = max(tp for tp in shape.tensor_parallel_sizes(num_gpus) if tp == 1 or tp <= shape.kv_heads or _latent(shape))
    heads = f"{shape.attention_heads} attention heads"
    heads += "" if _latent(shape) else f" and {shape.kv_heads} KV heads"
    return tp, f"{visible}; it divides {heads}"


def _latent(shape: KVShape) -> bool:
    return shape.kind.value == "latent"


def _utilization(ram: Ram, gpus: Sequence[Gpu]) -> tuple[float, str]:
    if not gpus:
        # The CPU build takes this share of all RAM it is allowed, and refuses what is not free.
        share = math.floor(100 * _CPU_SERVER_SHARE * ram.usable_bytes / ram.allowed_bytes) / 100
        return max(share, 0.01), "on the CPU build: share of RAM for weights and vLLM's own KV"
    free = [gpu.free_bytes / gpu.memory_bytes for gpu in gpus if gpu.free_bytes is not None and gpu.memory_bytes]
    least = math.floor(100 * min(free, default=1.0) - 2) / 100
    if least < _UTILIZATION:
        used = f"{1 - min(free):.0%} of a GPU is in use by others now"
        return max(least, 0.01), f"share of each GPU for vLLM; {used}"
    return _UTILIZATION, "share of each GPU for vLLM; the rest is for CUDA graphs and peaks"


def _ram_cache_size(ram: Ram, *, has_gpu: bool) -> tuple[int, str]:
    usable = format_bytes(ram.usable_bytes)
    if not has_gpu:
        size = int(ram.usable_bytes * _CPU_CACHE_SHARE)
        return _rounded(size), f"a quarter of the {usable} usable now, which the model shares"
    size = default_ram_cache_size(ram.usable_bytes)
    if size < ram.usable_bytes // 2 - 10**9:
        return size, f"of the {usable} usable now; pinning more takes tens of seconds, so ask for it"
    return _rounded(size), f"half of the {usable} usable now"


def _rounded(num_bytes: int) -> int:
    """Down to whole GB, or whole MB below that; at least 1 MB."""
    unit = 10**9 if num_bytes >= 10**9 else 10**6
    return max(num_bytes // unit, 1) * unit


def size_text(num_bytes: int) -> str:
    """As a configuration has it: `64GB`, `500MB`."""
    unit, name = (10**9, "GB") if num_bytes % 10**9 == 0 else (10**6, "MB")
    return f"{num_bytes // unit}{name}"
