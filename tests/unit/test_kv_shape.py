"""KV bytes a token of models whose figures are known, from the config.json they were released with."""

from __future__ import annotations

from typing import Any

import pytest

from kvortex.errors import UnfitError
from kvortex.kv_shape import KVKind, UnknownShapeError, read_kv_shape

KIB = 1024

LLAMA_3_3_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}
LLAMA_3_1_8B = {**LLAMA_3_3_70B, "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
MISTRAL_7B = {
    "model_type": "mistral",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
}
QWEN_2_5_7B = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_size": 3584,
    "max_window_layers": 28,
    "sliding_window": 131072,
    "use_sliding_window": False,
}
QWEN_3_8B = {
    **QWEN_2_5_7B,
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "head_dim": 128,
    "max_window_layers": 36,
    "sliding_window": None,
}
SMOLLM2_135M = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}
FALCON_7B = {
    "model_type": "falcon",
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "num_kv_heads": 71,
    "hidden_size": 4544,
    "multi_query": True,
    "new_decoder_architecture": False,
}
FALCON_40B = {
    **FALCON_7B,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_kv_heads": 8,
    "hidden_size": 8192,
    "new_decoder_architecture": True,
}
GPT_NEOX_20B = {
    "model_type": "gpt_neox",
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "hidden_size": 6144,
    "torch_dtype": "float16",
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
}
GEMMA_3_4B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 27},
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}


@pytest.mark.parametrize(
    ("config", "bytes_per_token"),
    [
        pytest.param(LLAMA_3_3_70B, 320 * KIB, id="Llama-3.3-70B"),
        pytest.param(LLAMA_3_1_8B, 128 * KIB, id="Llama-3.1-8B"),
        pytest.param(MISTRAL_7B, 128 * KIB, id="Mistral-7B-v0.3"),
        pytest.param(QWEN_2_5_7B, 2 * 28 * 4 * 128 * 2, id="Qwen2.5-7B"),
        pytest.param(QWEN_3_8B, 2 * 36 * 8 * 128 * 2, id="Qwen3-8B"),
        pytest.param(SMOLLM2_135M, 2 * 30 * 3 * 64 * 2, id="SmolLM2-135M"),
        pytest.param(FALCON_7B, 2 * 32 * 1 * 64 * 2, id="falcon-7b"),
        pytest.param(FALCON_40B, 2 * 60 * 8 * 64 * 2, id="falcon-40b"),
        pytest.param(GPT_NEOX_20B, 2 * 44 * 64 * 96 * 2, id="gpt-neox-20b"),
        pytest.param(DEEPSEEK_V3, 61 * (512 + 64) * 2, id="DeepSeek-V3"),
        pytest.param(GEMMA_3_4B, 2 * 34 * 4 * 256 * 2, id="gemma-3-4b"),
        pytest.param(GPT_OSS_20B, 2 * 24 * 8 * 64 * 2, id="gpt-oss-20b"),
    ],
)
def test_bytes_a_token_of_known_models(config: dict[str, Any], bytes_per_token: int) -> None:
    assert read_kv_shape(config).bytes_per_token() == bytes_per_token


def test_falcon_as_first_released_under_its_own_key_names() -> None:
    rw_7b = {
        "model_type": "RefinedWebModel",
        "n_layer": 32,
        "n_head": 71,
        "hidden_size": 4544,
        "multi_query": True,
    }
    rw_40b = {"model_type": "RefinedWeb", "n_layer": 60, "n_head": 128, "n_head_kv": 8, "hidden_size": 8192}
    assert read_kv_shape(rw_7b).bytes_per_token() == read_kv_shape(FALCON_7B).bytes_per_token()
    assert read_kv_shape(rw_40b).bytes_per_token() == read_kv_shape(FALCON_40B).bytes_per_token()


def test_old_falcon_without_multi_query_has_a_kv_head_for_each_head() -> None:
    assert read_kv_shape({**FALCON_7B, "multi_query": False}).kv_heads == 71


def test_splitting_over_ranks_leaves_the_total_as_it_is() -> None:
    shape = read_kv_shape(LLAMA_3_3_70B)
    assert [shape.bytes_per_token(tp) for tp in (1, 2, 4, 8)] == [320 * KIB] * 4
    assert shape.layer_bytes_per_token(8) == 2 * 128 * 2


def test_more_ranks_than_kv_heads_keep_whole_heads_twice() -> None:
    assert read_kv_shape(LLAMA_3_3_70B).bytes_per_token(16) == 2 * 320 * KIB


def test_mla_is_whole_on_every_rank() -> None:
    shape = read_kv_shape(DEEPSEEK_V3)
    assert shape.kind is KVKind.LATENT
    assert shape.bytes_per_token(8) == 8 * shape.bytes_per_token(1)


def test_a_size_that_does_not_divide_the_heads_is_refused_with_the_ones_that_do() -> None:
    shape = read_kv_shape(SMOLLM2_135M)
    with pytest.raises(UnfitError, match="tensor_parallel_size 2") as refused:
        shape.bytes_per_token(2)
    assert refused.value.hint is not None
    assert refused.value.hint.startswith("one of 1, 3, 9")


