"""Checks of what would be served: the configuration on this machine, and how much KV fits where."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvortex.config.checks import problems
from kvortex.config.machine import MachineFacts
from kvortex.config.resolve import ResolvedConfig
from kvortex.config.vllm_install import VllmInstall
from kvortex.errors import KVortexError
from kvortex.hardware.gpu import Gpu
from kvortex.kv_shape import KVKind, KVShape, UnknownShapeError, read_kv_shape
from kvortex.model_files import ModelFiles, ModelUnavailableError, read_model_files
from kvortex.sizes import counted, format_bytes
from kvortex_cli.checks.finding import Finding, fail, ok, warn

CONVERSATION_TOKENS = 8192
# vLLM's own default, in every supported release.
_DEFAULT_UTILIZATION = 0.92
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "model_max_length", "seq_length")
# Loading the model and the server itself need RAM too; on a small machine most of it.
_LEAST_LEFT_BYTES = 4 * 10**9
_LEAST_LEFT_SHARE = 0.7


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
    if left < min(_LEAST_LEFT_BYTES, _LEAST_LEFT_SHARE * machine.usable_ram_bytes):
        fix = "lower it: loading the model and the server itself need RAM too"
        return [warn("config", f"{shown}; it leaves {format_bytes(left)} of usable RAM", fix)]
    return [ok("config", shown)]


@dataclass(slots=True)
class ModelReport:
    """What is known of the model.

    Attributes:
        data: the same as numbers, for `--json`: docs/doctor.md has the keys. None where no model is named.
    """

    findings: list[Finding]
    data: dict[str, Any] | None = None


def check_model(resolved: ResolvedConfig, gpus: tuple[Gpu, ...]) -> ModelReport:
    """KV bytes a token and a block, how much fits RAM and, roughly, VRAM, and how long one request may be."""
    if resolved.model is None:
        return ModelReport([warn("model", "none is named", "give --model, or `model:` in the file, to see what fits")])
    dtypes = {key: str(resolved.vllm_value(key, "auto")) for key in ("dtype", "kv_cache_dtype")}
    tp = int(resolved.vllm_value("tensor_parallel_size", 1))
    token = resolved.vllm_value("hf_token", None)
    try:
        files = read_model_files(
            resolved.model.value,
            revision=resolved.vllm_value("revision", None),
            token=token if isinstance(token, str) else None,
            cache=resolved.vllm_value("download_dir", None),
            ask_for_weights=True,
        )
        shape = read_kv_shape(files.config, source=files.source, **dtypes)
        shape.bytes_per_token(tp)
    except KVortexError as error:
        found = fail("model", error.message, error.hint or "check the name or the path")
        return ModelReport([found], {"unavailable": _reason(error)})
    return _report(resolved, shape, files, gpus, tp)


def _reason(error: KVortexError) -> str:
    """One word, the same in every release."""
    if isinstance(error, ModelUnavailableError):
        return error.reason.value
    return "unknown_shape" if isinstance(error, UnknownShapeError) else "ranks"


def _report(resolved: ResolvedConfig, shape: KVShape, files: ModelFiles, gpus: tuple[Gpu, ...], tp: int) -> ModelReport:
    block_size = resolved.kv_cache.block_size
    token_bytes, block_bytes = shape.bytes_per_token(tp), shape.bytes_per_block(block_size, tp)
    by_dtype = _bytes_by_dtype_and_tp(shape)
    vram = _vram_kv_bytes(resolved, files, gpus)
    size = resolved.kv_cache.ram_cache_size
    blocks = size // block_bytes
    report = ModelReport(
        [
            ok("model", f"{describe_shape(shape)}: {kib(token_bytes)} of KV a token"),
            ok("kv bytes", _in_words(by_dtype)),
            ok("block", f"{block_bytes} bytes ({format_bytes(block_bytes)}) for {block_size} tokens, on all ranks"),
        ],
        {
            "unavailable": None,
            "tensor_parallel_size": tp,
            "kv_bytes_per_token": token_bytes,
            "kv_bytes_per_token_on_a_gpu": by_dtype,
            "block_tokens": block_size,
            "block_bytes": block_bytes,
            "conversation_tokens": CONVERSATION_TOKENS,
            "ram": None,
            "vram": None,
            "context": None,
        },
    )
    assert report.data is not None
    if resolved.uses_kvortex:
        conversations = blocks // -(-CONVERSATION_TOKENS // block_size)
        report.findings.append(_fits_ram(shape, size, block_bytes, block_size, vram))
        report.data["ram"] = {
            "bytes": size,
            "blocks": blocks,
            "tokens": blocks * block_size,
            "conversations": conversations,
        }
    if gpus:
        report.findings.append(_fits_vram(shape, files, vram, tp))
    context = _context_limit(resolved, files)
    if vram is not None and vram > 0:
        tokens = shape.tokens_that_fit(vram, tp)
        conversations = vram // shape.bytes_for(CONVERSATION_TOKENS, tp)
        report.findings.append(_check_context(context, tokens))
        report.data["vram"] = {"bytes": vram, "tokens": tokens, "conversations": conversations}
        report.data["context"] = {"limit_tokens": context, "vram_tokens": tokens}
    elif context is not None:
        report.data["context"] = {"limit_tokens": context, "vram_tokens": None}
    return report


def _bytes_by_dtype_and_tp(shape: KVShape) -> dict[str, dict[str, int]]:
    """Bytes of a token on one GPU, by KV dtype and tensor parallel size."""
    dtypes = {"16-bit": 2, "fp8": 1}
    sizes = [tp for tp in (1, 2, 4, 8) if shape.allows_tensor_parallel(tp)]
    return {
        name: {str(tp): replace(shape, element_bytes=width).bytes_per_token(tp) // tp for tp in sizes}
        for name, width in dtypes.items()
    }


def _in_words(by_dtype: dict[str, dict[str, int]]) -> str:
    """`a token on each GPU: 16-bit KV 128 KiB (tp 1), 64 KiB (tp 2); fp8 KV ...`."""
    parts = []
    for dtype, by_tp in by_dtype.items():
        sizes = ", ".join(f"{num_bytes / 1024:.4g} KiB (tp {tp})" for tp, num_bytes in by_tp.items())
        parts.append(f"{dtype} KV {sizes}")
    return f"a token on each GPU: {'; '.join(parts)}"


def _context_limit(resolved: ResolvedConfig, files: ModelFiles) -> int | None:
    """Tokens that one request may have: `max_model_len`, else the model's own limit; None where neither says."""
    limit = resolved.vllm_value("max_model_len", None)
    inner = files.config.get("text_config")
    sources = (inner if isinstance(inner, dict) else {}, files.config)
    known = [source.get(key) for source in sources for key in _POSITION_KEYS]
    own = next((value for value in known if isinstance(value, int)), None)
    return limit if isinstance(limit, int) and limit > 0 else own


