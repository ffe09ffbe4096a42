"""What would fail late, found before anything is loaded: RAM, GPUs, the vLLM installed, a block's size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from kvortex.config.allocator import expandable_segments
from kvortex.config.machine import MachineFacts
from kvortex.config.request_log import check_request_log
from kvortex.config.resolve import ResolvedConfig
from kvortex.config.sources import SECTION
from kvortex.config.verify import check_can_verify
from kvortex.config.vllm_install import VllmInstall
from kvortex.config.vllm_options import vllm_options
from kvortex.errors import ConfigError, KVortexError, UnfitError, UsageError
from kvortex.keys import COLLISION_RESISTANT
from kvortex.kv_shape import KVShape, read_kv_shape
from kvortex.model_files import ModelFiles, ModelUnavailableError, Reason, read_model_files, require_path
from kvortex.sizes import format_bytes

# vLLM's queue to its workers, in every supported release: ten chunks of 16 MiB unless the variable says otherwise.
_VLLM_QUEUE_BYTES: Final = 10 * 16 * 2**20
_HASH: Final = "prefix_caching_hash_algo"
_VLLM_QUEUE_VARIABLE: Final = "VLLM_MQ_MAX_CHUNK_BYTES_MB"
_CERTAIN: Final = frozenset({Reason.NOT_FOUND, Reason.NO_TOKEN, Reason.NO_ACCESS, Reason.BAD_TOKEN, Reason.OFFLINE})


def problems(
    resolved: ResolvedConfig, machine: MachineFacts, install: VllmInstall | None, files: ModelFiles | None = None
) -> Iterator[KVortexError]:
    """Each reason why this machine cannot serve this configuration; the configuration by itself is right.

    Args:
        files: the model's, where they were found; a model on this disk is read in any case.
    """
    shape = _shape(resolved, files)
    if shape is not None:
        yield from _heads_problems(resolved, shape)
    if resolved.uses_kvortex:
        yield from _ram_problems(resolved, machine, shape)
        yield from _request_log_problems(resolved)
        yield from _verify_problems(resolved)
        yield from _unsupported(resolved)
    yield from _gpu_problems(resolved, machine)
    if install is not None:
        for option in vllm_options().missing_in(install.minor, resolved.vllm):
            has = f"{option.since} is the first" if option.since else f"{option.until} is the last"
            place = resolved.place_of(option.name)
            yield ConfigError(place, f"vLLM {install.version} has no option {option.flag}", hint=f"vLLM {has} with it")


def cautions(resolved: ResolvedConfig) -> Iterator[ConfigError]:
    """What may be served so, and better not where users do not trust each other."""
    algorithm = resolved.vllm_value(_HASH, None)
    if resolved.uses_kvortex and algorithm is not None and algorithm not in COLLISION_RESISTANT:
        yield ConfigError(
            resolved.place_of(_HASH),
            f"with {algorithm}, prompts can be made that share a block, and one user's be answered from another's",
            hint="leave it out, unless all users trust each other",
        )


def find_model(resolved: ResolvedConfig, environment: Mapping[str, str]) -> ModelFiles | None:
    """The model's files, or None where vLLM may know better where they are. Asks the Hub for what is not on this disk.

    Raises:
        ModelUnavailableError: there is no such model, or no access to it: vLLM would say so after half a minute.
    """
    assert resolved.model is not None
    name = resolved.model.value
    require_path(name)
    if is_elsewhere(name, environment):
        return None
    token = resolved.vllm_value("hf_token", None)
    try:
        return read_model_files(
            name,
            revision=resolved.vllm_value("revision", None),
            token=token if isinstance(token, str) else None,
            cache=resolved.vllm_value("download_dir", None),
        )
    except ModelUnavailableError as error:
        if error.reason in _CERTAIN:
            raise
        return None


def is_elsewhere(model: str, environment: Mapping[str, str]) -> bool:
    """Whether vLLM looks where nothing here does: at an address such as `s3://`, or at ModelScope."""
    return "://" in model or environment.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true")


def allocator_problem(resolved: ResolvedConfig, environment: Mapping[str, str]) -> UnfitError | None:
    """The setting of torch's allocator with which vLLM ends at once beside a KV connector."""
    found = expandable_segments(environment)
    if found is None or not found.is_refused or not resolved.uses_kvortex or uses_cumem(resolved):
        return None
    return UnfitError(f"{found.variable} has {found.option}, which vLLM refuses with a KV connector", hint=found.fix)


