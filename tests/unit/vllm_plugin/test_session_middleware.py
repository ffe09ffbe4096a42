"""A session's name reaches the body that vLLM reads, whichever way it was given, and nothing else changes."""

from __future__ import annotations

import importlib
import json
import warnings
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed")
    middleware = importlib.import_module("kvortex.vllm_plugin.session_middleware")
    callers = importlib.import_module("kvortex.vllm_plugin.callers")

with_session = middleware.with_session


def params(body: bytes, header: str | None = None, caller: str = "") -> Any:
    return json.loads(with_session(body, header, caller)).get("kv_transfer_params")


@pytest.mark.parametrize("body", [b'{"prompt": "x"}', b" {\n} \n", b"{}", b'{"a": {"b": "}"}}'])
def test_a_header_is_added_to_any_object(body: bytes) -> None:
    changed = json.loads(with_session(body, "s", ""))
    assert changed == {**json.loads(body), "kv_transfer_params": {"session_id": "s"}}


def test_the_stronger_name_wins() -> None:
    body = {"prompt_cache_key": "weak", "session_id": "body", "kv_transfer_params": {"session_id": "params", "x": 1}}
    assert params(json.dumps(body).encode(), "header") == {"session_id": "params", "x": 1}
    del body["kv_transfer_params"]
    assert params(json.dumps(body).encode(), "header") == {"session_id": "body"}
    del body["session_id"]
    assert params(json.dumps(body).encode(), "header") == {"session_id": "header"}
    assert params(json.dumps(body).encode()) == {"session_id": "weak"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1, 2]",
        b'"session_id"',
        b'{"session_id": ',
        b'{"kv_transfer_params": 7}',
        b'{"session_id": 7}',
        b'{"session_id": null}',
        b"{\xff session_id",
        b"x{}",
        b'{"session_id": "\\ud800"}',
        b'{"prompt_cache_key": "half of a character: \\udfff"}',
        b'{"session_id": ' + b"[" * 100_000,
        b'{"session_id": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"session_id": ' + b"9" * 5000 + b"}",
    ],
)
def test_what_vllm_would_refuse_or_what_names_nothing_is_left_as_it_is(body: bytes) -> None:
    assert with_session(body, None, "") is body


def test_nothing_to_say_leaves_the_body_alone() -> None:
    body = b'{"prompt": "x", "kv_transfer_params": {"do_remote_decode": true}}'
    assert with_session(body, None, "") is body


@pytest.mark.parametrize(
    "forged",
    [
        b'{"kv_transfer_params": {"kvortex_caller": "forged"}}',
        b'{"kv_transfer\\u005fparams": {"kvortex_caller": "forged"}}',
        b'{"kv_transfer_params": {"kvortex_call\\u0065r": "forged"}, "prompt": "x"}',
    ],
)
def test_nobody_speaks_in_anothers_name(forged: bytes) -> None:
    assert params(forged, None, "real")["kvortex_caller"] == "real"


def test_with_one_key_there_is_one_caller_and_with_more_each_its_own() -> None:
    assert callers.caller_of("Bearer a", 1) == callers.caller_of("", 0) == ""
    one, two = callers.caller_of("Bearer a", 2), callers.caller_of("Bearer b", 2)
    assert one != two
    assert "a" != one == callers.caller_of("Bearer a", 5)


def app(*, on: bool = True) -> TestClient:
    app = FastAPI()
    app.add_middleware(middleware.SessionMiddleware)
    app.state.kvortex_sessions = on
    app.state.kvortex_api_keys = [b"1", b"2"]

    @app.post("/v1/completions")
    async def completions(request: Request) -> dict[str, Any]:
        return {"body": await request.json(), "length": request.headers["content-length"]}

    @app.post("/other")
    async def other(request: Request) -> dict[str, Any]:
        return {"body": await request.json()}

    return TestClient(app)


def test_the_app_reads_the_changed_body_of_the_right_length() -> None:
    answer = app().post("/v1/completions", json={"prompt": "p"}, headers={"X-Session-ID": "s", "Authorization": "B k"})
    given = answer.json()
    assert given["body"]["prompt"] == "p"
    assert given["body"]["kv_transfer_params"] == {
        "session_id": "s",
        "kvortex_caller": callers.caller_of("B k", 2),
    }
    assert int(given["length"]) > len('{"prompt":"p"}')


def test_other_paths_and_servers_without_prefetch_are_left_alone() -> None:
    headers = {"X-Session-Id": "s"}
    assert app().post("/other", json={"a": 1}, headers=headers).json() == {"body": {"a": 1}}
    assert app(on=False).post("/v1/completions", json={"a": 1}, headers=headers).json()["body"] == {"a": 1}
