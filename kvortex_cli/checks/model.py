"""Checks of what would be served: the configuration on this machine, and how much KV fits where."""

from __future__ import annotations

from collections.abc import Iterator

from kvortex.config.checks import problems
from kvortex.config.machine import MachineFacts
from kvortex.config.resolve import ResolvedConfig
from kvortex.config.vllm_install import VllmInstall
from kvortex.errors import KVortexError
from kvortex.hardware.gpu import Gpu
from kvortex.kv_shape import KVKind, KVShape, read_kv_shape
from kvortex.model_files import ModelFiles, read_model_files
from kvortex.sizes import format_bytes
from kvortex_cli.checks.finding import Finding, fail, ok, warn

CONVERSATION_TOKENS = 8192
# vLLM's own default, in every supported release.
_DEFAULT_UTILIZATION = 0.92
# Loading the model and the server itself need RAM too.
_LEAST_LEFT_BYTES = 4 * 10**9


def check_config(
    resolved: ResolvedConfig, machine: MachineFacts, install: VllmInstall | None, path: str | None
) -> list[Finding]:
    """Whether this machine can serve the configuration, as far as can be told without loading anything."""
    found = [
        fail("config", problem.message, problem.hint or "see the configuration reference")
        for problem in problems(resolved, machine, install)
    ]
    if found or not resolved.uses_kvortex:
        return found or [ok("config", f"{path or 'defaults'}: backend none, plain vLLM")]
    size = resolved.kv_cache.ram_cache_size
    shown = f"{path or 'defaults'}: ram_cache_size {format_bytes(size)} in all"
    if resolved.num_ranks > 1:
        each = format_bytes(resolved.ram_per_rank_bytes)
        shown += f", {each} on each of {resolved.num_ranks} ranks"
    left = machine.usable_ram_bytes - size
    if left < _LEAST_LEFT_BYTES:
        fix = "lower it: loading the model and the server itself need RAM too"
        return [warn("config", f"{shown}; it leaves {format_bytes(left)} of usable RAM", fix)]
    return [ok("config", shown)]


def check_model(resolved: ResolvedConfig, gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    """KV bytes a token and a block, and how many conversations fit in RAM and, roughly, in VRAM."""
    if resolved.model is None:
        yield warn("model", "none is named", "give --model, or `model:` in the file, to see what fits")
        return
    name = resolved.model.value
    dtypes = {key: str(resolved.vllm_value(key, "auto")) for key in ("dtype", "kv_cache_dtype")}
    try:
        files = read_model_files(name, revision=resolved.vllm_value("revision", None))
        shape = read_kv_shape(files.config, source=files.source, **dtypes)
    except KVortexError as error:
        yield fail("model", error.message, error.hint or "check the name or the path")
        return
    tp = int(resolved.vllm_value("tensor_parallel_size", 1))
    try:
        token_bytes = shape.bytes_per_token(tp)
    except KVortexError as error:
        yield fail("model", error.message, error.hint or "lower tensor_parallel_size")
        return
    yield ok("model", f"{describe_shape(shape)}: {kib(token_bytes)} of KV a token")
    block_size = resolved.kv_cache.block_size
    block_bytes = shape.bytes_per_block(block_size, tp)
    yield ok("block", f"{block_bytes} bytes ({format_bytes(block_bytes)}) for {block_size} tokens, on all ranks")
    vram = _vram_kv_bytes(resolved, files, gpus)
    if resolved.uses_kvortex:
        yield _fits_ram(resolved.kv_cache.ram_cache_size, block_bytes, block_size, vram)
    if gpus:
        yield _fits_vram(shape, files, vram, tp)


def _fits_ram(size: int, block_bytes: int, block_size: int, vram: int | None) -> Finding:
    blocks = size // block_bytes
    shown = f"{format_bytes(size)}: {_fits(blocks * block_size, blocks // -(-CONVERSATION_TOKENS // block_size))}"
    if blocks == 0:
        return fail("fits ram", f"{size} bytes: not one block", f"give ram_cache_size at least {block_bytes} bytes")
    if vram is not None and size < vram:
        fix = f"give ram_cache_size more than {format_bytes(vram)}"
        return warn("fits ram", f"{shown}; less than VRAM holds, so it mostly mirrors VRAM", fix)
    return ok("fits ram", shown)


def _fits_vram(shape: KVShape, files: ModelFiles, vram: int | None, tp: int) -> Finding:
    if vram is None:
        fix = "download the model on this machine to see it; vLLM logs the true number at start"
        return warn("fits vram", "the weights are not on this machine, so what they leave is unknown", fix)
    weights = format_bytes(files.weight_bytes or 0)
    if vram <= 0:
        fix = "use more GPUs (tensor_parallel_size), a quantised model, or a higher gpu_memory_utilization"
        return fail("fits vram", f"{weights} of weights leave no VRAM for KV", fix)
    conversations = vram // shape.bytes_for(CONVERSATION_TOKENS, tp)
    fits = _fits(vram // shape.bytes_per_token(tp), conversations)
    return ok("fits vram", f"at most {format_bytes(vram)} beside {weights} of weights: {fits}")


def _vram_kv_bytes(resolved: ResolvedConfig, files: ModelFiles, gpus: tuple[Gpu, ...]) -> int | None:
    """VRAM left for KV over all ranks of one replica, before activations; None where it cannot be told."""
    ranks = int(resolved.vllm_value("tensor_parallel_size", 1)) * int(resolved.vllm_value("pipeline_parallel_size", 1))
    sizes = [gpu.memory_bytes for gpu in gpus[:ranks] if gpu.memory_bytes is not None]
    if files.weight_bytes is None or len(sizes) < ranks:
        return None
    share = float(resolved.vllm_value("gpu_memory_utilization", _DEFAULT_UTILIZATION))
    return int(ranks * min(sizes) * share) - files.weight_bytes


def _fits(tokens: int, conversations: int) -> str:
    return f"{tokens:,} tokens, {conversations:,} conversations of {CONVERSATION_TOKENS:,}"


def describe_shape(shape: KVShape) -> str:
    """`llama, 32 layers of 8 KV heads x 128 x 2 bytes`."""
    layers = f"{shape.model_type}, {shape.layers} layers"
    sizes = f"x {shape.head_dim} x {shape.element_bytes} bytes"
    if shape.kind is KVKind.LATENT:
        return f"{layers} of one latent vector (MLA) {sizes}, whole on each rank"
    shown = f"{layers} of {shape.kv_heads} KV head{'s' if shape.kv_heads > 1 else ''} {sizes}"
    if shape.sliding_layers:
        shown += f", {shape.sliding_layers} of them over {shape.sliding_window} tokens only"
    return shown


def kib(num_bytes: int) -> str:
    """Bytes a token are powers of two, and known as such: `131072 bytes (128 KiB)`."""
    return f"{num_bytes} bytes ({num_bytes / 1024:.4g} KiB)"