def shared_memory_problem(
    resolved: ResolvedConfig, install: VllmInstall, free_bytes: int | None, environment: Mapping[str, str]
) -> UnfitError | None:
    """A /dev/shm too small for vLLM's own messages between its processes: it would say so once the model is loading.

    KVortex's memory is not in it.

    Args:
        free_bytes: of /dev/shm; None where there is none.
    """
    one_process = resolved.num_ranks == 1 and not install.is_cpu_build
    if free_bytes is None or free_bytes >= _VLLM_QUEUE_BYTES or one_process or _VLLM_QUEUE_VARIABLE in environment:
        return None
    needed = format_bytes(_VLLM_QUEUE_BYTES)
    message = f"/dev/shm has {format_bytes(free_bytes)} free, and vLLM's processes need {needed} of it"
    return UnfitError(message, hint="docker --shm-size=8g or --ipc=host; in Kubernetes an emptyDir of medium Memory")


def uses_cumem(resolved: ResolvedConfig) -> bool:
    """Whether the KV is in vLLM's cumem allocator, which is spared torch's expandable segments."""
    return any(resolved.vllm_value(name, False) for name in ("enable_cumem_allocator", "enable_sleep_mode"))


def _heads_problems(resolved: ResolvedConfig, shape: KVShape) -> Iterator[KVortexError]:
    name = "tensor_parallel_size"
    tp = int(resolved.vllm_value(name, 1))
    if not shape.allows_tensor_parallel(tp):
        heads = f"{shape.attention_heads} attention heads and {shape.kv_heads} KV heads"
        sizes = ", ".join(str(size) for size in shape.tensor_parallel_sizes(16))
        message = f"{name} {tp} does not divide this model's {heads}"
        yield ConfigError(resolved.place_of(name), message, hint=f"one of {sizes}")


def _ram_problems(resolved: ResolvedConfig, machine: MachineFacts, shape: KVShape | None) -> Iterator[KVortexError]:
    size, place = resolved.kv_cache.ram_cache_size, resolved.place_of("ram_cache_size")
    if size > machine.usable_ram_bytes:
        usable = format_bytes(machine.usable_ram_bytes)
        message = f"{SECTION}.ram_cache_size is {format_bytes(size)}, and this process may use {usable} of RAM now"
        yield ConfigError(place, message, hint="it is the whole server's, not a GPU's; 50% is half of the usable RAM")
    block_bytes = _block_bytes(resolved, shape)
    if block_bytes is not None and size < block_bytes * resolved.num_ranks:
        least = block_bytes * resolved.num_ranks
        message = f"{SECTION}.ram_cache_size is {size} bytes, less than one block"
        tokens = resolved.kv_cache.block_size
        hint = f"a block of {tokens} tokens takes {least} bytes over all GPUs; give at least that"
        yield ConfigError(place, message, hint=hint)


def _block_bytes(resolved: ResolvedConfig, shape: KVShape | None) -> int | None:
    """Bytes of one block on one GPU; None if the model is not known or has several kinds of block."""
    tp = int(resolved.vllm_value("tensor_parallel_size", 1))
    if shape is None or shape.sliding_layers > 0 or not shape.allows_tensor_parallel(tp):
        return None
    return shape.bytes_per_block(resolved.kv_cache.block_size, tp) // tp


def _shape(resolved: ResolvedConfig, files: ModelFiles | None) -> KVShape | None:
    if resolved.model is None or (files is None and not Path(resolved.model.value).is_dir()):
        return None
    dtypes = {name: str(resolved.vllm_value(name, "auto")) for name in ("dtype", "kv_cache_dtype")}
    try:
        files = files or read_model_files(resolved.model.value)
        return read_kv_shape(files.config, **dtypes)
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


def _verify_problems(resolved: ResolvedConfig) -> Iterator[KVortexError]:
    if resolved.kv_cache.verify == "off":
        return
    try:
        check_can_verify()
    except UnfitError as error:
        place = resolved.place_of("verify")
        yield ConfigError(place, f"{SECTION}.verify: {error.message}", hint=error.hint)


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
