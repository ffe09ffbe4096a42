"""What would fail late, found before anything is loaded: RAM, GPUs, the vLLM installed, a block's size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvortex.config.machine import MachineFacts
from kvortex.config.request_log import check_request_log
from kvortex.config.resolve import ResolvedConfig
from kvortex.config.sources import SECTION
from kvortex.config.vllm_install import VllmInstall
from kvortex.config.vllm_options import vllm_options
from kvortex.errors import ConfigError, KVortexError, UsageError
from kvortex.sizes import format_bytes


def problems(resolved: ResolvedConfig, machine: MachineFacts, install: VllmInstall | None) -> Iterator[KVortexError]:
    """Each reason why this machine cannot serve this configuration; the configuration by itself is right."""
    if resolved.uses_kvortex:
        yield from _ram_problems(resolved, machine)
        yield from _request_log_problems(resolved)
        yield from _unsupported(resolved)
    yield from _gpu_problems(resolved, machine)
    if install is not None:
        for option in vllm_options().missing_in(install.minor, resolved.vllm):
            has = f"{option.since} is the first" if option.since else f"{option.until} is the last"
            place = resolved.place_of(option.name)
            yield ConfigError(place, f"vLLM {install.version} has no option {option.flag}", hint=f"vLLM {has} with it")


def _ram_problems(resolved: ResolvedConfig, machine: MachineFacts) -> Iterator[KVortexError]:
    size, place = resolved.kv_cache.ram_cache_size, resolved.place_of("ram_cache_size")
    if size > machine.usable_ram_bytes:
        usable = format_bytes(machine.usable_ram_bytes)
        message = f"{SECTION}.ram_cache_size is {format_bytes(size)}, and this process may use {usable} of RAM now"
        yield ConfigError(place, message, hint="it is the whole server's, not a GPU's; 50% is half of the usable RAM")
    block_bytes = _block_bytes(resolved)
    if block_bytes is not None and size < block_bytes * resolved.num_ranks:
        least = block_bytes * resolved.num_ranks
        message = f"{SECTION}.ram_cache_size is {size} bytes, less than one block"
        tokens = resolved.kv_cache.block_size
        hint = f"a block of {tokens} tokens takes {least} bytes over all GPUs; give at least that"
        yield ConfigError(place, message, hint=hint)


def _block_bytes(resolved: ResolvedConfig) -> int | None:
    """Bytes of one block on one GPU; None if the model is not on this disk or has several kinds of block."""
    from kvortex.kv_shape import read_kv_shape
    from kvortex.model_files import read_model_files

    if resolved.model is None or not Path(resolved.model.value).is_dir():
        return None
    tp = int(resolved.vllm_value("tensor_parallel_size", 1))
    dtypes = {name: str(resolved.vllm_value(name, "auto")) for name in ("dtype", "kv_cache_dtype")}
    try:
        shape = read_kv_shape(read_model_files(resolved.model.value).config, **dtypes)
        if shape.sliding_layers > 0:
            return None
        return shape.bytes_per_block(resolved.kv_cache.block_size, tp) // tp
    except KVortexError:
        # Not understood here is not wrong: the connector measures the real block, by the same rule.
        return None


def _request_log_problems(resolved: ResolvedConfig) -> Iterator[KVortexError]:
    path = resolved.kv_cache.request_log
    if path is None:
        return
    try:
        check_request_log(Path(path))
    except UsageError as error:
        place = resolved.place_of("request_log")
        yield ConfigError(place, f"{SECTION}.request_log: {error.message}", hint=error.hint)


def _unsupported(resolved: ResolvedConfig) -> Iterator[KVortexError]:
    name = "pipeline_parallel_size"
    if resolved.vllm_value(name, 1) > 1:
        hint = f'use tensor_parallel_size, or set {SECTION}.backend to "none"'
        yield ConfigError(resolved.place_of(name), f"KVortex does not support {name} above 1", hint=hint)


def _gpu_problems(resolved: ResolvedConfig, machine: MachineFacts) -> Iterator[KVortexError]:
    elsewhere = (
        resolved.vllm_value("nnodes", 1) > 1 or resolved.vllm_value("data_parallel_size_local", None) is not None
    )
    if machine.gpu_count is None or elsewhere or resolved.num_ranks <= machine.gpu_count:
        return
    name = next(
        (n for n in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size") if n in resolved.vllm),
        "tensor_parallel_size",
    )
    seen = f"{machine.gpu_count} visible GPU" + ("" if machine.gpu_count == 1 else "s")
    message = f"{name} asks for {resolved.num_ranks} GPUs in all; this process has {seen}"
    yield ConfigError(resolved.place_of(name), message, hint="lower it, or see `kvortex doctor` for what is visible")
