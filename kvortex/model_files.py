"""Finds a model's `config.json` and the size of its weights: a directory, the Hugging Face cache, the Hub."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from http import HTTPStatus
from pathlib import Path
from typing import Any

from kvortex.errors import UnfitError, UsageError

_HUB_TIMEOUT_S = 5.0


class Reason(StrEnum):
    """Why a model's configuration could not be read; the same words in every release."""

    NOT_FOUND = "not_found"
    """No such directory on this machine, or no such public repository or revision on the Hub."""
    NO_TOKEN = "no_token"
    """It is gated or private, and there is no token."""
    NO_ACCESS = "no_access"
    """It is gated, and the token's account has no access."""
    BAD_TOKEN = "bad_token"
    """The Hub refused the token, or there is no such repository."""
    OFFLINE = "offline"
    """Not on this machine, and HF_HUB_OFFLINE is set."""
    NO_NETWORK = "no_network"
    """Not on this machine, and the Hub does not answer, or not now."""
    NO_CONFIG = "no_config"
    """It is there, and its config.json is not, or cannot be read."""


class ModelUnavailableError(UnfitError):
    """The model's configuration could not be read: not there, no access, or no network.

    Args:
        is_absent: there is no such model, as far as who asks can see: the name is wrong, and nothing else is.
    """

    def __init__(self, message: str, reason: Reason, *, hint: str | None = None, is_absent: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason
        self.is_absent = is_absent
        if is_absent:
            self.exit_code = UsageError.exit_code


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What is known of a model without loading it.

    Attributes:
        config: the parsed `config.json`.
        source: what messages call the place it was read from.
        weight_bytes: bytes of the weights; None when they are not on this machine and the Hub was not asked.
    """

    config: Mapping[str, Any]
    source: str
    weight_bytes: int | None


def read_model_files(
    model: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache: str | None = None,
    ask_for_weights: bool = False,
) -> ModelFiles:
    """Reads `config.json` of a local directory or of a Hub repository, downloading no other file.

    Args:
        token: for the Hub; None is HF_TOKEN, or the one that is stored.
        cache: directory of downloaded models; None is the Hub client's own.
        ask_for_weights: asks the Hub how large weights are that are not on this disk.

    Raises:
        ModelUnavailableError: says which of these it is: no such directory, no such repository, no token, no
            access, offline, no network.
    """
    path = Path(os.path.expanduser(model))  # noqa: PTH111 - pathlib's raises for a user that is not there
    if path.is_dir():
        return _read_directory(path)
    require_path(model)
    if _is_address(model):
        raise ModelUnavailableError(
            f"{model} is an address that only vLLM reads", Reason.NO_CONFIG, hint="size ram_cache_size by hand"
        )
    if path.is_file() or model.lower().endswith(".gguf"):
        raise ModelUnavailableError(
            f"{model} is a single file; only a model directory or a Hub name has a config.json to read",
            Reason.NO_CONFIG,
            hint="give the directory of the original model, or size ram_cache_size by hand",
        )
    files = _read_directory(_hub_config(model, revision, token, cache).parent)
    if files.weight_bytes is None and ask_for_weights:
        files = replace(files, weight_bytes=_hub_weight_bytes(model, revision, token, cache))
    return files


def require_path(model: str) -> None:
    """Asks nobody.

    Raises:
        ModelUnavailableError: it can be nothing but a path, and there is nothing.
    """
    is_path = model.startswith(("/", ".", "~")) or (model.count("/") > 1 and not model.lower().endswith(".gguf"))
    if is_path and not _is_address(model) and not os.path.exists(os.path.expanduser(model)):  # noqa: PTH110, PTH111
        raise ModelUnavailableError(
            f"{model} is no directory on this machine, and no Hub name (owner/name) either",
            Reason.NOT_FOUND,
            hint="check the path, or give owner/name",
            is_absent=True,
        )


def _is_address(model: str) -> bool:
    """`s3://bucket/model`."""
    return "://" in model


def _read_directory(directory: Path) -> ModelFiles:
    path = directory / "config.json"
    config = _read_json(path)
    # NVIDIA's own quantised checkpoints keep the KV dtype in a second file, which vLLM reads too.
    quantised = directory / "hf_quant_config.json"
    if "quantization_config" not in config and quantised.is_file():
        config = {**config, "quantization_config": _read_json(quantised)}
    return ModelFiles(config, str(path), _weight_bytes(directory))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelUnavailableError(f"{path.parent} has no {path.name}", Reason.NO_CONFIG) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnavailableError(f"{path} cannot be read: {error}", Reason.NO_CONFIG) from None
    if not isinstance(parsed, dict):
        raise ModelUnavailableError(f"{path} is no JSON object", Reason.NO_CONFIG)
    return parsed


def _weight_bytes(directory: Path) -> int | None:
    """Bytes of the safetensors weights, once each; None when they are not all there."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        shards = _read_json(index).get("weight_map")
        if not isinstance(shards, dict):
            return None
        names = {Path(str(shard)) for shard in shards.values()}
        if any(name.is_absolute() or ".." in name.parts for name in names):
            return None  # not the model's own files
        files = [directory / name for name in sorted(names)]
    else:
        # A consolidated.safetensors beside this one would be the same weights again.
        files = [directory / "model.safetensors"]
    if not files or not all(file.is_file() for file in files):
        return None
    return sum(file.stat().st_size for file in files)


def _hub_config(model: str, revision: str | None, token: str | None, cache: str | None) -> Path:
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        raise ModelUnavailableError(
            f"{model} is no directory on this machine, and huggingface_hub is not installed to look it up",
            Reason.NO_CONFIG,
            hint="install vLLM or huggingface_hub, or give a local model directory",
        ) from None
    try:
        cached = try_to_load_from_cache(model, "config.json", cache_dir=cache, revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        # hf_hub_download alone retries for up to minutes what this one request shows in seconds.
        url = hf_hub_url(model, "config.json", revision=revision)
        get_hf_file_metadata(url, timeout=_HUB_TIMEOUT_S, token=token)
        disable_progress_bars()
        found = hf_hub_download(
            model, "config.json", revision=revision, etag_timeout=_HUB_TIMEOUT_S, token=token, cache_dir=cache
        )
        return Path(found)
    except HFValidationError:
        raise ModelUnavailableError(
            f"{model!r} is neither a directory on this machine nor a Hub name (owner/name)", Reason.NO_CONFIG
        ) from None
    except Exception as error:  # noqa: BLE001 - the one edge at which the Hub client's errors are translated
        raise _translated(model, revision, error, has_token=token is not None) from None


def _hub_weight_bytes(model: str, revision: str | None, token: str | None, cache: str | None) -> int | None:
    """Bytes of a repository's safetensors weights, without downloading them; None where the Hub does not tell."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    try:
        url = hf_hub_url(model, "model.safetensors", revision=revision)
        return get_hf_file_metadata(url, timeout=_HUB_TIMEOUT_S, token=token).size
    except Exception as error:  # noqa: BLE001 - the Hub client's errors are told apart at this edge
        if _status(error) != HTTPStatus.NOT_FOUND:
            return None
    try:
        index = "model.safetensors.index.json"
        path = hf_hub_download(
            model, index, revision=revision, etag_timeout=_HUB_TIMEOUT_S, token=token, cache_dir=cache
        )
        size = _read_json(Path(path)).get("metadata", {}).get("total_size")
    except Exception:  # noqa: BLE001 - neither file: other weights, whose size nothing tells
        return None
    return size if isinstance(size, int) else None


def _translated(model: str, revision: str | None, error: Exception, *, has_token: bool) -> ModelUnavailableError:
    """What a failure of the Hub client means to the user; never its own text, which may hold a token."""
    chain = list(_causes(error))
    names = {type(cause).__name__ for cause in chain}
    status = next((code for cause in chain if (code := _status(cause)) is not None), None)
    token = has_token or bool(os.environ.get("HF_TOKEN")) or _has_stored_token()
    at = f" at revision {revision}" if revision else ""
    if "OfflineModeIsEnabled" in names:
        return ModelUnavailableError(
            f"{model}{at} is not in the Hugging Face cache, and HF_HUB_OFFLINE is set",
            Reason.OFFLINE,
            hint="unset HF_HUB_OFFLINE, or download the model on this machine first",
        )
    if "RevisionNotFoundError" in names:
        return ModelUnavailableError(
            f"{model} has no revision {revision}", Reason.NOT_FOUND, hint="check its name", is_absent=True
        )
    if "GatedRepoError" in names or status == 403:
        if token:
            return ModelUnavailableError(
                f"{model} is gated, and the account of the token in use has no access to it",
                Reason.NO_ACCESS,
                hint=f"ask for access at https://huggingface.co/{model}",
            )
        return ModelUnavailableError(
            f"{model} is gated, and there is no Hugging Face token",
            Reason.NO_TOKEN,
            hint="set HF_TOKEN, or `hf auth login`",
        )
    if status == 401:
        if token:
            return ModelUnavailableError(
                f"the Hub refused the Hugging Face token for {model}, or there is no such repository",
                Reason.BAD_TOKEN,
                hint="check the name and HF_TOKEN",
            )
        return ModelUnavailableError(
            f"the Hub has no public repository {model}, and there is no Hugging Face token for a private one",
            Reason.NO_TOKEN,
            hint="check the name; for a private model set HF_TOKEN, or `hf auth login`",
            is_absent=True,
        )
    if "EntryNotFoundError" in names or "RemoteEntryNotFoundError" in names:
        return ModelUnavailableError(f"the repository {model}{at} has no config.json", Reason.NO_CONFIG)
    if status == 404:
        return ModelUnavailableError(
            f"the Hub has no repository {model}", Reason.NOT_FOUND, hint="check the name", is_absent=True
        )
    if status == 429:
        return ModelUnavailableError(
            "the Hub answers 429, too many requests",
            Reason.NO_NETWORK,
            hint="wait, or set HF_TOKEN for a higher limit",
        )
    if status is not None:
        return ModelUnavailableError(f"the Hub answers {status} for {model}", Reason.NO_NETWORK, hint="try again later")
    return ModelUnavailableError(
        f"{model}{at} is not in the Hugging Face cache, and the Hub cannot be reached ({type(chain[-1]).__name__})",
        Reason.NO_NETWORK,
        hint="check the network, HF_ENDPOINT and the proxy, or give a local model directory",
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _has_stored_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None
