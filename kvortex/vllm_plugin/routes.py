"""The entry point of group `vllm.endpoint_plugins`: `/kvortex/...` on vLLM's own app. HTTP server process."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
from argparse import Namespace
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse
from prometheus_client import REGISTRY, CollectorRegistry, make_asgi_app, multiprocess
from starlette.datastructures import State
from starlette.routing import Mount

from kvortex.cache.holdings import MOST_BLOCKS, BlockOrder
from kvortex.cache.verdict import judge
from kvortex.dashboard.page import pages
from kvortex.vllm_plugin.banner import announce_when_ready
from kvortex.vllm_plugin.engines import Engines
from kvortex.vllm_plugin.last_words import record_last_words
from kvortex.vllm_plugin.logs import share_vllms_log
from kvortex.vllm_plugin.metrics import StatsCollector
from kvortex.vllm_plugin.server_end import bound_end
from kvortex.vllm_plugin.session_middleware import SessionMiddleware
from kvortex.vllm_plugin.session_routes import make_session_router
from kvortex.vllm_plugin.stats_socket import StatsUnavailableError
from kvortex.vllm_plugin.waker import keep_prefetching

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient


def api_keys(args: Namespace) -> list[str]:
    """The keys that `/v1` asks for: vLLM's option, else its environment variable."""
    given: list[str] | str | None = getattr(args, "api_key", None)
    if isinstance(given, str):
        given = [given]
    keys = [key for key in given or [] if key]
    return keys or [key for key in [os.environ.get("VLLM_API_KEY")] if key]


def check_api_key(request: Request) -> None:
    """The same key as for `/v1`, compared in constant time."""
    digests: list[bytes] | None = getattr(request.app.state, "kvortex_api_keys", None)
    if digests is None:
        raise HTTPException(status_code=503, detail="the server is starting")
    if not digests:
        return
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    digest = hashlib.sha256(key.encode()).digest()
    matches = [secrets.compare_digest(digest, known) for known in digests]
    if scheme.lower() != "bearer" or not any(matches):
        raise HTTPException(status_code=401, detail="Unauthorized: /kvortex asks for the same API key as /v1")


router = APIRouter(prefix="/kvortex", dependencies=[Depends(check_api_key)], tags=["kvortex"])
page_router = APIRouter(prefix="/kvortex", tags=["kvortex"])
"""Of documents that ask for the key themselves."""


def engines_of(request: Request) -> Engines:
    engines = getattr(request.app.state, "kvortex_engines", None)
    if not isinstance(engines, Engines):
        raise HTTPException(status_code=503, detail="this server runs without KVortexConnector")
    return engines


@router.get("/stats")
async def stats(request: Request) -> dict[str, Any]:
    """What the cache has done and holds now, and whether it is helping."""
    engines = engines_of(request)
    try:
        document = await run_in_threadpool(engines.stats)
    except StatsUnavailableError as error:
        raise HTTPException(status_code=503, detail=error.message) from error
    return {**document, "verdict": judge(document).as_dict()}


@router.get("/blocks")
async def blocks(
    request: Request,
    top: Annotated[int, Query(ge=1, le=MOST_BLOCKS)] = 20,
    by: BlockOrder = BlockOrder.IDLE,
) -> dict[str, Any]:
    """What lies in each tier, by age and use, and the first `top` blocks in the order of `by`."""
    engines = engines_of(request)
    try:
        return await run_in_threadpool(engines.blocks, top, by)
    except StatsUnavailableError as error:
        raise HTTPException(status_code=503, detail=error.message) from error


def _document(html: str, status_code: int) -> HTMLResponse:
    headers = {"Content-Security-Policy": pages().policy, "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
    return HTMLResponse(html, status_code, headers)


@page_router.get("/dashboard")
async def dashboard(request: Request) -> HTMLResponse:
    """The page that shows `/kvortex/stats` live. A browser cannot be told to send a key with an address, so the
    refusal is a page that asks for it."""
    try:
        check_api_key(request)
    except HTTPException as refusal:
        return _document(pages().key_form, refusal.status_code)
    engines_of(request)
    return _document(pages().dashboard, 200)


class KVortexRoutes:
    """vLLM makes one of these for its app when `VLLM_PLUGINS` names `kvortex_routes`."""

    name = "kvortex_routes"
    required_tasks = None

    def __init__(self) -> None:
        self._engines: Engines | None = None
        self._paths: list[str] = []
        self._collector = StatsCollector(self._read)
        self._tasks: list[asyncio.Task[None]] = []

    def attach_router(self, app: FastAPI) -> None:
        """Adds the routes. vLLM's app has all of its own by now, `/metrics` among them."""
        app.include_router(router)
        app.include_router(make_session_router(check_api_key, engines_of))
        self._paths = [str(getattr(route, "path", "")) for route in app.routes]
        app.include_router(page_router)
        app.add_middleware(SessionMiddleware)
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            self._join_multiprocess_metrics(app)
        elif self._collector not in REGISTRY._collector_to_names:
            REGISTRY.register(self._collector)

    def _join_multiprocess_metrics(self, app: FastAPI) -> None:
        """With several HTTP processes, `/metrics` merges files, where a live collector has no place: answer it from a
        registry that has both, before vLLM's own routes of that path, of which there are two."""
        if not any(getattr(route, "path", "") == "/metrics" for route in app.routes):
            return
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        registry.register(self._collector)
        mount = Mount("/metrics", make_asgi_app(registry=registry))
        mount.path_regex = re.compile("^/metrics(?P<path>.*)$")  # as vLLM's: no redirect to /metrics/
        app.router.routes.insert(0, mount)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """vLLM's engine is there: learns its name and the API keys."""
        record_last_words()  # vLLM 0.32 sets up its log anew after it has made its plugins known
        self._tasks.append(asyncio.create_task(bound_end(state)))
        state.kvortex_api_keys = [hashlib.sha256(key.encode()).digest() for key in api_keys(args)]
        if engine_client is not None:
            self._engines = Engines.of(engine_client.vllm_config)
        state.kvortex_engines = self._engines
        state.kvortex_engine_client = engine_client
        state.kvortex_sessions = self._engines is not None and self._engines.prefetch
        if self._engines is not None:
            share_vllms_log()
            announce_when_ready(self._engines, args, self._paths)
            if engine_client is not None and self._engines.prefetch:
                self._tasks.append(asyncio.create_task(keep_prefetching(self._engines, engine_client)))

    def _read(self) -> dict[str, Any]:
        if self._engines is None:
            raise StatsUnavailableError("this server runs without KVortexConnector")
        return self._engines.stats()
