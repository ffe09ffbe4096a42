"""KVortex's routes on an app, over stand-ins for the engines: keys, refusals, documents."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from kvortex.cache.holdings import BlockOrder
from kvortex.cache.misses import Miss
from kvortex.cache.stats import Ledger
from kvortex.vllm_plugin.engines import Engines
from kvortex.vllm_plugin.routes import KVortexRoutes
from kvortex.vllm_plugin.stats_socket import StatsUnavailableError

KEY = "sk-secret"
PATHS = ("/kvortex/stats", "/kvortex/dashboard", "/kvortex/blocks")


def document() -> dict[str, Any]:
    ledger = Ledger()
    ledger.count_tokens(vram_hit=0, ram_hit=60, missed={Miss.EVICTED: 40}, seen_tokens=100)
    tiers = {"vram": {"capacity_blocks": 10}, "ram": {"capacity_blocks": 20}}
    return {"model": "m", "block_size": 16, "tiers": tiers, **ledger.as_dict()}


@pytest.mark.parametrize(("given", "prefetch"), [({}, False), ({"prefetch_enabled": True}, True)])
def test_the_server_prefetches_as_its_engines_do(given: dict[str, Any], prefetch: bool) -> None:
    transfer = SimpleNamespace(
        kv_connector="KVortexConnector", engine_id="e", kv_connector_extra_config={"ram_cache_size": "1GB", **given}
    )
    config: Any = SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(data_parallel_size=1),
        model_config=SimpleNamespace(max_model_len=4096),
    )
    assert Engines.of(config) == Engines(("e",), prefetch, most_tokens=4096)


def test_of_a_hinted_prompt_the_engine_hears_no_more_than_a_request_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def ask(engine_id: str, question: str, **parameters: Any) -> dict[str, Any]:
        told.append((engine_id, question, parameters["tokens"]))
        return {"enabled": True}

    monkeypatch.setattr("kvortex.vllm_plugin.engines.ask_engine", ask)
    engines = Engines(("e",), True, most_tokens=4)
    for tokens in ([1, 2, 3, 4, 5, 6], [1, 2], None):
        engines.hint(None, tokens, None, "")
    assert told == [("e", "hint", [1, 2, 3, 4]), ("e", "hint", [1, 2]), ("e", "hint", None)]


class Answering(Engines):
    def stats(self) -> dict[str, Any]:
        return document()

    def blocks(self, top: int, by: BlockOrder) -> dict[str, Any]:
        return {"top": top, "by": by.value}


class Silent(Engines):
    def stats(self) -> dict[str, Any]:
        raise StatsUnavailableError("the engine does not answer: gone")

    def blocks(self, top: int, by: BlockOrder) -> dict[str, Any]:
        raise StatsUnavailableError("the engine does not answer: gone")


def client(engines: Engines | None, key: str | None = None) -> TestClient:
    app = FastAPI()
    routes = KVortexRoutes()
    routes.attach_router(app)
    asyncio.run(routes.init_state(None, app.state, Namespace(api_key=[key] if key else None)))
    app.state.kvortex_engines = engines
    return TestClient(app)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No key of this machine, and a registry of metrics for each test."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr("kvortex.vllm_plugin.routes.REGISTRY", CollectorRegistry())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer "])
def test_without_the_key_nothing_is_told(path, header):
    answer = client(Answering(("x",)), KEY).get(path, headers={"Authorization": header} if header else {})
    assert answer.status_code == 401
    assert "evicted" not in answer.text


@pytest.mark.parametrize("path", PATHS)
def test_with_the_key_and_on_a_server_without_one_all_is_told(path):
    headers = {"Authorization": f"Bearer {KEY}"}
    assert client(Answering(("x",)), KEY).get(path, headers=headers).status_code == 200
    assert client(Answering(("x",))).get(path).status_code == 200


def test_the_key_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    assert client(Answering(("x",))).get("/kvortex/dashboard").status_code == 401


@pytest.mark.parametrize("path", PATHS)
def test_a_server_without_kvortex_says_so(path):
    answer = client(None).get(path)
    assert answer.status_code == 503
    assert "without KVortexConnector" in answer.json()["detail"]


def test_an_engine_that_is_gone_is_told_and_the_page_still_opens():
    silent = client(Silent(("x",)))
    for path in ("/kvortex/stats", "/kvortex/blocks"):
        answer = silent.get(path)
        assert (answer.status_code, answer.json()["detail"]) == (503, "the engine does not answer: gone")
    assert silent.get("/kvortex/dashboard").status_code == 200


def test_stats_have_a_verdict():
    answer = client(Answering(("x",))).get("/kvortex/stats").json()
    assert answer["verdict"]["state"] == "helping"
    assert answer["missed"]["evicted"] == 40
    assert {name: value for name, value in answer.items() if name != "verdict"} == document()


def test_the_refused_page_asks_for_the_key_and_both_pages_are_closed():
    refused = client(Answering(("x",)), KEY).get("/kvortex/dashboard")
    shown = client(Answering(("x",))).get("/kvortex/dashboard")
    assert 'type="password"' in refused.text
    assert 'id="verdict"' not in refused.text
    assert 'id="verdict"' in shown.text
    for answer in (refused, shown):
        assert answer.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["cache-control"] == "no-store"


def test_blocks_are_asked_for_as_the_address_says():
    server = client(Answering(("x",)))
    assert server.get("/kvortex/blocks").json() == {"top": 20, "by": "idle"}
    assert server.get("/kvortex/blocks?top=7&by=uses").json() == {"top": 7, "by": "uses"}
    for wrong in ("top=0", "top=1001", "top=many", "by=colour"):
        assert server.get(f"/kvortex/blocks?{wrong}").status_code == 422, wrong


def test_metrics_of_several_http_processes_have_the_engines_too(monkeypatch, tmp_path):
    """Field trial B58: with PROMETHEUS_MULTIPROC_DIR, which vLLM sets itself where it has several, `/metrics` merges
    files; on vLLM's own two routes of that path."""
    from vllm.entrypoints.serve.instrumentator.metrics import attach_router

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    app = FastAPI()
    attach_router(app)
    routes = KVortexRoutes()
    monkeypatch.setattr(routes, "_collector", Series())
    routes.attach_router(app)
    answer = TestClient(app, follow_redirects=False).get("/metrics")
    assert answer.status_code == 200
    assert "kvortex_test 7.0" in answer.text


class Series:
    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Any:
        from prometheus_client.core import GaugeMetricFamily

        yield GaugeMetricFamily("kvortex_test", "", value=7)
