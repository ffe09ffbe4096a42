"""What a replay must know of a model: of some by name, of all others by their `config.json`. No weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvortex.errors import UsageError
from kvortex.kv_shape import KVShape, read_kv_shape
from kvortex.model_files import read_model_files
from kvortex.replay.prefill import parameters_read


class _Shape(NamedTuple):
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int


_SHAPES: Final = {
    "llama-3.1-8b": _Shape(32, 32, 8, 128, 4096, 14336),
    "llama-3.1-70b": _Shape(80, 64, 8, 128, 8192, 28672),
    "llama-3.3-70b": _Shape(80, 64, 8, 128, 8192, 28672),
    "mistral-7b": _Shape(32, 32, 8, 128, 4096, 14336),
    "qwen2.5-7b": _Shape(28, 28, 4, 128, 3584, 18944),
    "qwen2.5-72b": _Shape(80, 64, 8, 128, 8192, 29568),
}

KNOWN_MODELS: Final = tuple(_SHAPES)
"""Models whose shape needs no file."""


@dataclass(frozen=True, slots=True)
class ReplayedModel:
    """A model whose KV a replay holds.

    Attributes:
        name: as asked for.
        parameters: weights that each token of a prompt is multiplied with; None where that is not known.
    """

    name: str
    shape: KVShape
    parameters: int | None

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token in all layers."""
        return self.shape.bytes_per_token()


def read_model(model: str, *, kv_cache_dtype: str = "auto") -> ReplayedModel:
    """
    Args:
        model: one of KNOWN_MODELS, a directory, or a name on the Hugging Face Hub.
        kv_cache_dtype: vLLM's option.

    Raises:
        UsageError: it is none of these.
        ModelUnavailableError: its configuration cannot be read.
        UnfitError: its configuration is not understood.
    """
    known = _SHAPES.get(model.lower())
    if known is None and "/" not in model and not (model.strip() and Path(model).exists()):
        raise UsageError(
            f"--model {model}: there is no such directory, and a Hub name is owner/name",
            hint=f"known without a file: {', '.join(KNOWN_MODELS)}",
        )
    if known is not None:
        config, source = _config_of(known), model
    else:
        files = read_model_files(model)
        config, source = dict(files.config), files.source
    shape = read_kv_shape(config, kv_cache_dtype=kv_cache_dtype, source=source)
    return ReplayedModel(model, shape, parameters_read(config, shape))


def _config_of(shape: _Shape) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
    }
