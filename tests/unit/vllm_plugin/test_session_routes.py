"""`POST /kvortex/prefetch` and `GET /kvortex/sessions` on an app, over a stand-in for the engines."""

from __future__ import annotations

import asyncio
import importlib
import warnings
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed")
    routes = importlib.import_module("kvortex.vllm_plugin.routes")
    session_routes = importlib.import_module("kvortex.vllm_plugin.session_routes")
    engines = importlib.import_module("kvortex.vllm_plugin.engines")
    stats_socket = importlib.import_module("kvortex.vllm_plugin.stats_socket")

FOUND = {"enabled": True, "known": True, "accepted": True, "blocks": 5, "vram_blocks": 2, "ram_blocks": 3}


class FakeEngines(engines.Engines):
    """Remembers what it was told."""

    def __init__(self, answer: dict[str, Any] | Exception) -> None:
        super().__init__(("one",), True)
        object.__setattr__(self, "answer", answer)
        object.__setattr__(self, "told", [])

    def __getattr__(self, name: str) -> Any:
        return object.__getattribute__(self, "__dict__")[name]

    def hint(self, session: Any, tokens: Any, cache_salt: Any, caller: Any) -> dict[str, Any]:
        self.told.append((session, tokens, cache_salt, caller))
        if isinstance(self.answer, Exception):
            raise self.answer
        return dict(self.answer)

    def sessions(self, top: int, caller: Any) -> dict[str, Any]:
        self.told.append((top, caller))
        return {"top": top, "engines": [{"enabled": True, "known": 1, "sessions": []}]}


class FakeClient:
    """An engine client that counts how often the engine was woken."""

    woken = 0

    async def is_sleeping(self) -> bool:
        self.woken += 1
        return False


class App:
    def __init__(self, answer: dict[str, Any] | Exception = FOUND, keys: tuple[str, ...] = ()) -> None:
        app = FastAPI()
        routes.KVortexRoutes().attach_router(app)
        asyncio.run(routes.KVortexRoutes().init_state(None, app.state, Namespace(api_key=list(keys))))
        self.engines = app.state.kvortex_engines = FakeEngines(answer)
        self.client = app.state.kvortex_engine_client = FakeClient()
        self.tokenized: list[Any] = []

        @app.post("/tokenize")
        async def tokenize(body: dict[str, Any]) -> Any:
            self.tokenized.append(body)
            return {"tokens": [1, 2, 3]}

        self.http = TestClient(app)

    def hint(self, body: Any, **options: Any) -> Any:
        return self.http.post("/kvortex/prefetch", json=body, **options)


@pytest.fixture(autouse=True)
def no_key_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(routes, "REGISTRY", SimpleNamespace(_collector_to_names={}, register=lambda _: None))


def test_a_session_is_hinted_and_the_engine_woken() -> None:
    app = App()
    answer = app.hint({"session": "a", "cache_salt": "s"})
    assert answer.status_code == 202
    assert answer.json() == {"known": True, "accepted": True, "blocks": 5, "vram_blocks": 2, "ram_blocks": 3}
    assert app.engines.told == [("a", None, "s", "")]
    assert app.client.woken == 1


def test_an_engine_is_woken_to_keep_what_vram_has() -> None:
    app = App({**FOUND, "ram_blocks": 0})
    assert app.hint({"session": "a"}).status_code == 202
    assert app.client.woken == 1


def test_an_engine_with_nothing_to_load_or_keep_sleeps_on() -> None:
    app = App({**FOUND, "vram_blocks": 0, "ram_blocks": 0})
    assert app.hint({"session": "a"}).status_code == 202
    assert app.client.woken == 0


def test_messages_and_text_are_tokenized_by_the_server_and_ids_are_taken_as_they_are() -> None:
    app = App()
    messages = [{"role": "user", "content": "hello"}]
    assert app.hint({"messages": messages, "tools": []}).status_code == 202
    assert app.hint({"prompt": "hello"}).status_code == 202
    assert app.hint({"prompt": [7, 8]}).status_code == 202
    assert app.tokenized == [
        {"messages": messages, "tools": [], "add_generation_prompt": False},
        {"prompt": "hello"},
    ]
    assert [told[1] for told in app.engines.told] == [[1, 2, 3], [1, 2, 3], [7, 8]]


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        {"session": ""},
        {"session": 7},
        {"session": "a", "prompt": "b"},
        {"prompt": [-1]},
        {"prompt": [1.5]},
        {"messages": []},
        {"session": "a", "colour": "red"},
        {"session": "a" * 5000},
    ],
)
def test_what_is_no_hint_is_refused(body: Any) -> None:
    app = App()
    assert app.hint(body).status_code == 422
    assert app.engines.told == []


def test_what_is_no_json_or_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    app = App()
    assert app.http.post("/kvortex/prefetch", content=b"{").status_code == 422
    monkeypatch.setattr(session_routes, "MOST_BODY_BYTES", 100)
    assert app.hint({"session": "a" * 200}).status_code == 413
    assert app.http.post("/kvortex/prefetch", content=iter([b"x" * 60, b"x" * 60])).status_code == 413
    monkeypatch.setattr(session_routes, "MOST_TOKENS", 2)
    assert app.hint({"prompt": "x"}).status_code == 413
    assert app.engines.told == []


def test_refusals_of_the_engine_have_their_own_status() -> None:
    assert App({"enabled": False}).hint({"session": "a"}).status_code == 409
    busy = App({**FOUND, "accepted": False}).hint({"session": "a"})
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
    assert App(stats_socket.StatsUnavailableError("gone")).hint({"session": "a"}).status_code == 503


def test_the_key_of_v1_is_asked_for_and_tells_callers_apart() -> None:
    app = App(keys=("one", "two"))
    assert app.hint({"session": "a"}).status_code == 401
    assert app.http.get("/kvortex/sessions").status_code == 401
    for key in ("one", "two"):
        headers = {"Authorization": f"Bearer {key}"}
        assert app.hint({"session": "a"}, headers=headers).status_code == 202
        assert app.http.get("/kvortex/sessions?top=3", headers=headers).status_code == 200
    (*_, first), (top, first_again), (*_, second), (_, second_again) = app.engines.told
    assert first == first_again != second == second_again
    assert "" not in (first, second)
    assert top == 3


def test_with_one_key_all_sessions_are_shown() -> None:
    app = App(keys=("one",))
    headers = {"Authorization": "Bearer one"}
    assert app.http.get("/kvortex/sessions", headers=headers).json()["top"] == 20
    assert app.engines.told == [(20, None)]
    assert app.http.get("/kvortex/sessions?top=0", headers=headers).status_code == 422
