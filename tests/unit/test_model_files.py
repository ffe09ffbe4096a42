"""Where a model's config.json is found, and what each way of not finding it is called."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvortex.model_files import ModelUnavailableError, Reason, read_model_files
from tests.fakes.hub import WEIGHT_BYTES, fake_hub

SECRET = "hf_TESTSECRET"


def test_a_directory_gives_its_configuration_and_the_size_of_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_model_files(str(tmp_path)).weight_bytes is None
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "consolidated.safetensors").write_bytes(b"x" * 1000)
    files = read_model_files(str(tmp_path))
    assert files.config == {"model_type": "llama"}
    assert files.weight_bytes == 1000


def test_sharded_weights_are_known_when_every_shard_is_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (tmp_path / "model-1.safetensors").write_bytes(b"x" * 10)
    assert read_model_files(str(tmp_path)).weight_bytes is None
    (tmp_path / "model-2.safetensors").write_bytes(b"x" * 20)
    assert read_model_files(str(tmp_path)).weight_bytes == 30


@pytest.mark.parametrize(
    "weight_map",
    [{"w": "../secret"}, {"w": "/etc/passwd"}, {"w": "a/../../secret"}, ["secret"], {"w": [1]}, {"w": None}, 7],
)
def test_an_index_that_names_other_files_than_the_model_s_own_is_not_followed(
    tmp_path: Path, weight_map: object
) -> None:
    """Field trial B65."""
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "secret").write_bytes(b"1234")
    (model / "config.json").write_text("{}")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert read_model_files(str(model)).weight_bytes is None


def test_the_kv_dtype_of_a_quantised_checkpoint_s_second_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"kv_cache_quant_algo": "FP8"}}')
    quantization = read_model_files(str(tmp_path)).config["quantization_config"]
    assert quantization["quantization"]["kv_cache_quant_algo"] == "FP8"


@pytest.mark.parametrize(
    ("text", "why"), [(None, "has no config.json"), ("{", "cannot be read"), ("[]", "is no JSON object")]
)
def test_a_directory_without_a_readable_configuration_is_named(tmp_path: Path, text: str | None, why: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelUnavailableError, match=why):
        read_model_files(str(tmp_path))


@pytest.mark.parametrize("model", ["/no/such/directory", "./nowhere", "a/b/c"])
def test_a_path_that_is_not_there_is_not_asked_of_the_hub(model: str) -> None:
    with pytest.raises(ModelUnavailableError, match="no directory on this machine"):
        read_model_files(model)


def test_a_single_file_has_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"")
    with pytest.raises(ModelUnavailableError, match="single file"):
        read_model_files(str(path))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    constants = pytest.importorskip("huggingface_hub.constants")
    with fake_hub() as running:
        template = f"{running.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield


@pytest.mark.parametrize(
    ("model", "token", "why", "reason"),
    [
        ("o/code-401", False, "no public repository", Reason.NO_TOKEN),
        ("o/code-401", True, "refused the Hugging Face token", Reason.BAD_TOKEN),
        ("o/gated-401", False, "gated, and there is no Hugging Face token", Reason.NO_TOKEN),
        ("o/gated-403", True, "has no access", Reason.NO_ACCESS),
        ("o/code-404", False, "has no repository", Reason.NOT_FOUND),
        ("o/code-429", False, "too many requests", Reason.NO_NETWORK),
        ("o/code-503", False, "answers 503", Reason.NO_NETWORK),
    ],
)
def test_each_refusal_of_the_hub_has_its_own_message_and_none_shows_the_token(
    hub: None, monkeypatch: pytest.MonkeyPatch, model: str, token: bool, why: str, reason: Reason
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", SECRET)
    with pytest.raises(ModelUnavailableError, match=why) as refused:
        read_model_files(model)
    assert refused.value.reason is reason
    assert SECRET not in str(refused.value)


def test_offline_is_told_apart_from_absent(hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelUnavailableError, match="HF_HUB_OFFLINE is set"):
        read_model_files("o/code-200")


def test_a_name_that_is_no_name_is_refused(hub: None) -> None:
    with pytest.raises(ModelUnavailableError, match="neither a directory"):
        read_model_files("two words")


@pytest.mark.parametrize(
    ("model", "weights"), [("o/llama-200", WEIGHT_BYTES), ("o/shards-200", WEIGHT_BYTES), ("o/other-200", None)]
)
def test_weights_that_are_not_here_are_asked_for_and_not_downloaded(hub: None, model: str, weights: int | None) -> None:
    assert read_model_files(model).weight_bytes is None
    assert read_model_files(model, ask_for_weights=True).weight_bytes == weights


def test_a_cached_configuration_needs_no_network(hub: None, tmp_path: Path) -> None:
    repository = tmp_path / "models--o--cached"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("abc")
    snapshot = repository / "snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "qwen2"}')
    (snapshot / "model.safetensors").write_bytes(b"x" * 7)
    files = read_model_files("o/cached")
    assert (files.config["model_type"], files.weight_bytes) == ("qwen2", 7)
