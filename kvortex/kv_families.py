"""The model families whose `config.json` KVortex can read: how each states KV heads, head size and windows.

What a key means when it is absent is the default of the family's own configuration class in transformers;
where releases of that class disagree, the key must be stated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class KVHeads(Enum):
    """Where the number of KV heads stands."""

    STATED = "num_key_value_heads"
    STATED_OR_ALL = "num_key_value_heads, or all attention heads"
    ALL = "all attention heads"
    BIGCODE = "1 with multi_query"
    FALCON = "falcon's three rules"
    LATENT = "MLA: none"


class HeadDim(Enum):
    """Where the size of a head stands. DERIVED is hidden_size / attention heads."""

    STATED = "head_dim"
    STATED_OR_DERIVED = "head_dim, or derived"
    DERIVED = "derived"


class Sliding(Enum):
    """Which layers look at a window only, where `layer_types` does not say so."""

    NEVER = "none"
    ALL_WHEN_SET = "all, when sliding_window is set"
    ALL_WHEN_SET_MUST_BE_STATED = "the same, and the key must be there"
    WHEN_USED = "from max_window_layers on, when use_sliding_window"
    PATTERN = "all but every n-th, n = sliding_window_pattern"


@dataclass(frozen=True, slots=True)
class Family:
    kv_heads: KVHeads
    head_dim: HeadDim
    sliding: Sliding = Sliding.NEVER
    defaults: Mapping[str, int] = field(default_factory=dict)


_LLAMA = Family(KVHeads.STATED_OR_ALL, HeadDim.STATED_OR_DERIVED)
_GROUPED = Family(KVHeads.STATED, HeadDim.STATED_OR_DERIVED)
_GROUPED_STATED = Family(KVHeads.STATED, HeadDim.STATED)
_PLAIN = Family(KVHeads.ALL, HeadDim.DERIVED)
_FALCON = Family(KVHeads.FALCON, HeadDim.DERIVED)
_MLA = Family(KVHeads.LATENT, HeadDim.DERIVED)
_QWEN2 = Family(KVHeads.STATED, HeadDim.STATED_OR_DERIVED, Sliding.WHEN_USED)
_QWEN3 = Family(KVHeads.STATED, HeadDim.STATED, Sliding.WHEN_USED)


def _windowed(kv_heads: KVHeads = KVHeads.STATED, sliding: Sliding = Sliding.ALL_WHEN_SET) -> Family:
    return Family(kv_heads, HeadDim.STATED_OR_DERIVED, sliding)


def _pattern(head: HeadDim, **defaults: int) -> Family:
    return Family(KVHeads.STATED, head, Sliding.PATTERN, defaults)


FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "arcee": _LLAMA,
    "apertus": _LLAMA,
    "cohere": _LLAMA,
    "granite": _LLAMA,
    "granitemoe": _LLAMA,
    "hunyuan_v1_dense": _LLAMA,
    "olmo": _LLAMA,
    "olmo2": _LLAMA,
    "olmoe": _LLAMA,
    "phi": _LLAMA,
    "phi3": _windowed(KVHeads.STATED_OR_ALL),
    "mistral": _windowed(sliding=Sliding.ALL_WHEN_SET_MUST_BE_STATED),
    "ministral3": _windowed(),
    "mixtral": _windowed(),
    "starcoder2": _windowed(),
    "qwen2": _QWEN2,
    "qwen2_moe": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "qwen3_vl_text": _GROUPED_STATED,
    "qwen3_vl_moe_text": _GROUPED_STATED,
    "gemma": _GROUPED_STATED,
    "gemma2": _pattern(HeadDim.STATED, sliding_window_pattern=2),
    # Released multimodal Gemma 3 files leave out whatever equals the class defaults.
    "gemma3_text": _pattern(
        HeadDim.STATED, num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window_pattern=6
    ),
    "gpt_oss": _pattern(HeadDim.STATED, sliding_window_pattern=2),
    "cohere2": _pattern(HeadDim.STATED_OR_DERIVED, sliding_window_pattern=4),
    "olmo3": _pattern(HeadDim.STATED_OR_DERIVED, sliding_window_pattern=4),
    "ernie4_5": _GROUPED,
    "ernie4_5_moe": _GROUPED,
    "glm": _GROUPED_STATED,
    "glm4": _GROUPED_STATED,
    "glm4_moe": _GROUPED_STATED,
    "seed_oss": _GROUPED_STATED,
    "smollm3": _GROUPED,
    "stablelm": _GROUPED,
    "minimax_m2": _GROUPED_STATED,
    "falcon": _FALCON,
    "RefinedWeb": _FALCON,
    "RefinedWebModel": _FALCON,
    "gpt_neox": _PLAIN,
    "gpt2": _PLAIN,
    "gptj": _PLAIN,
    "opt": _PLAIN,
    "bloom": _PLAIN,
    "gpt_bigcode": Family(KVHeads.BIGCODE, HeadDim.DERIVED),
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "kimi_k2": _MLA,
    "glm4_moe_lite": _MLA,
}
