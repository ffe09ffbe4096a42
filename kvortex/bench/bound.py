"""The KV pool that holds every conversation of a workload: all in VRAM, the bound of what offload can reach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvortex.bench.workload import Workload
from kvortex.config.machine import MachineFacts
from kvortex.config.resolve import ResolvedConfig
from kvortex.errors import UnfitError
from kvortex.kv_shape import read_kv_shape
from kvortex.model_files import ModelFiles, read_model_files
from kvortex.sizes import format_bytes

# Of a GPU's memory: CUDA's context, vLLM's activations and graphs.
_LEFT_FREE: Final = 0.08


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Room for all conversations, each to its end.

    Attributes:
        blocks: of `block_size` tokens.
        bytes_per_rank: on each GPU.
    """

    blocks: int
    bytes_per_rank: int


def pool_for(resolved: ResolvedConfig, workload: Workload, machine: MachineFacts, *, is_cpu_build: bool) -> PoolSize:
    """The pool of the bound.

    Raises:
        UnfitError: the model's KV bytes are not known, or the pool does not fit this machine.
    """
    if resolved.vllm_value("pipeline_parallel_size", 1) > 1:
        raise UnfitError("the pool's size is not worked out for pipeline parallelism")
    assert resolved.model is not None
    tp = int(resolved.vllm_value("tensor_parallel_size", 1))
    files = read_model_files(str(resolved.model.value), revision=resolved.vllm_value("revision", None))
    dtypes = {name: str(resolved.vllm_value(name, "auto")) for name in ("dtype", "kv_cache_dtype")}
    shape = read_kv_shape(files.config, source=files.source, **dtypes)
    block_size = resolved.kv_cache.block_size
    # One more block for each request in flight and for the warm-up's, and vLLM's null block.
    spare = workload.concurrency + -(-workload.first // block_size) + 2
    blocks = workload.conversations * -(-workload.longest // block_size) + spare
    pool = PoolSize(blocks, blocks * shape.bytes_per_block(block_size, tp) // tp)
    _check_fits(pool, files, machine, tp, is_cpu_build=is_cpu_build)
    return pool


def _check_fits(pool: PoolSize, files: ModelFiles, machine: MachineFacts, tp: int, *, is_cpu_build: bool) -> None:
    if is_cpu_build:
        room, of = machine.usable_ram_bytes, "of RAM are usable"
    else:
        from kvortex.hardware import read_gpus

        memory = [gpu.free_bytes for gpu in read_gpus().gpus[:tp] if gpu.free_bytes is not None]
        if not memory:
            return  # the driver does not tell; vLLM will
        room, of = int(min(memory) * (1 - _LEFT_FREE)), "of a GPU's memory are free for it"
    weights = (files.weight_bytes or 0) // tp
    if pool.bytes_per_rank + weights > room:
        beside = f" beside {format_bytes(weights)} of weights" if weights else ""
        taken = format_bytes(pool.bytes_per_rank)
        raise UnfitError(f"all conversations take {taken} of KV{beside}, and {format_bytes(room)} {of}")