def _check_context(limit: int | None, vram_tokens: int | None) -> Finding:
    if vram_tokens is None:
        return ok("context", "one request may be of any length: all layers look at a window only")
    held = f"VRAM holds {vram_tokens:,} tokens of one request at most"
    if limit is None:
        return ok("context", held)
    if vram_tokens < limit:
        fix = f"--max-model-len {vram_tokens // 1024 * 1024 or vram_tokens}, more GPUs, or kv_cache_dtype fp8"
        return fail("context", f"{held}, less than the {limit:,} it may have: vLLM will not start", fix)
    return ok("context", f"one request may have {limit:,} tokens; {held}")


def _fits_ram(shape: KVShape, size: int, block_bytes: int, block_size: int, vram: int | None) -> Finding:
    blocks = size // block_bytes
    # What slides out of a window is stored as well, and given up first.
    least = "at least " if shape.sliding_layers else ""
    fits = _fits(blocks * block_size, blocks // -(-CONVERSATION_TOKENS // block_size))
    shown = f"{format_bytes(size)}: {least}{fits}"
    if blocks == 0:
        return fail("fits ram", f"{size} bytes: not one block", f"give ram_cache_size at least {block_bytes} bytes")
    if vram is not None and size < vram:
        fix = f"give ram_cache_size more than {format_bytes(vram)}"
        return warn("fits ram", f"{shown}; less than VRAM holds, so it mostly mirrors VRAM", fix)
    return ok("fits ram", shown)


def _fits_vram(shape: KVShape, files: ModelFiles, vram: int | None, tp: int) -> Finding:
    if vram is None:
        fix = "download the model on this machine to see it; vLLM logs the true number at start"
        return warn("fits vram", "how large the weights are is not known here, nor what they leave", fix)
    weights = format_bytes(files.weight_bytes or 0)
    if vram <= 0:
        fix = "use more GPUs (tensor_parallel_size), a quantised model, or a higher gpu_memory_utilization"
        return fail("fits vram", f"{weights} of weights leave no VRAM for KV", fix)
    conversations = vram // shape.bytes_for(CONVERSATION_TOKENS, tp)
    fits = _fits(conversations * CONVERSATION_TOKENS or (shape.tokens_that_fit(vram, tp) or 0), conversations)
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
    return f"{tokens:,} tokens, {counted(conversations, 'conversation')} of {CONVERSATION_TOKENS:,}"


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
