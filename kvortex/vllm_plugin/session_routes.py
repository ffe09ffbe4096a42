"""`POST /kvortex/prefetch` and `GET /kvortex/sessions`. HTTP server process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import httpx
from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvortex.cache.sessions.line import MOST_SESSIONS
from kvortex.vllm_plugin.callers import caller_of
from kvortex.vllm_plugin.stats_socket import StatsUnavailableError
from kvortex.vllm_plugin.waker import wake

if TYPE_CHECKING:
    from kvortex.vllm_plugin.engines import Engines

MOST_BODY_BYTES: Final = 4 << 20
MOST_TOKENS: Final = 400_000
_LARGEST_TOKEN: Final = 2**31 - 1
_MOST_FAULTS: Final = 3
_MOST_OF_A_PLACE: Final = 100
_MOST_CHARACTERS: Final = 300

TokenId = Annotated[int, Field(ge=0, le=_LARGEST_TOKEN, strict=True)]


class PrefetchHint(BaseModel):
    """What is about to be asked for: a session by its name, or the beginning of a prompt."""

    model_config = ConfigDict(extra="forbid")

    session: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=10_000)] | None = None
    prompt: str | Annotated[list[TokenId], Field(max_length=MOST_TOKENS)] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=4096)] | None = None

    @model_validator(mode="after")
    def _is_one_thing(self) -> PrefetchHint:
        if sum(part is not None for part in (self.session, self.messages, self.prompt)) != 1:
            raise ValueError('give one of "session", "messages" and "prompt"')
        return self


def make_session_router(check_api_key: Callable[..., None], engines_of: Callable[[Request], Engines]) -> APIRouter:
    """The routes, behind the same key as `/v1`."""
    router = APIRouter(prefix="/kvortex", dependencies=[Depends(check_api_key)], tags=["kvortex"])

    # The body is read here and not by FastAPI, which would read one of any size.
    body = {"required": True, "content": {"application/json": {"schema": PrefetchHint.model_json_schema()}}}

    @router.post("/prefetch", status_code=202, openapi_extra={"requestBody": body})
    async def prefetch(request: Request) -> dict[str, Any]:
        """Has the blocks of what is about to be asked for brought back to VRAM, where there is room for them."""
        engines = engines_of(request)
        hint = await _read_hint(request)
        tokens = await _tokens_of(request, hint)
        if tokens is not None and len(tokens) > MOST_TOKENS:
            raise HTTPException(413, f"the prompt has {len(tokens)} tokens, more than {MOST_TOKENS}")
        try:
            found = await run_in_threadpool(engines.hint, hint.session, tokens, hint.cache_salt, _caller(request))
        except StatsUnavailableError as error:
            raise HTTPException(503, error.message) from error
        if not found.pop("enabled"):
            raise HTTPException(409, "this server does not prefetch: kv_cache.prefetch_enabled is false, or its model")
        if not found["accepted"]:
            raise HTTPException(429, "too many hints wait already", headers={"Retry-After": "1"})
        there = found["vram_blocks"] or found["ram_blocks"]  # to be kept, or brought
        if there and (engine_client := request.app.state.kvortex_engine_client) is not None:
            await wake(engine_client)
        return found

    @router.get("/sessions")
    async def sessions(request: Request, top: Annotated[int, Query(ge=1, le=MOST_SESSIONS)] = 20) -> dict[str, Any]:
        """The conversations heard of last, and what became of their blocks. With several API keys, the asker's own."""
        engines = engines_of(request)
        try:
            return await run_in_threadpool(engines.sessions, top, _caller(request) or None)
        except StatsUnavailableError as error:
            raise HTTPException(503, error.message) from error

    return router


def _caller(request: Request) -> str:
    return caller_of(request.headers.get("authorization", ""), len(request.app.state.kvortex_api_keys))


async def _read_hint(request: Request) -> PrefetchHint:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY_BYTES:
            raise HTTPException(413, f"the body is larger than {MOST_BODY_BYTES} bytes")
    try:
        return PrefetchHint.model_validate_json(bytes(body))
    except ValidationError as invalid:
        faults = invalid.errors(include_url=False, include_input=False, include_context=False)[:_MOST_FAULTS]
        places = [".".join(map(str, fault["loc"]))[:_MOST_OF_A_PLACE] or "the body" for fault in faults]
        said = "; ".join(f"{place}: {fault['msg']}" for place, fault in zip(places, faults, strict=True))
        # Text: what vLLM's server makes of a refusal can say nothing else.
        raise HTTPException(422, said) from invalid


async def _tokens_of(request: Request, hint: PrefetchHint) -> list[int] | None:
    """The token ids of the hint's prompt, as the server's own tokenizer has them; None for a session."""
    if hint.session is not None:
        return None
    if isinstance(hint.prompt, list):
        return hint.prompt
    given = {"messages": hint.messages, "tools": hint.tools, "chat_template_kwargs": hint.chat_template_kwargs}
    asked: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    # Where the answer will begin, nothing is known yet.
    asked |= {"prompt": hint.prompt} if hint.messages is None else {"add_generation_prompt": False}
    try:
        body = json.dumps(asked, allow_nan=False)
    except ValueError:
        raise HTTPException(422, "NaN and Infinity are no numbers of JSON") from None
    # What vLLM cannot tokenize is the hint's fault, also where vLLM fails of it.
    transport = httpx.ASGITransport(app=request.app, raise_app_exceptions=False)
    headers = {"Content-Type": "application/json"}
    if "authorization" in request.headers:
        headers["Authorization"] = request.headers["authorization"]
    async with httpx.AsyncClient(transport=transport, base_url="http://kvortex", headers=headers) as client:
        answer = await client.post("/tokenize", content=body, timeout=None)
    if answer.status_code != 200:
        raise HTTPException(422, f"the server cannot tokenize this: {answer.text[:_MOST_CHARACTERS]}")
    tokens: list[int] = answer.json()["tokens"]
    return tokens
