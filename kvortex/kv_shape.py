"""How many KV bytes a token of a model takes, from its `config.json` alone: no torch, no weights.

A configuration that is not understood is refused: a size that is wrong by 2x is worse than none. Not counted:
a speculative draft model's own layers, and the padding vLLM adds where a hybrid model's kinds of layer differ
in number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

from kvortex.errors import UnfitError
from kvortex.kv_families import FAMILIES, Family, HeadDim, KVHeads, Sliding

_ELEMENT_BYTES = {
    # vLLM runs a float32 checkpoint in 16 bits unless `dtype` asks for more: "auto" is 2 for all of them.
    "auto": 2,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float32": 4,
    "float": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
}
KV_DTYPES = tuple(_ELEMENT_BYTES)
"""What `dtype` and `kv_cache_dtype` may be here."""
_WRAPPERS = ("text_config", "language_config", "llm_config")
# Each of these, when set, changes what is kept per layer in a way this module does not work out.
_REFUSED_KEYS = (
    "is_encoder_decoder",
    "cross_attention_layers",
    "attention_chunk_size",
    "num_kv_shared_layers",
    "compress_ratios",
    "index_topk",
)


class UnknownShapeError(UnfitError):
    """The model's configuration does not say, in a way KVortex understands, what its KV looks like."""


