"""Tiny real checkpoints with random weights whose greedy text depends on every token of the prompt."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCABULARY = 512
CHAT_TEMPLATE = "{% for m in messages %} {{ m['content'] }} w3{% endfor %}"

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 4096,
    # Larger than usual: with the usual 0.02 a random model repeats one token, whatever its KV holds.
    "initializer_range": 0.5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 1, "head_dim": 32}


def build(family: str):
    """A model of one of the architectures that KVortex names."""
    torch.manual_seed(0)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE, **GROUPED))
    if family == "mistral":
        return MistralForCausalLM(MistralConfig(**SHAPE, **GROUPED, sliding_window=None))
    if family == "mistral-sliding":
        return MistralForCausalLM(MistralConfig(**SHAPE, **GROUPED, sliding_window=128))
    if family == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=1))
    if family == "gpt-neox":
        return GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE))
    if family == "gemma-hybrid":
        shape = {**SHAPE, "num_hidden_layers": 4}
        layers = ["sliding_attention", "full_attention"] * 2
        return Gemma3ForCausalLM(
            Gemma3TextConfig(**shape, **GROUPED, sliding_window=128, layer_types=layers, query_pre_attn_scalar=32)
        )
    raise ValueError(family)


def save_model(family: str, folder: Path) -> Path:
    """Writes weights and a word-level tokenizer of `w0` .. `w511` to `folder`."""
    build(family).to(torch.bfloat16).save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", bos_token="w1", eos_token="w2", pad_token="w0"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return folder
