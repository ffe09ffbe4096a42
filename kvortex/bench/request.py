"""One completion over HTTP, streamed and timed: a good answer or a failure with its kind."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import httpx

_MAX_DETAIL: Final = 300


class FailureKind(StrEnum):
    """Why a request has no answer."""

    HTTP_STATUS = "http_status"
    """The server refused it; the status says why."""
    NO_CONNECTION = "no_connection"
    """Nobody answered, or the connection broke before the answer began."""
    CLOSED_MID_STREAM = "closed_mid_stream"
    """The answer began and did not end."""
    EMPTY_STREAM = "empty_stream"
    """The answer ended and had no token."""
    ERROR_IN_STREAM = "error_in_stream"
    """The server said in the stream that it failed."""
    NOT_UNDERSTOOD = "not_understood"
    """What came is no completion stream."""
    TIMEOUT = "timeout"
    """It did not end within the deadline."""


@dataclass(frozen=True, slots=True)
class Good:
    """An answer that came whole.

    Attributes:
        ttft_s: from sending to the first token.
        tpot_s: mean time from one token to the next; None where that has no meaning: one token, or all at once.
        latency_s: from sending to the end.
        output_tokens: how many came.
        token_ids: the answer; None where the server does not tell.
    """

    ttft_s: float
    tpot_s: float | None
    latency_s: float
    output_tokens: int
    token_ids: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Failed:
    """A request without an answer.

    Attributes:
        detail: what the server or the connection said.
        status: the HTTP status, for HTTP_STATUS.
        latency_s: from sending to giving up.
    """

    kind: FailureKind
    detail: str
    latency_s: float
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go.

    Attributes:
        url: without `/v1`.
        model: as the server calls it.
        api_key: None where it asks for none.
    """

    url: str
    model: str
    api_key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def is_local(self) -> bool:
        """Whether it is this machine by its own name."""
        return httpx.URL(self.url).host in ("127.0.0.1", "localhost", "::1")

    def open_client(self) -> httpx.AsyncClient:
        """A client whose only deadline is each request's own, and in which no request waits for another's connection:
        that would be taken for the server's time."""
        # Servers close idle connections after 5 s: one that is about to be closed must not be used again.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
        # No proxy stands between this machine and itself.
        trust_env = not self.is_local
        return httpx.AsyncClient(
            base_url=self.url, headers=self.headers, limits=limits, timeout=None, trust_env=trust_env
        )


async def complete(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    prompt: list[int],
    num_tokens: int,
    timeout_s: float,
    *,
    session: str | None = None,
) -> Good | Failed:
    """Sends a prompt of token ids and reads the answer as it comes.

    Args:
        num_tokens: to generate, no fewer: the end-of-text token does not end the answer.
        timeout_s: for the whole of it.
        session: told to the server as the request's session.
    """
    # Encoded before the clock starts.
    body = json.dumps(
        {
            "model": endpoint.model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
    ).encode()
    reading = _Reading(time.perf_counter())
    try:
        async with asyncio.timeout(timeout_s):
            return await _complete(client, body, reading, {"X-Session-Id": session} if session else {})
    except TimeoutError:
        return reading.failed(FailureKind.TIMEOUT, f"not done after {timeout_s:g} s, {reading.num_tokens} tokens came")


async def _complete(
    client: httpx.AsyncClient, body: bytes, reading: _Reading, headers: dict[str, str]
) -> Good | Failed:
    answering = False
    try:
        async with client.stream(
            "POST", "/v1/completions", content=body, headers={"Content-Type": "application/json", **headers}
        ) as response:
            answering = True
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                return reading.failed(FailureKind.HTTP_STATUS, message_of(text), response.status_code)
            return await reading.read(response.aiter_lines())
    except httpx.RequestError as error:
        kind = FailureKind.CLOSED_MID_STREAM if answering else FailureKind.NO_CONNECTION
        return reading.failed(kind, f"{type(error).__name__}: {error}")


@dataclass(slots=True)
class _Reading:
    """A stream as far as it has been read. Times are `perf_counter` seconds."""

    started: float
    first: float | None = None
    last: float = 0.0
    token_chunks: int = 0
    token_ids: list[int] = field(default_factory=list)
    every_chunk_had_ids: bool = True
    usage_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """The server's own count, else the ids, else one a chunk."""
        if self.usage_tokens is not None:
            return self.usage_tokens
        return len(self.token_ids) if self.every_chunk_had_ids else self.token_chunks

    async def read(self, lines: AsyncIterator[str]) -> Good | Failed:
        """Reads to `[DONE]`. httpx's errors pass through."""
        async for line in lines:
            name, colon, value = line.partition(":")
            if name != "data":
                if line and (not colon or name not in ("", "event", "id", "retry")):
                    return self.failed(FailureKind.NOT_UNDERSTOOD, line)
                continue
            value = value.strip()
            if value == "[DONE]":
                return self._ended()
            try:
                chunk = json.loads(value)
                error = self._take(chunk)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as problem:
                return self.failed(FailureKind.NOT_UNDERSTOOD, f"{type(problem).__name__}: {problem} in {value}")
            if error is not None:
                return self.failed(FailureKind.ERROR_IN_STREAM, error)
        if self.first is None:
            return self.failed(FailureKind.EMPTY_STREAM, "the stream ended with nothing in it")
        return self.failed(FailureKind.CLOSED_MID_STREAM, f"the stream ended after {self.num_tokens} tokens")

    def _take(self, chunk: dict[str, Any]) -> str | None:
        """Takes in one chunk; what it says went wrong, else None."""
        if "error" in chunk:
            return message_of(json.dumps(chunk))
        usage = chunk.get("usage")
        if usage is not None:
            self.usage_tokens = int(usage["completion_tokens"])
        for choice in chunk.get("choices", []):
            ids = choice.get("token_ids")
            # Without ids, a chunk without text is a token whose text comes later, unless it only says "finished".
            if not (ids or choice.get("text") or (ids is None and choice.get("finish_reason") is None)):
                continue
            self.last = time.perf_counter()
            if self.first is None:
                self.first = self.last
            self.token_chunks += 1
            self.every_chunk_had_ids &= ids is not None
            self.token_ids.extend(ids or ())
        return None

    def _ended(self) -> Good | Failed:
        num_tokens = self.num_tokens
        if self.first is None or num_tokens == 0:
            return self.failed(FailureKind.EMPTY_STREAM, "the stream ended with no token in it")
        # A server may leave some ids out, as with echoed or filtered text: then the answer is not known.
        known = self.every_chunk_had_ids and len(self.token_ids) == num_tokens
        spread = num_tokens > 1 and self.token_chunks > 1
        return Good(
            ttft_s=self.first - self.started,
            tpot_s=(self.last - self.first) / (num_tokens - 1) if spread else None,
            latency_s=time.perf_counter() - self.started,
            output_tokens=num_tokens,
            token_ids=tuple(self.token_ids) if known else None,
        )

    def failed(self, kind: FailureKind, detail: str, status: int | None = None) -> Failed:
        return Failed(kind, detail[:_MAX_DETAIL], time.perf_counter() - self.started, status)


def message_of(body: str) -> str:
    """What an error body says, in vLLM's or FastAPI's form; else its beginning."""
    try:
        document = json.loads(body)
        error = document.get("error", document.get("detail", document))
        return str(error["message"] if isinstance(error, dict) and "message" in error else error)[:_MAX_DETAIL]
    except (ValueError, AttributeError, RecursionError):
        return body.strip()[:_MAX_DETAIL]