class KVKind(Enum):
    """HEADS: keys and values per KV head, split over ranks.
    LATENT: MLA's one vector a token, whole on every rank.
    """

    HEADS = "heads"
    LATENT = "latent"


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token leaves in the KV cache.

    Attributes:
        full_layers: layers that keep every token.
        sliding_layers: layers that need the last `sliding_window` tokens only.
        sliding_window: tokens; 0 without sliding layers.
        attention_heads: query heads; a tensor parallel size must divide them.
        kv_heads: KV heads of the whole model; 1 for LATENT.
        head_dim: elements of a head's key; for LATENT kv_lora_rank + qk_rope_head_dim.
        element_bytes: bytes of one KV element.
    """

    model_type: str
    kind: KVKind
    full_layers: int
    sliding_layers: int
    sliding_window: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int

    @property
    def layers(self) -> int:
        return self.full_layers + self.sliding_layers

    def allows_tensor_parallel(self, tp: int) -> bool:
        """Whether vLLM can split this model's attention over `tp` ranks."""
        if tp < 1 or self.attention_heads % tp:
            return False
        return self.kind is KVKind.LATENT or self.kv_heads % tp == 0 or tp % self.kv_heads == 0

    def layer_bytes_per_token(self, tp: int = 1) -> int:
        """Bytes of one token in one layer on one rank.

        Raises:
            UnfitError: vLLM cannot split this model over `tp` ranks.
        """
        if not self.allows_tensor_parallel(tp):
            raise UnfitError(
                f"tensor_parallel_size {tp} does not fit this {self.model_type} model: "
                f"{self.attention_heads} attention heads and {self.kv_heads} KV heads",
                hint=f"one of {', '.join(str(n) for n in self.tensor_parallel_sizes(16))}",
            )
        if self.kind is KVKind.LATENT:
            return self.head_dim * self.element_bytes
        # With more ranks than KV heads, vLLM keeps a whole head on each rank.
        return 2 * max(1, self.kv_heads // tp) * self.head_dim * self.element_bytes

    def tensor_parallel_sizes(self, largest: int) -> tuple[int, ...]:
        """The sizes up to `largest` that vLLM accepts for this model."""
        return tuple(tp for tp in range(1, largest + 1) if self.allows_tensor_parallel(tp))

    def bytes_per_token(self, tp: int = 1) -> int:
        """Bytes a token takes on the whole server, over all layers and the copies that `tp` ranks keep."""
        return tp * self.layers * self.layer_bytes_per_token(tp)

    def bytes_per_block(self, block_size: int, tp: int = 1) -> int:
        """Bytes of `block_size` tokens, in all layers, on the whole server."""
        return block_size * self.bytes_per_token(tp)

    def bytes_for(self, tokens: int, tp: int = 1) -> int:
        """Bytes one conversation of `tokens` tokens needs on the whole server, cut to the sliding windows."""
        layer_tokens = self.full_layers * tokens + self.sliding_layers * min(tokens, self.sliding_window)
        return tp * self.layer_bytes_per_token(tp) * layer_tokens

    def tokens_that_fit(self, num_bytes: int, tp: int = 1) -> int | None:
        """The longest conversation whose KV takes `num_bytes` on the whole server; None where every length does: all
        layers slide, and their windows fit."""
        layer_bytes = tp * self.layer_bytes_per_token(tp)
        tokens = num_bytes // (layer_bytes * self.layers)
        if not self.sliding_layers or tokens <= self.sliding_window:
            return tokens
        if not self.full_layers:
            return None
        return (num_bytes // layer_bytes - self.sliding_layers * self.sliding_window) // self.full_layers


def read_kv_shape(
    config: Mapping[str, Any],
    *,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    source: str = "config.json",
) -> KVShape:
    """Reads the shape from a parsed `config.json`.

    Args:
        dtype: vLLM's `dtype` option.
        kv_cache_dtype: vLLM's `kv_cache_dtype` option.
        source: what messages call the configuration.

    Raises:
        UnknownShapeError: it is not understood, or a dtype is not.
    """
    return _Reader(config, source).shape(_element_bytes(config, dtype, kv_cache_dtype, source))


def _element_bytes(config: Mapping[str, Any], dtype: str, kv_cache_dtype: str, source: str) -> int:
    name = kv_cache_dtype if kv_cache_dtype != "auto" else _checkpoint_kv_dtype(config) or dtype
    try:
        return _ELEMENT_BYTES[name]
    except KeyError:
        raise UnknownShapeError(
            f"{source}: the size of a KV element of dtype {name!r} is not known",
            hint=f"known: {', '.join(_ELEMENT_BYTES)}",
        ) from None


def _checkpoint_kv_dtype(config: Mapping[str, Any]) -> str | None:
    """The KV dtype a quantised checkpoint asks for; vLLM follows it when `kv_cache_dtype` is auto."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return None
    inner = quantization.get("quantization")
    for part in (inner if isinstance(inner, Mapping) else {}, quantization):
        wanted = part.get("kv_cache_scheme") or part.get("kv_cache_quant_algo")
        if isinstance(wanted, Mapping):
            bits, element = wanted.get("num_bits"), wanted.get("type")
            return "fp8" if (bits, element) == (8, "float") else f"{bits}-bit {element}"
        if wanted:
            return str(wanted).lower()
    return None


class _Reader:
    """Reads one configuration; every value used is stated there or a known default of the model's family."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.source = source
        self.values = self._text_config(config)
        self.model_type = str(self.values.get("model_type") or config.get("model_type") or "")
        for key in _REFUSED_KEYS:
            if self.values.get(key) or config.get(key):
                self.refuse(f"{key} is set, and what such a model keeps per token is not known")
        family = FAMILIES.get(self.model_type)
        if family is None:
            self.refuse("the layout of this model's KV is not known")
        self.family: Family = family

    @staticmethod
    def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
        for key in _WRAPPERS:
            if isinstance(config.get(key), Mapping):
                nested: Mapping[str, Any] = config[key]
                return nested
        return config

    def refuse(self, why: str) -> NoReturn:
        named = f"model type {self.model_type!r}" if self.model_type else "no model_type"
        raise UnknownShapeError(
            f"{self.source} ({named}): {why}",
            hint="size ram_cache_size by hand: the KV cache size vLLM logs at start tells the bytes a token",
        )

    def number(self, *names: str) -> int | None:
        """The first of these keys that is stated; a number that is not a positive whole one is refused."""
        for name in names:
            value = self.values.get(name, self.family.defaults.get(name))
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                self.refuse(f"{name} is {value!r}, not a positive whole number")
            return value
        return None

    def stated(self, *names: str) -> int:
        value = self.number(*names)
        return value if value is not None else self.refuse(f"{' or '.join(names)} is not stated")

    def shape(self, element_bytes: int) -> KVShape:
        layers = self.stated("num_hidden_layers", "n_layer")
        heads = self.stated("num_attention_heads", "n_head")
        if self.family.kv_heads is KVHeads.LATENT:
            kind, kv_heads = KVKind.LATENT, 1
            head_dim = self.stated("kv_lora_rank") + self.stated("qk_rope_head_dim")
        else:
            kind, kv_heads, head_dim = KVKind.HEADS, self.kv_heads(heads), self.head_dim(heads)
        if heads % kv_heads:
            self.refuse(f"{heads} attention heads are no multiple of {kv_heads} KV heads")
        sliding, window = self.sliding(layers)
        return KVShape(
            self.model_type, kind, layers - sliding, sliding, window, heads, kv_heads, head_dim, element_bytes
        )

    def kv_heads(self, heads: int) -> int:
        match self.family.kv_heads:
            case KVHeads.STATED:
                return self.stated("num_key_value_heads")
            case KVHeads.STATED_OR_ALL:
                return self.number("num_key_value_heads") or heads
            case KVHeads.ALL:
                return heads
            case KVHeads.BIGCODE:
                return 1 if self.values.get("multi_query", True) else heads
            case KVHeads.FALCON:
                return self.falcon_kv_heads(heads)
            case KVHeads.LATENT:
                raise AssertionError("MLA models have no KV heads to count")

    def falcon_kv_heads(self, heads: int) -> int:
        # Falcon-40B's first release ("RefinedWeb") is the new architecture without saying so.
        new = self.values.get("new_decoder_architecture", self.model_type == "RefinedWeb")
        if new:
            return self.stated("num_kv_heads", "n_head_kv")
        # Falcon-7B states num_kv_heads = 71 beside multi_query; transformers and vLLM ignore it.
        if self.values.get("multi_query", True):
            return 1
        return self.number("num_kv_heads", "n_head_kv") or heads

    def head_dim(self, heads: int) -> int:
        if self.family.head_dim is HeadDim.STATED:
            return self.stated("head_dim")
        stated = self.number("head_dim") if self.family.head_dim is HeadDim.STATED_OR_DERIVED else None
        if stated is not None:
            return stated
        hidden = self.stated("hidden_size", "n_embd", "n_embed")
        if hidden % heads:
            self.refuse(f"hidden_size {hidden} is no multiple of {heads} attention heads")
        return hidden // heads

    def sliding(self, layers: int) -> tuple[int, int]:
        """(sliding layers, window in tokens)."""
        window = self.number("sliding_window") if self.values.get("sliding_window") else None
        types = self.values.get("layer_types")
        if types is not None:
            return self.sliding_by_type(types, layers, window)
        match self.family.sliding:
            case Sliding.NEVER:
                if window and self.values.get("use_sliding_window") is not False:
                    self.refuse("sliding_window is set, and which layers use it is not known")
                return 0, 0
            case Sliding.ALL_WHEN_SET:
                return (layers, window) if window else (0, 0)
            case Sliding.ALL_WHEN_SET_MUST_BE_STATED:
                if "sliding_window" not in self.values:
                    self.refuse("sliding_window is not stated, and its default differs between releases")
                return (layers, window) if window else (0, 0)
            case Sliding.WHEN_USED:
                if not self.values.get("use_sliding_window", False) or not window:
                    return 0, 0
                return max(0, layers - self.stated("max_window_layers")), window
            case Sliding.PATTERN:
                period = self.stated("sliding_window_pattern")
                return layers - layers // period, self.stated("sliding_window")

    def sliding_by_type(self, types: object, layers: int, window: int | None) -> tuple[int, int]:
        if not isinstance(types, list) or len(types) != layers:
            self.refuse(f"layer_types does not name one type for each of the {layers} layers")
        foreign = sorted({str(t) for t in types} - {"full_attention", "sliding_attention"})
        if foreign:
            self.refuse(f"layers of type {', '.join(foreign)} keep something else than KV per token")
        sliding = types.count("sliding_attention")
        if sliding and window is None:
            self.refuse("layer_types names sliding_attention layers, but sliding_window is not set")
        return (sliding, window) if sliding and window else (0, 0)
