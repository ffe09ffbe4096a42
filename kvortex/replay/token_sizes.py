"""How many KV bytes a token of a model takes: of some by name, of all others by their `config.json`."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvortex.kv_shape import read_kv_shape
from kvortex.model_files import read_model_files


class _Shape(NamedTuple):
    layers: int
    kv_heads: int
    head_dim: int


_BF16_BYTES: Final = 2
_SHAPES: Final = {
    "llama-3.1-8b": _Shape(32, 8, 128),
    "llama-3.1-70b": _Shape(80, 8, 128),
    "llama-3.3-70b": _Shape(80, 8, 128),
    "mistral-7b": _Shape(32, 8, 128),
    "qwen2.5-7b": _Shape(28, 4, 128),
    "qwen2.5-72b": _Shape(80, 8, 128),
}

KNOWN_MODELS: Final = tuple(_SHAPES)
"""Models whose shape needs no file; KV in bfloat16."""


def token_bytes(model: str) -> int:
    """Bytes of one token in all layers.

    Args:
        model: one of KNOWN_MODELS, a directory, or a name on the Hugging Face Hub.

    Raises:
        UnfitError: its configuration cannot be read, or is not understood.
    """
    shape = _SHAPES.get(model.lower())
    if shape is not None:
        return 2 * shape.layers * shape.kv_heads * shape.head_dim * _BF16_BYTES
    files = read_model_files(model)
    return read_kv_shape(files.config, source=files.source).bytes_per_token()
