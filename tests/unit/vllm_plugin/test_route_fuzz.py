"""What anybody may send to KVortex's routes: an answer or one message, never an error of the server's own.

Schemathesis makes the requests from the app's own OpenAPI description; behind the routes are the real socket and the
real scheduler side. FUZZ_EXAMPLES says how many requests a route gets; the suite sends a few.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import uuid
import warnings
from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings

from kvortex.cache.usage import SlotUsage

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed")
    schemathesis = importlib.import_module("schemathesis")
    routes = importlib.import_module("kvortex.vllm_plugin.routes")
    session_routes = importlib.import_module("kvortex.vllm_plugin.session_routes")
    engines = importlib.import_module("kvortex.vllm_plugin.engines")
    stats_socket = importlib.import_module("kvortex.vllm_plugin.stats_socket")
    mini = importlib.import_module("tests.fakes.mini_vllm")

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "15"))
KEY = "sk-secret"
HEADERS = {"Authorization": f"Bearer {KEY}"}
LONGEST_ANSWER = 100_000


class EngineClient:
    async def is_sleeping(self) -> bool:
        return False


def make_app(engine_id: str, keys: list[str]) -> FastAPI:
    app = FastAPI()

    @app.post("/tokenize", include_in_schema=False)
    async def tokenize(request: Request) -> Any:
        """As vLLM's: tokens for what it likes, its own error for what it does not."""
        body = await request.json()
        text = body.get("prompt") or "".join(message["content"] for message in body["messages"])
        return {"tokens": list(text.encode())}

    plugin = routes.KVortexRoutes()
    plugin.attach_router(app)
    asyncio.run(plugin.init_state(None, app.state, Namespace(api_key=keys)))
    app.state.kvortex_engines = engines.Engines((engine_id,), True)
    app.state.kvortex_engine_client = EngineClient()
    return app


@pytest.fixture(scope="module")
def engine_id() -> Iterator[str]:
    """A scheduler side that has served a few requests, behind the real socket."""
    hashing = importlib.import_module("vllm.utils.hashing")
    importlib.import_module("vllm.v1.core.kv_cache_utils").init_none_hash(hashing.get_hash_fn_by_name("sha256"))
    vllm = mini.MiniVllm(num_blocks=40, num_slots=60)
    vllm.side._index.usage = SlotUsage(60)
    for number in range(8):
        vllm.run(mini.request(f"r{number}", mini.hashes_of(number % 5, 6), session=f"s{number % 5}"))
    side = vllm.side
    name = f"fuzz-{uuid.uuid4().hex}"
    answers = {"stats": side.snapshot, "blocks": side.blocks, "sessions": side.sessions, "hint": side.hint}
    server = stats_socket.StatsServer(name, answers)
    yield name
    server.close()


@pytest.fixture(scope="module")
def app(engine_id: str) -> Iterator[FastAPI]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_API_KEY", raising=False)
        patch.setattr(routes, "REGISTRY", SimpleNamespace(_collector_to_names={}, register=lambda _: None))
        yield make_app(engine_id, [KEY])


@pytest.fixture(scope="module")
def client(app: FastAPI) -> TestClient:
    return TestClient(app, headers=HEADERS)


def own_routes(app: FastAPI) -> list[tuple[str, str]]:
    """Every method and path of KVortex's on the app: read from it, so that a new one is among them."""
    return [
        (method, route.path)
        for route in app.routes
        if isinstance(route, APIRoute) and route.path.startswith("/kvortex")
        for method in sorted(route.methods)
    ]


# ---- the key


def test_every_route_asks_for_the_key(app: FastAPI) -> None:
    found = own_routes(app)
    assert {path for _, path in found} >= {
        "/kvortex/stats",
        "/kvortex/blocks",
        "/kvortex/sessions",
        "/kvortex/prefetch",
    }
    assert len([route for route in app.routes if "kvortex" in str(getattr(route, "path", ""))]) == len(found)
    anybody = TestClient(app)
    for method, path in found:
        for header in (None, "Bearer ", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}\xff", KEY):
            headers = {} if header is None else {"Authorization": header.encode("latin-1")}
            assert anybody.request(method, path, headers=headers).status_code == 401, (method, path, header)


def test_no_route_answers_before_the_server_knows_its_keys(app: FastAPI) -> None:
    early = FastAPI()
    routes.KVortexRoutes().attach_router(early)
    for method, path in own_routes(app):
        assert TestClient(early).request(method, path).status_code == 503, path


# ---- what is made from the description


def operations(app: FastAPI) -> list[Any]:
    description = schemathesis.openapi.from_asgi("/openapi.json", app).include(path_regex="^/kvortex/")
    return [operation.ok() for operation in description.get_all_operations()]


