"""What a server says of itself: the model's name and its context, vLLM's version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import httpx

from kvortex.bench.request import Endpoint, message_of
from kvortex.bench.workload import Workload
from kvortex.config.redaction import redact
from kvortex.errors import KVortexError, UsageError

_DEADLINE_S: Final = 30.0
_EXAMPLE: Final = "http://localhost:8000"


class ServerUnavailableError(KVortexError):
    """The server cannot be asked, or its answer cannot be read."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """
    Attributes:
        model: as the server calls it.
        root: the path or Hub name it was loaded from; "" where the server does not tell.
        max_model_len: tokens of prompt and answer; None where the server does not tell.
        vllm: its version; "" where the server does not tell.
        kvortex: its version; "" for a server without KVortex.
    """

    model: str
    root: str
    max_model_len: int | None
    vllm: str
    kvortex: str


def read_server_facts(url: str, api_key: str | None) -> ServerFacts:
    """Asks a server. It must serve one model; a LoRA adapter beside it does not count.

    Args:
        url: without `/v1`.

    Raises:
        UsageError: `url` is not an HTTP address.
        ServerUnavailableError: nobody answers there, or not with what was asked for.
    """
    shown = str(redact("url", url))
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{shown!r} is not an address", hint=f"it looks like {_EXAMPLE}")
    endpoint = Endpoint(url, "", api_key)
    try:
        with httpx.Client(
            base_url=url, headers=endpoint.headers, timeout=_DEADLINE_S, trust_env=not endpoint.is_local
        ) as client:
            model = _first_model(client, shown)
            return ServerFacts(
                model=str(model["id"]),
                root=str(model.get("root") or ""),
                max_model_len=model.get("max_model_len"),
                vllm=_told(client, "/version", "version"),
                kvortex=_told(client, "/kvortex/stats", "kvortex"),
            )
    except httpx.InvalidURL as error:
        raise UsageError(f"{shown!r} is not an address: {error}", hint=f"it looks like {_EXAMPLE}") from error
    except httpx.RequestError as error:
        hint = "is the server up? `kvortex serve MODEL` starts one"
        raise ServerUnavailableError(f"no answer from {shown}: {error}", hint=hint) from error


def _first_model(client: httpx.Client, shown: str) -> dict[str, Any]:
    response = client.get("/v1/models")
    if response.status_code == 401:
        raise ServerUnavailableError(f"{shown} asks for an API key", hint="give it with --api-key or VLLM_API_KEY")
    if response.status_code != 200:
        message = message_of(response.text)
        raise ServerUnavailableError(f"{shown}/v1/models answers {response.status_code}: {message}")
    try:
        model: dict[str, Any] = response.json()["data"][0]
        if "id" in model:
            return model
    except (ValueError, LookupError, TypeError):
        pass
    hint = "is this an OpenAI-compatible server?"
    raise ServerUnavailableError(f"{shown}/v1/models does not name a model", hint=hint)


def _told(client: httpx.Client, path: str, field: str) -> str:
    try:
        response = client.get(path)
        return str(response.json()[field]) if response.status_code == 200 else ""
    except (httpx.RequestError, ValueError, LookupError, TypeError):
        return ""


def check_length(workload: Workload, max_model_len: int | None) -> None:
    """Raises UsageError where the server cannot take the longest conversation."""
    if max_model_len is not None and workload.longest > max_model_len:
        raise UsageError(
            f"a conversation grows to {workload.longest} tokens, and the server takes {max_model_len}",
            hint="lower --first, --add, --gen or --turns, or serve with a larger --max-model-len",
        )