def test_fp8_kv_is_half() -> None:
    assert read_kv_shape(LLAMA_3_1_8B, kv_cache_dtype="fp8").bytes_per_token() == 64 * KIB
    assert read_kv_shape(LLAMA_3_1_8B, dtype="float32").bytes_per_token() == 256 * KIB


def test_a_float32_checkpoint_is_served_in_16_bits() -> None:
    assert read_kv_shape({**LLAMA_3_1_8B, "torch_dtype": "float32"}).bytes_per_token() == 128 * KIB


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}},
    ],
)
def test_a_checkpoint_that_asks_for_fp8_kv_gets_it_unless_told_otherwise(
    quantization: dict[str, Any],
) -> None:
    config = {**LLAMA_3_1_8B, "quantization_config": quantization}
    assert read_kv_shape(config).bytes_per_token() == 64 * KIB
    assert read_kv_shape(config, kv_cache_dtype="bfloat16").bytes_per_token() == 128 * KIB


def test_quantised_weights_alone_leave_the_kv_as_it_is() -> None:
    config = {**LLAMA_3_1_8B, "quantization_config": {"quant_method": "awq", "bits": 4}}
    assert read_kv_shape(config).bytes_per_token() == 128 * KIB


@pytest.mark.parametrize("dtype", ["nvfp4", "int8_per_token_head"])
def test_an_unknown_kv_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(UnknownShapeError, match=dtype):
        read_kv_shape(LLAMA_3_1_8B, kv_cache_dtype=dtype)


def test_gemma_3_slides_in_five_layers_of_six() -> None:
    shape = read_kv_shape(GEMMA_3_4B)
    assert (shape.full_layers, shape.sliding_layers, shape.sliding_window) == (5, 29, 1024)


def test_sliding_layers_need_their_window_only() -> None:
    shape = read_kv_shape(GPT_OSS_20B)
    layer = 2 * 8 * 64 * 2
    assert (shape.full_layers, shape.sliding_layers, shape.sliding_window) == (12, 12, 128)
    assert shape.bytes_for(100) == 24 * layer * 100
    assert shape.bytes_for(10_000) == layer * (12 * 10_000 + 12 * 128)


def test_the_first_mistral_slides_everywhere_and_must_say_so() -> None:
    shape = read_kv_shape({**MISTRAL_7B, "sliding_window": 4096})
    assert (shape.full_layers, shape.sliding_layers) == (0, 32)
    silent = {key: value for key, value in MISTRAL_7B.items() if key != "sliding_window"}
    with pytest.raises(UnknownShapeError, match="sliding_window is not stated"):
        read_kv_shape(silent)


def test_qwen_slides_only_when_it_says_it_uses_its_window() -> None:
    assert read_kv_shape(QWEN_2_5_7B).sliding_layers == 0
    assert read_kv_shape({**QWEN_2_5_7B, "use_sliding_window": True, "max_window_layers": 20}).sliding_layers == 8


def test_a_window_in_a_family_without_one_is_refused() -> None:
    with pytest.raises(UnknownShapeError, match="sliding_window is set"):
        read_kv_shape({**LLAMA_3_1_8B, "sliding_window": 4096})


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "mamba", "num_hidden_layers": 64, "hidden_size": 2560}, "not known"),
        ({**LLAMA_3_1_8B, "model_type": "shiny_new"}, "shiny_new"),
        ({"num_hidden_layers": 1}, "no model_type"),
        (
            {**QWEN_3_8B, "layer_types": ["linear_attention"] * 27 + ["full_attention"] * 9},
            "linear_attention",
        ),
        ({**GPT_OSS_20B, "layer_types": ["full_attention"] * 3}, "each of the 24 layers"),
        ({**DEEPSEEK_V3, "index_topk": 2048}, "index_topk"),
        ({**LLAMA_3_1_8B, "is_encoder_decoder": True}, "is_encoder_decoder"),
        ({**QWEN_2_5_7B, "num_key_value_heads": None}, "num_key_value_heads is not stated"),
        ({**LLAMA_3_1_8B, "num_key_value_heads": [8] * 32}, "not a positive whole number"),
        ({**LLAMA_3_1_8B, "num_hidden_layers": True}, "not a positive whole number"),
        ({**LLAMA_3_1_8B, "num_key_value_heads": 5}, "no multiple of 5"),
        ({**GPT_NEOX_20B, "hidden_size": 6145}, "no multiple of 64"),
        ({**DEEPSEEK_V3, "kv_lora_rank": None}, "kv_lora_rank"),
    ],
)
def test_what_is_not_understood_is_refused_with_the_reason(config: dict[str, Any], why: str) -> None:
    with pytest.raises(UnknownShapeError, match=why) as refused:
        read_kv_shape(config, source="m/config.json")
    assert refused.value.message.startswith("m/config.json")
    assert refused.value.hint