def test_every_route_is_described(app: FastAPI) -> None:
    described = [(operation.method.upper(), operation.path) for operation in operations(app)]
    assert sorted(described) == sorted(own_routes(app))


@pytest.mark.parametrize("mode", schemathesis.GenerationMode)
def test_no_request_is_an_error_of_the_servers_own(app: FastAPI, mode: Any) -> None:
    """What fits the description, and what does not."""
    statuses = set()
    for operation in operations(app):
        if mode.is_negative and not (list(operation.query) or list(operation.body)):
            continue

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=EXAMPLES <= 15,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            answer = case.call(headers=HEADERS)
            check(answer)
            statuses.add(answer.status_code)

        ask()
    assert statuses >= ({422} if mode.is_negative else {200, 202}), statuses


def check(answer: Any) -> None:
    assert answer.status_code < 500, (answer.status_code, answer.text[:500])
    assert len(answer.text) < LONGEST_ANSWER
    if answer.status_code >= 400 and answer.status_code != 405:
        assert answer.json()["detail"], answer.text


# ---- what a description does not say

DEEP = b'{"messages": [{"content": ' + b"[" * 50_000 + b"]" * 50_000 + b"}]}"
BODIES = {
    "nothing": b"",
    "not UTF-8": b'{"session": "\xff\xfe"}',
    "half a character": b'{"session": "\\ud800"}',
    "NaN": b'{"messages": [{"content": NaN}]}',
    "Infinity": b'{"messages": [{"content": "x"}], "chat_template_kwargs": {"a": 1e999}}',
    "very deep": DEEP,
    "a huge token": b'{"prompt": [' + b"9" * 4000 + b"]}",
    "a token over 31 bits": b'{"prompt": [2147483648]}',
    "a number that cannot be read": b'{"prompt": [' + b"9" * 5000 + b"]}",
    "a token that is true": b'{"prompt": [true]}',
    "a token that is text": b'{"prompt": ["7"]}',
    "a name too long": json.dumps({"session": "s" * 5000}).encode(),
    "a salt too long": json.dumps({"session": "s", "cache_salt": "s" * 5000}).encode(),
    "a field with a long name": json.dumps({"session": "s", "x" * 100_000: 1}).encode(),
    "many unknown fields": json.dumps({f"f{i}": 1 for i in range(10_000)}).encode(),
    "what cannot be tokenized": b'{"messages": [{"role": "user"}]}',
    "a number where text is due": b'{"messages": [{"content": 7}]}',
    "a body over the limit": b'{"session": "' + b"s" * (4 << 20) + b'"}',
}


@pytest.mark.parametrize("name", BODIES)
def test_what_is_no_hint_is_refused_in_one_message(client: TestClient, name: str) -> None:
    answer = client.post("/kvortex/prefetch", content=BODIES[name])
    assert answer.status_code in (413, 422), (answer.status_code, answer.text[:300])
    assert len(answer.text) < 8000
    said = answer.json()["detail"]
    assert isinstance(said, str), "vLLM's own handler turns anything else into a fault of its own"
    assert said
    assert client.get("/kvortex/stats").status_code == 200


def test_the_longest_hint_of_the_largest_tokens_reaches_the_engine(client: TestClient, monkeypatch: Any) -> None:
    monkeypatch.setattr(session_routes, "MOST_BODY_BYTES", 16 << 20)
    tokens = [2**31 - 1] * session_routes.MOST_TOKENS
    answer = client.post("/kvortex/prefetch", json={"prompt": tokens})
    assert answer.status_code == 202, answer.text[:300]
    assert answer.json()["ram_blocks"] == 0
    assert client.post("/kvortex/prefetch", json={"prompt": [*tokens, 1]}).status_code == 422


@pytest.mark.parametrize("path", ["/kvortex/blocks", "/kvortex/sessions"])
@pytest.mark.parametrize(
    "top", ["", "0", "-1", "1e3", "NaN", "Infinity", "true", "9" * 400, "9" * 5000, "%00", "%ff%fe", "\u0661", "[]"]
)
def test_a_wrong_number_in_an_address_is_refused(client: TestClient, path: str, top: str) -> None:
    answer = client.get(f"{path}?top={top}")
    assert answer.status_code == 422, answer.text[:300]


@pytest.mark.parametrize("by", ["", "IDLE", "../idle", "x" * 5000, "%ff", "%00"])
def test_a_wrong_order_is_refused(client: TestClient, by: str) -> None:
    assert client.get(f"/kvortex/blocks?by={by}").status_code == 422


@pytest.mark.parametrize(
    "path", ["/kvortex/../kvortex/stats", "/kvortex/stats/../../etc/passwd", "/kvortex/%2e%2e/stats"]
)
def test_a_path_leads_nowhere_else(client: TestClient, path: str) -> None:
    anybody = TestClient(client.app)
    assert anybody.get(path).status_code in (401, 404)
