"""Keys and namespaces differ whenever bytes would, made from vLLM's own requests and configurations."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvortex.cache.prefix import GroupShape
from kvortex.keys import COLLISION_RESISTANT, BlockKey

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed")
    compat = importlib.import_module("kvortex.vllm_plugin.compat")
    connector = importlib.import_module("kvortex.vllm_plugin.connector")
    setup = importlib.import_module("kvortex.vllm_plugin.setup")
    hashing = importlib.import_module("vllm.utils.hashing")
    kv_cache_utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    kv_cache_interface = importlib.import_module("vllm.v1.kv_cache_interface")
    inputs = importlib.import_module("vllm.multimodal.inputs")
    lora = importlib.import_module("vllm.lora.request")
    arg_utils = importlib.import_module("vllm.engine.arg_utils")
    vllm_request = importlib.import_module("vllm.v1.request")
    sampling = importlib.import_module("vllm.sampling_params")

BLOCK = 16
TOKENS = list(range(100, 100 + 4 * BLOCK))
GROUP = GroupShape(0, BLOCK)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    before = getattr(kv_cache_utils, "NONE_HASH", None)
    kv_cache_utils.init_none_hash(hashing.sha256)
    yield
    if before is not None:
        kv_cache_utils.NONE_HASH = before


def keys(
    tokens: list[int] | None = TOKENS,
    *,
    images: list[tuple[str, int]] | None = None,
    algorithm: str = "sha256",
    group: GroupShape = GROUP,
    **fields: Any,
) -> list[BlockKey]:
    """Of a request's complete blocks. `images`: hash and first token of each, of 8 tokens."""
    features = [
        inputs.MultiModalFeatureSpec(
            data=None, modality="image", identifier=identifier, mm_position=inputs.PlaceholderRange(offset, 8)
        )
        for identifier, offset in images or ()
    ]
    request = vllm_request.Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=sampling.SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=features or None,
        block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK, hashing.get_hash_fn_by_name(algorithm)),
        **fields,
    )
    return list(compat.request_keys(request, group, BLOCK))


def adapter(name: str, path: str = "/a") -> Any:
    return lora.LoRARequest(lora_name=name, lora_int_id=1, lora_path=path)


# ---- images


def test_no_two_images_share_a_key_however_alike_their_hashes_are() -> None:
    """Field trial B10: 5,000 images behind one question, and pairs whose hashes agree at either end."""
    names = [f"{number:060x}beef" for number in range(4900)]
    for number in range(50):
        names += [f"beef{number:060x}", f"{number:064x}"]
    assert len(set(names)) == 5000
    seen: set[BlockKey] = set()
    for name in names:
        found = keys(images=[(name, BLOCK + 2)])
        assert found[0] == keys(TOKENS[:BLOCK])[0], "the block before the image is every request's"
        assert not seen.intersection(found[1:])
        seen.update(found[1:])
    assert len(seen) == 5000 * 3
    assert {len(key) for key in seen} == {32 + 4}, "the whole hash and the group"


def test_an_image_at_another_place_and_in_another_order_is_another_key() -> None:
    placed = [
        keys(images=[("a", BLOCK), ("b", BLOCK + 8)]),
        keys(images=[("b", BLOCK), ("a", BLOCK + 8)]),
        keys(images=[("a", BLOCK + 1), ("b", BLOCK + 9)]),
        keys(images=[("a", BLOCK)]),
        keys(images=[("b", BLOCK + 8)]),
        keys(),
    ]
    assert len({tuple(found) for found in placed}) == len(placed)
    assert len({found[1] for found in placed}) == len(placed)


# ---- what else makes bytes differ


def test_whatever_makes_bytes_differ_makes_every_key_differ() -> None:
    embeds = torch.arange(len(TOKENS) * 4, dtype=torch.float32).reshape(len(TOKENS), 4)
    other = embeds.clone()
    other[0, 0] += 1
    found = {
        "plain": keys(),
        "another first token": keys([1, *TOKENS[1:]]),
        "an adapter": keys(lora_request=adapter("a")),
        "another adapter": keys(lora_request=adapter("b")),
        "a salt": keys(cache_salt="a"),
        "another salt": keys(cache_salt="b"),
        "a salt that is spelled as an adapter": keys(cache_salt="/a"),
        "an adapter and a salt": keys(lora_request=adapter("a"), cache_salt="a"),
        "prompt embeddings": keys(None, prompt_embeds=embeds),
        "other prompt embeddings": keys(None, prompt_embeds=other),
        "another algorithm": keys(algorithm="sha256_cbor"),
        "another KV group": keys(group=GroupShape(1, BLOCK)),
        "the same blocks, one further on": [*keys([*range(BLOCK), *TOKENS])[1:]],
    }
    for place in range(4):
        at = {name: each[place] for name, each in found.items()}
        assert len(set(at.values())) == len(at), (place, at)


