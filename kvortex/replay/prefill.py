"""How long the prefill of a prompt takes, estimated: what a hit saves.

    seconds of tokens start .. end = token_s x (end - start) + pair_s x (end^2 - start^2) / 2

The first part is the weights, the second is attention, which looks at all tokens before. From a model's shape:

    token_s = 2 x parameters / 400 TFLOP/s        pair_s = 4 x layers x heads x head size / 400 TFLOP/s

400 TFLOP/s is what one H200 reached on an eight-billion-parameter Llama shape in 16 bits (640 tokens behind 8,192 take
25 to 40 ms, 330 to 520 TFLOP/s). A measured speed is better: it then stands for the first part, without a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvortex.kv_shape import KVKind, KVShape

SUSTAINED_FLOPS: Final = 400e12
_WRAPPERS: Final = ("text_config", "language_config", "llm_config")
# Families whose MLP has two matrices; all others have a gate, too.
_UNGATED: Final = frozenset(
    {"apertus", "arcee", "bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "opt", "phi", "starcoder2"}
    | {"RefinedWeb", "RefinedWebModel"}
)


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """
    Attributes:
        token_s: seconds of one token's weights.
        pair_s: seconds of one token's look at another.
        source: where these are from, for a reader.
    """

    token_s: float
    pair_s: float
    source: str

    def seconds(self, start: int, end: int) -> float:
        """Of a prompt's tokens from `start` to `end`, those before them being there."""
        return self.token_s * (end - start) + self.pair_s * (end * end - start * start) / 2


def cost_of_speed(tokens_per_s: float) -> PrefillCost:
    """The cost of a prefill that was measured."""
    return PrefillCost(1 / tokens_per_s, 0.0, f"at {tokens_per_s:,.0f} tokens/s")


def cost_of_shape(shape: KVShape, parameters: int) -> PrefillCost:
    """The cost on a GPU that sustains SUSTAINED_FLOPS."""
    pairs = 4 * shape.layers * shape.attention_heads * shape.head_dim
    source = f"estimated from {parameters / 1e9:.3g} billion weights at {SUSTAINED_FLOPS / 1e12:.0f} TFLOP/s"
    return PrefillCost(2 * parameters / SUSTAINED_FLOPS, pairs / SUSTAINED_FLOPS, source)


def parameters_read(config: Mapping[str, Any], shape: KVShape) -> int | None:
    """Weights of all layers that each token is multiplied with; None where the configuration does not tell, as with
    experts. Embeddings are looked up, and the last layer's output is made for one token of a prompt: not counted.

    Args:
        shape: of the same configuration.
    """
    values = next((config[key] for key in _WRAPPERS if isinstance(config.get(key), Mapping)), config)
    hidden = _number(values, "hidden_size", "n_embd", "n_embed")
    inner = _number(values, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    is_gated = shape.model_type not in _UNGATED
    has_experts = any("expert" in key for key in values)
    if shape.kind is not KVKind.HEADS or has_experts or hidden is None or (is_gated and inner is None):
        return None
    attention = 2 * hidden * shape.head_dim * (shape.attention_heads + shape.kv_heads)
    mlp = (3 if is_gated else 2) * hidden * (inner or 4 * hidden)
    return shape.layers * (attention + mlp)


def _number(values: Mapping[str, Any], *names: str) -> int | None:
    return next((values[name] for name in names if type(values.get(name)) is int and values[name] > 0), None)
