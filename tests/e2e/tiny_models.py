"""Tiny real checkpoints with random weights whose greedy text depends on every token of the prompt."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

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
DEEPER = {**SHAPE, "num_hidden_layers": 4}
FALCON = {**SHAPE, "new_decoder_architecture": False}
MIXED = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {  # vLLM's kernels for CPUs are compiled for 512 + 64
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "q_lora_rank": None,
    "num_key_value_heads": 2,
}
MANY_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
DEEPSEEK = {
    **SHAPE,
    **LATENT,
    **MANY_EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
WIDE_HEADS = {"qk_nope_head_dim": 128, "v_head_dim": 128}  # vLLM's kernels for GPUs are for DeepSeek's own sizes
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
CHUNKED = {"attention_chunk_size": 128, "no_rope_layers": [1, 1, 1, 0], "intermediate_size_mlp": 128}

FAMILIES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SHAPE, **GROUPED}),
    "llama-wide": ("LlamaForCausalLM", "LlamaConfig", {**SHAPE, "num_key_value_heads": 1, "head_dim": 128}),
    "llama-ungrouped": ("LlamaForCausalLM", "LlamaConfig", SHAPE),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**SHAPE, **GROUPED, "sliding_window": None}),
    "mistral-sliding": ("MistralForCausalLM", "MistralConfig", {**SHAPE, **GROUPED, "sliding_window": 128}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**SHAPE, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**SHAPE, **GROUPED}),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SHAPE),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**FALCON, "multi_query": True, "bias": False, "alibi": False}),
    "falcon-alibi": (
        "FalconForCausalLM",
        "FalconConfig",
        {**FALCON, "multi_query": False, "bias": True, "alibi": True},
    ),
    "gemma-hybrid": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**DEEPER, **GROUPED, "sliding_window": 128, "layer_types": MIXED, "query_pre_attn_scalar": 32},
    ),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", {**DEEPER, **GROUPED, **EXPERTS, "sliding_window": 128}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**SHAPE, **GROUPED, **EXPERTS, "sliding_window": None}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**SHAPE, **GROUPED, **MANY_EXPERTS, "num_experts": 4}),
    "deepseek": ("DeepseekV2ForCausalLM", "DeepseekV2Config", DEEPSEEK),
    "deepseek-wide": ("DeepseekV2ForCausalLM", "DeepseekV2Config", {**DEEPSEEK, **WIDE_HEADS}),
    "falcon-h1": ("FalconH1ForCausalLM", "FalconH1Config", {**SHAPE, **MAMBA, "num_key_value_heads": 1}),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", {**DEEPER, **GROUPED, **CHUNKED, "num_local_experts": 2}),
    "bert": ("BertModel", "BertConfig", {name: SHAPE[name] for name in SHAPE if not name.startswith("tie")}),
}
"""What `model_table.py` and tests name: the classes of the model and of its configuration in Transformers, and what is
in the latter."""


def build(family: str):
    """A model of one of the architectures in `FAMILIES`."""
    torch.manual_seed(0)
    model, config, shape = FAMILIES[family]
    return getattr(transformers, model)(getattr(transformers, config)(**shape))


def save_model(family: str, folder: Path) -> Path:
    """Writes weights and a word-level tokenizer of `w0` .. `w511` to `folder`."""
    build(family).to(torch.bfloat16).save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", bos_token="w1", eos_token="w2", pad_token="w0"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return folder


def save_lora(folder: Path) -> Path:
    """Writes an adapter of rank 8 for the tiny Llama's queries and values, as PEFT does."""
    torch.manual_seed(1)
    sizes = {"q_proj": 2 * 32, "v_proj": 32}
    tensors = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        for name, size in sizes.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{module}.lora_A.weight"] = (torch.randn(8, SHAPE["hidden_size"]) / 2).to(torch.bfloat16)
            tensors[f"{module}.lora_B.weight"] = (torch.randn(size, 8) / 2).to(torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 8, "target_modules": list(sizes)}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return folder