def test_prompt_embeddings_that_differ_in_the_last_block_alone_share_those_before() -> None:
    embeds = torch.arange(len(TOKENS) * 4, dtype=torch.float32).reshape(len(TOKENS), 4)
    other = embeds.clone()
    other[-1, -1] += 1
    one, two = keys(None, prompt_embeds=embeds), keys(None, prompt_embeds=other)
    assert (one[:3] == two[:3], one[3] == two[3]) == (True, False)


def test_a_hint_finds_the_keys_of_the_request_it_speaks_of() -> None:
    for salt in (None, "a"):
        assert compat.prompt_keys(TOKENS, salt, GROUP, BLOCK, "sha256") == keys(cache_salt=salt)


# ---- hashes


@pytest.mark.parametrize("seed", [None, "0", "random"])
def test_one_process_finds_what_it_stored_whatever_its_seed(seed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field trial B66. Keys are made and used in one process, the engine's; no key outlives it."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    kv_cache_utils.init_none_hash(hashing.sha256)
    assert keys() == keys() == compat.prompt_keys(TOKENS, None, GROUP, BLOCK, "sha256")


@pytest.mark.skipif("FUZZ_EXAMPLES" not in os.environ, reason="three more imports of vLLM: with FUZZ_EXAMPLES set")
def test_keys_of_fresh_processes_are_equal_where_their_seeds_are() -> None:
    """Field trial B66."""
    program = (
        "import sys; sys.path.insert(0, '.'); from tests.unit.vllm_plugin import test_identity as t;"
        "t.kv_cache_utils.init_none_hash(t.hashing.sha256); print([k.hex() for k in t.keys()])"
    )

    def printed(seed: str | None) -> str:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"} | (
            {} if seed is None else {"PYTHONHASHSEED": seed}
        )
        return subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=200
        ).stdout.splitlines()[-1]

    answers = {seed: printed(seed) for seed in (None, "0", "random")}
    assert answers[None] == str([key.hex() for key in keys()])
    assert len(set(answers.values())) == 3, "vLLM mixes the seed in where it is set"
    assert printed("0") == answers["0"]


def test_a_hash_that_can_be_made_to_collide_is_warned_of() -> None:
    """Field trial B66: every one that vLLM offers is known to be safe, or warned of."""
    offered = set(importlib.import_module("typing").get_args(_offered()))
    assert {"sha256", "sha256_cbor"} <= offered
    assert offered - COLLISION_RESISTANT == {name for name in offered if "xxhash" in name}
    assert "another user's request" in connector.UNSAFE_HASH % "xxhash"


def _offered() -> Any:
    return importlib.import_module("vllm.config.cache").PrefixCachingHashAlgo


# ---- namespaces


SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def digest(folder: Path, **options: Any) -> bytes:
    """Of an engine's namespace, as the connector makes it."""
    arguments = {"model": str(folder), "skip_tokenizer_init": True, "block_size": 128, "enforce_eager": True, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = arg_utils.EngineArgs(**arguments).create_engine_config()
    heads = 2 // config.parallel_config.tensor_parallel_size
    dtype = torch.uint8 if config.cache_config.cache_dtype.startswith("fp8") else config.model_config.dtype
    spec = kv_cache_interface.FullAttentionSpec(
        block_size=config.cache_config.block_size, num_kv_heads=heads, head_size=32, dtype=dtype
    )
    group = SimpleNamespace(layer_names=["0", "1"], kv_cache_spec=spec)
    return bytes(setup._namespace(config, SimpleNamespace(kv_cache_groups=[group])).digest())


CHANGES: dict[str, dict[str, Any]] = {
    "dtype, with the KV dtype following it": {"dtype": "bfloat16"},
    "KV dtype": {"kv_cache_dtype": "fp8"},
    "tensor parallel size": {"tensor_parallel_size": 2},
    "block size": {"block_size": 64},
    "RoPE": {"hf_overrides": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}}},
    "longest prompt": {"max_model_len": 2048},
    "a part of the configuration that has no place of its own": {"hf_overrides": {"rms_norm_eps": 1e-3}},
    "hash": {"prefix_caching_hash_algo": "sha256_cbor"},
    "revision": {"revision": "abc"},
}


def test_an_unchanged_restart_is_one_namespace_and_each_change_another(folder: Path) -> None:
    """Field trial B12. Nothing outlives an engine yet: what does some day is found inside its namespace alone."""
    plain = digest(folder)
    assert digest(folder) == plain
    found = {name: digest(folder, **options) for name, options in CHANGES.items()}
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    found["weights at the same path"] = digest(folder)
    assert plain not in found.values(), [name for name, each in found.items() if each == plain]
    assert len(set(found.values())) == len(found)
