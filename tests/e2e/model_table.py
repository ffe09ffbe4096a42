"""Models and features as they are tested: the tests run these rows, docs/models.md prints them.

Plain data: nothing here imports torch or vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Model:
    """A kind of model that is served.

    Attributes:
        family: a tiny checkpoint of `tiny_models.FAMILIES`.
        attention: what its layers keep, in the page's words.
        options: of its engine, beside the usual ones.
        caching_forced: the test turns prefix caching on again after vLLM's CPU build has turned it off.
        long: run only with KVORTEX_TEST_ALL_MODELS=1.
        note: for the page.
    """

    name: str
    family: str
    attention: str
    options: dict[str, Any] = field(default_factory=dict)
    caching_forced: bool = False
    long: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """A kind of model, or a way to run one, that is refused at start.

    Attributes:
        message: the refusal's first line.
        by_vllm: it is vLLM's, with or without KVortex.
        cpus: what a processor may have so that it is served after all, as `test_models.HAS` knows it.
    """

    name: str
    family: str
    attention: str
    message: str
    options: dict[str, Any] = field(default_factory=dict)
    by_vllm: bool = False
    cpus: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of vLLM.

    Attributes:
        served: how, in the page's words.
        test: the file and function that show it.
        long: run only with KVORTEX_TEST_ALL_MODELS=1.
    """

    name: str
    served: str
    test: str
    long: bool = False


SEVERAL_GROUPS = {"num_blocks": 80}

MODELS = (
    Model("Llama", "llama", "full"),
    Model("Mistral", "mistral", "full"),
    Model("Mistral v0.1", "mistral-sliding", "sliding window in every layer"),
    Model("Qwen2", "qwen2", "full"),
    Model("Qwen3", "qwen3", "full"),
    Model("GPT-NeoX", "gpt-neox", "full"),
    Model("Falcon", "falcon", "full, one KV head"),
    Model("Falcon with ALiBi", "falcon-alibi", "full", long=True),
    Model("Gemma 3", "gemma-hybrid", "sliding windows and full, two KV groups", SEVERAL_GROUPS),
    Model("gpt-oss", "gpt-oss", "sliding windows and full, with sinks; experts", SEVERAL_GROUPS, long=True),
    Model("Mixtral", "mixtral", "full; mixture of experts"),
    Model("Qwen3-MoE", "qwen3-moe", "full; mixture of experts", long=True),
    Model(
        "DeepSeek-V2",
        "deepseek",
        "multi-head latent",
        {"num_blocks": 80, "block_size": 16},
        caching_forced=True,
        note="to what vLLM's own prefix cache gives; the test turns that on, vLLM's CPU build turns it off without AMX",
    ),
)
"""Greedy text and log-probabilities with KVortex are those without it, through eviction from VRAM and load from RAM."""

CACHING_OFF = "KVortex finds blocks by vLLM's prefix hashes, and prefix caching is off"

REFUSED = (
    Refused("Falcon-H1", "falcon-h1", "full, with Mamba layers", "KVortex cannot restore the KV of MambaSpec layers"),
    Refused(
        "Llama 4",
        "llama4",
        "full and in chunks",
        "KVortex cannot restore the KV of ChunkedLocalAttentionSpec layers",
        {"num_blocks": 180},
    ),
    Refused(
        "BERT",
        "bert",
        "encoder",
        "KVortex has nothing to keep: this model has no KV cache",
        {"runner": "pooling", "max_model_len": 512},
    ),
    Refused(
        "DeepSeek-V2 as vLLM's CPU build runs it",
        "deepseek",
        "multi-head latent",
        CACHING_OFF,
        {"num_blocks": 80, "block_size": 16},
        cpus="amx",
        note='vLLM: "MLA is enabled on a non-GPU platform; forcing chunked prefill and prefix caching to be disabled."',
    ),
    Refused(
        "any model with `kv_cache_dtype: fp8`",
        "llama",
        "full, FP8",
        "FP8 KV cache on CPU requires x86 with AVX-512 or AMX.",
        {"kv_cache_dtype": "fp8"},
        by_vllm=True,
        cpus="avx512",
        note="where the processor has them, the test wants the same as of the models above; not run so far",
    ),
)

ANSWERS = "tests/e2e/test_features.py::test_answers_are_equal_through_eviction_and_load"
DRAFTED = "tests/e2e/test_speculation.py::test_drafted_answers_are_equal_through_eviction_and_load"

FEATURES = (
    Feature("chunked prefill, of a prompt and of what follows a hit", "equal", ANSWERS),
    Feature("LoRA adapter", "equal; its blocks are its own", ANSWERS),
    Feature("`n` > 1, sampled with a seed", "equal", ANSWERS),
    Feature("beam search", "equal", ANSWERS),
    Feature("structured output", "equal", ANSWERS),
    Feature("`cache_salt`", "equal; found under the same salt only", ANSWERS),
    Feature("preemption", "equal", ANSWERS),
    Feature(
        "`prompt_logprobs`",
        "equal and complete: every position is computed, nothing is loaded",
        "tests/e2e/test_features.py::test_prompt_log_probabilities_are_complete_and_equal",
    ),
    Feature("speculative decoding with a drafting model", "equal, and as many drafts are kept", DRAFTED),
    Feature("speculative decoding by n-grams", "equal, and as many drafts are kept", DRAFTED, long=True),
    Feature(
        "pooling: embeddings of a decoder's last token",
        "equal",
        "tests/e2e/test_pooling.py::test_embeddings_are_equal_through_eviction_and_load",
    ),
    Feature(
        "pooling: embeddings of each token",
        "equal and complete: every position is computed, nothing is loaded",
        "tests/e2e/test_pooling.py::test_embeddings_of_every_token_are_complete_and_equal",
    ),
    Feature(
        "prefix cache reset",
        "RAM is emptied too",
        "tests/e2e/test_faults.py::test_a_reset_of_vllms_prefix_cache_empties_ram_too",
    ),
    Feature(
        "sleep mode",
        "RAM is emptied too, as with a reset; vLLM's CPU build frees nothing (\"sleep mode is not supported on CPU, "
        'ignore it.") and refuses `--enable-sleep-mode`',
        "tests/e2e/test_features.py::test_sleep_forgets_what_ram_holds",
    ),
)
