import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvortex.keys import BlockKey, Namespace, Part, WeightFile, block_key, fingerprint_weights, group_of

LLAMA = Namespace(
    model="meta-llama/Llama-3.1-8B",
    revision="0e9e39f",
    weights=(WeightFile("model.safetensors", 1000, 111),),
    dtype="float16",
    kv_cache_dtype="auto",
    kv_layout="32 layers, 8 heads, 128 wide, NHD",
    block_size=128,
    tensor_parallel=Part(0, 1),
    rope={"rope_type": "yarn", "factor": 4.0, "rope_theta": 500000.0},
    max_model_len=32768,
    hash_algorithm="sha256",
)


def changed(**values: object) -> Namespace:
    return dataclasses.replace(LLAMA, **values)  # type: ignore[arg-type]


CHANGES = {
    "the model's dtype while the KV dtype follows it": changed(dtype="bfloat16"),
    "the KV dtype": changed(kv_cache_dtype="fp8"),
    "tensor parallel size": changed(tensor_parallel=Part(0, 2)),
    "block size": changed(block_size=64),
    "weights at the same path": changed(weights=(WeightFile("model.safetensors", 1000, 222),)),
    "the RoPE factor": changed(rope={**LLAMA.rope, "factor": 8.0}),
    "max_model_len": changed(max_model_len=131072),
    "the revision": changed(revision="aaaaaaa"),
    "the rank": changed(tensor_parallel=Part(1, 2)),
    "which parallelism": changed(pipeline_parallel=Part(1, 2)),
    "the hash": changed(hash_algorithm="sha256_cbor"),
    "the layout": changed(kv_layout="32 layers, 8 heads, 128 wide, HND"),
    "quantization": changed(quantization="awq"),
    "speculative decoding": changed(speculative="eagle"),
    "KVortex's format": changed(format_version=LLAMA.format_version + 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_one_thing_is_another_namespace(change: str) -> None:
    assert CHANGES[change].digest() != LLAMA.digest()


def test_no_two_changes_meet() -> None:
    digests = [namespace.digest() for namespace in [LLAMA, *CHANGES.values()]]
    assert len(set(digests)) == len(digests)


def test_every_field_counts() -> None:
    for field in dataclasses.fields(Namespace):
        other = {"x": 1} if field.name == "rope" else ("another", getattr(LLAMA, field.name))
        assert changed(**{field.name: other}).digest() != LLAMA.digest(), field.name


def test_an_unchanged_restart_is_the_same_namespace() -> None:
    twin = dataclasses.replace(LLAMA, rope=dict(reversed(list(LLAMA.rope.items()))))
    assert twin.digest() == LLAMA.digest()
    assert len(LLAMA.digest()) == 32


def test_text_that_moves_between_fields_does_not_collide() -> None:
    splits = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), ('a","revision":"b', "c"), ("a,b", "c")]
    digests = {changed(model=model, revision=revision).digest() for model, revision in splits}
    assert len(digests) == len(splits)


def test_a_number_and_its_text_do_not_collide() -> None:
    factors: list[object] = [4, "4", 4.0, [4], None, "null", True]
    digests = {changed(rope={"factor": factor}).digest() for factor in factors}
    assert len(digests) == len(factors)


@pytest.mark.parametrize("seed", [None, "0", "1", "random"])
def test_digests_are_equal_in_every_process(seed: str | None) -> None:
    program = (
        "from kvortex.keys import *\n"
        f"values = {_arguments()}\n"
        "for rank in range(2): print(Namespace(**values, tensor_parallel=Part(rank, 2)).digest().hex())"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    ranks = [changed(tensor_parallel=Part(rank, 2)).digest().hex() for rank in range(2)]
    assert answer.stdout.split() == ranks
    assert ranks[0] != ranks[1]


def _arguments() -> str:
    values = {f.name: getattr(LLAMA, f.name) for f in dataclasses.fields(LLAMA) if f.name != "tensor_parallel"}
    return "{" + ", ".join(f"{name!r}: {value!r}" for name, value in values.items()) + "}"


def test_new_weights_at_a_path_change_its_fingerprint(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1234")
    os.utime(weights, ns=(0, 1))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("not weights")
    before = fingerprint_weights(tmp_path)
    assert [file.name for file in before] == ["config.json", "model.safetensors"]
    assert fingerprint_weights(tmp_path) == before

    weights.write_bytes(b"4321")  # as many bytes as before
    os.utime(weights, ns=(0, 2))
    assert fingerprint_weights(tmp_path) != before


def test_one_weight_file_has_a_fingerprint(tmp_path: Path) -> None:
    file = tmp_path / "model.Q4.gguf"
    file.write_bytes(b"123")
    os.utime(file, ns=(5, 5))
    assert fingerprint_weights(file) == (WeightFile("model.Q4.gguf", 3, 5),)


def test_a_name_on_a_hub_has_no_weights(tmp_path: Path) -> None:
    assert fingerprint_weights(tmp_path / "org" / "model") == ()


def test_a_key_is_the_whole_hash_and_the_group() -> None:
    block_hash = bytes(range(32))
    key = block_key(block_hash, 258)
    assert key == block_hash + b"\x00\x00\x01\x02"
    assert group_of(key) == 258


def test_one_hash_in_two_groups_is_two_keys() -> None:
    keys = {block_key(bytes([i]) * 32, group) for i, group in itertools.product(range(3), range(3))}
    assert len(keys) == 9


def test_a_hash_too_short_to_be_safe_is_no_key() -> None:
    with pytest.raises(AssertionError, match="8 bytes"):
        block_key(bytes(8), 0)
    assert isinstance(BlockKey(block_key(bytes(16), 0)), bytes)
