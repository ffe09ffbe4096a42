"""What a block is found by: its key, inside a namespace.

A key is vLLM's own chained block hash with the KV cache group behind it, whole. It already covers the tokens,
their position, LoRA, cache salt and images; KVortex never shortens it and never uses Python's `hash()` as an
identity. Prompts whose hashes collide are one to vLLM's own prefix cache, and one to KVortex: hence SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple, NewType

BlockKey = NewType("BlockKey", bytes)
"""Block hash (32 bytes for SHA-256), then the KV cache group as 4 bytes, big-endian: vLLM's own packing."""

FORMAT_VERSION = 1
"""Of the bytes in a slot. Grows whenever the same KV would be laid out differently."""

GROUP_BYTES = 4
MIN_HASH_BYTES = 16
"""Under 128 bits, two prompts of different users could meet in one block."""

COLLISION_RESISTANT = frozenset({"sha256", "sha256_cbor"})
"""vLLM's names of the hashes with which nobody can make two prompts meet. Of others, such as xxhash, an attacker may
find two that do, and have another user's request answered from a block of their own."""

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})


def block_key(block_hash: bytes, group: int) -> BlockKey:
    """The key of a block of KV cache group `group`."""
    assert len(block_hash) >= MIN_HASH_BYTES, f"block hash of {len(block_hash)} bytes, need {MIN_HASH_BYTES}"
    return BlockKey(block_hash + group.to_bytes(GROUP_BYTES, "big"))


def group_of(key: BlockKey) -> int:
    """The KV cache group of a key."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


SAMPLE_EVERY = 16
"""One key in so many is in the sample."""


def in_sample(key: BlockKey) -> bool:
    """Whether this key is in the sample, the same in every process: hashes are uniform."""
    return key[0] % SAMPLE_EVERY == 0


class Part(NamedTuple):
    """Which part of the model's KV a worker holds, along one kind of parallelism."""

    rank: int = 0
    size: int = 1


UNDIVIDED = Part()


class WeightFile(NamedTuple):
    """What changes when the weights at a path are replaced, without reading them."""

    name: str
    num_bytes: int
    mtime_ns: int


def fingerprint_weights(path: Path) -> tuple[WeightFile, ...]:
    """The weight files and `config.json` at `path`, in order of name.

    Args:
        path: a model's folder or one weight file. Empty answer for a path that does not exist: the name of a
            model on a hub, whose revision says what `weights` would.
    """
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = [f for f in path.iterdir() if f.suffix in _WEIGHT_SUFFIXES or f.name == "config.json"]
    else:
        files = []
    stats = sorted((file.name, file.stat()) for file in files)
    return tuple(WeightFile(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """All that makes the KV bytes of equal tokens differ. Blocks are shared only inside one namespace.

    Attributes:
        model: name or path, as given to vLLM.
        revision: the commit on the hub; "" for a local path.
        config: the model's effective configuration, overrides included, as JSON.
        weights: from `fingerprint_weights`, where the weights are local.
        dtype: the model's effective dtype, never "auto".
        kv_cache_dtype: as configured; "auto" follows `dtype`.
        kv_layout: describes shape and order of a block's bytes: layers, heads, head size, strides, KV groups.
        block_size: tokens of a block.
        rope: the effective RoPE parameters: theta, scaling type, factors. JSON values only.
        max_model_len: tokens; some RoPE scalings choose their factors by it.
        hash_algorithm: vLLM's, of the block hash in a key.
        quantization, speculative: as configured; "" for none.
    """

    model: str
    revision: str
    config: str = ""
    weights: tuple[WeightFile, ...] = ()
    dtype: str
    kv_cache_dtype: str
    kv_layout: str
    block_size: int
    tensor_parallel: Part = UNDIVIDED
    pipeline_parallel: Part = UNDIVIDED
    prefill_context_parallel: Part = UNDIVIDED
    decode_context_parallel: Part = UNDIVIDED
    rope: Mapping[str, object] = field(default_factory=dict)
    max_model_len: int
    hash_algorithm: str
    quantization: str = ""
    speculative: str = ""
    format_version: int = FORMAT_VERSION

    def digest(self) -> bytes:
        """SHA-256 over every field, 32 bytes; equal in every process, whatever its hash seed.

        JSON quotes strings and names fields, so no two sets of values have one encoding.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        encoded = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(b"kvortex-namespace:" + encoded.encode("ascii")).digest()
