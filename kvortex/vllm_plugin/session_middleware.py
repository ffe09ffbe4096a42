"""Tells the engine which session a request belongs to, where vLLM would not. HTTP server process.

What reaches the engine of every supported vLLM is the body's `kv_transfer_params`. So the name that a client gave in
another way, and which API key it came with, are put there: a few bytes at the body's end, where the last of two equal
names counts. A body is parsed only where it names a session or brings such parameters of its own.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from starlette.datastructures import Headers, MutableHeaders

from kvortex.vllm_plugin.callers import caller_of
from kvortex.vllm_plugin.session_names import CALLER_PARAM, SESSION_PARAM

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
HEADER: Final = "x-session-id"
PARAMS: Final = "kv_transfer_params"
_NAMES: Final = (SESSION_PARAM, "prompt_cache_key")
"""Of the body, the stronger first; the header stands between them."""

_MARKERS: Final = (b"session_id", b"prompt_cache_key", PARAMS.encode())


class SessionMiddleware:
    """Adds nothing until the app's state says `kvortex_sessions`, and to no other path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            return await self._app(scope, receive, send)
        state = scope["app"].state
        if not getattr(state, "kvortex_sessions", False):
            return await self._app(scope, receive, send)
        body = await _whole_body(receive)
        if body is None:
            return None  # the client has gone
        headers = Headers(scope=scope)
        caller = caller_of(headers.get("authorization", ""), len(getattr(state, "kvortex_api_keys", ())))
        named = with_session(body, headers.get(HEADER), caller)
        if named is not body:
            MutableHeaders(scope=scope)["content-length"] = str(len(named))
        return await self._app(scope, _replayed(named, receive), send)


def with_session(body: bytes, header: str | None, caller: str) -> bytes:
    """The body with the session's name and caller among its `kv_transfer_params`; as it is where there is neither, or
    where it is no JSON object: vLLM says so better."""
    document: Any = {}
    if any(marker in body for marker in _MARKERS):
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            return body
        if not isinstance(document, dict):
            return body
    given = document.get(PARAMS)
    if given is not None and not isinstance(given, dict):
        return body
    params = dict(given or {})
    name = params.get(SESSION_PARAM) or document.get(_NAMES[0]) or header or document.get(_NAMES[1])
    if isinstance(name, str) and _is_text(name):
        params[SESSION_PARAM] = name
    if caller or CALLER_PARAM in params:
        params[CALLER_PARAM] = caller  # never the client's own word
    if params == (given or {}):
        return body
    stripped = body.strip()
    if not (stripped.startswith(b"{") and stripped.endswith(b"}")):
        return body
    comma = b"," if stripped[1:-1].strip() else b""
    return stripped[:-1] + comma + b'"' + PARAMS.encode() + b'":' + json.dumps(params).encode() + b"}"


def _is_text(name: str) -> bool:
    """Whether it can go to the engine: half a character, which JSON can spell, cannot, and fails the request there."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


async def _whole_body(receive: Receive) -> bytes | None:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    told = False

    async def replay() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
