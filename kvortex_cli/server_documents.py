"""KVortex's documents of a running server, over HTTP."""

from __future__ import annotations

import json
from typing import Any, Final

from kvortex.errors import KVortexError, UsageError

DEFAULT_URL: Final = "http://localhost:8000"
TIMEOUT_S: Final = 10.0


class ServerError(KVortexError):
    """The server cannot be asked, or its answer cannot be read."""


def fetch(url: str, path: str, api_key: str | None) -> dict[str, Any]:
    """GETs one of KVortex's documents.

    Raises:
        UsageError: `url` is not an HTTP address.
        ServerError: nobody answers there, or not with what was asked for.
    """
    import httpx

    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--url {url!r} is not an address", hint=f"it looks like {DEFAULT_URL}")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = url.rstrip("/").removesuffix("/v1")
    try:
        response = httpx.get(base + path, headers=headers, timeout=TIMEOUT_S)
    except httpx.InvalidURL as error:
        raise UsageError(f"--url {url!r} is not an address: {error}") from error
    except httpx.TransportError as error:
        raise ServerError(
            f"no answer from {base}: {error}", hint="is the server up? `kvortex serve MODEL` starts one"
        ) from error
    if response.status_code == 401:
        raise ServerError(f"{base} asks for an API key", hint="give it with --api-key or VLLM_API_KEY")
    if response.status_code == 404:
        raise ServerError(
            f"{base} answers, but has no {path}",
            hint="start it with `kvortex serve`, or name kvortex and kvortex_routes in VLLM_PLUGINS",
        )
    if response.status_code != 200:
        raise ServerError(f"{base}{path} answers {response.status_code}: {_detail(response.text)}")
    try:
        document = response.json()
    except (ValueError, RecursionError) as error:
        raise ServerError(f"{base}{path} does not answer with JSON", hint="is this a vLLM server?") from error
    if not isinstance(document, dict):
        raise ServerError(f"{base}{path} answers with something else than statistics")
    return document


def _detail(body: str) -> str:
    try:
        return str(json.loads(body)["detail"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return body[:200]
