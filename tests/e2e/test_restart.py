"""Servers that are killed, and started again in their place: nothing shared, nothing left, and a page that saw it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.browser import BOTTOM, HEIGHTS, browser, new_page, wait_for
from tests.e2e.engine import prompt
from tests.e2e.server import (
    ENDED_WITHIN_S,
    Server,
    assert_all_gone,
    assert_ends_after_its_request,
    assert_no_traceback_of_ours,
    inherited_environment,
    run_kvortex,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page

PROMPT = prompt(1, 600)


@pytest.fixture
def page() -> Iterator[Page | None]:
    """None where there is no browser, of which the tests of the page say so: what is not the page's holds without."""
    with ExitStack() as stack:
        try:
            chromium = stack.enter_context(browser())
        except pytest.skip.Exception:
            yield None
        else:
            yield new_page(chromium)


def assert_all_zero(metrics: dict[str, float], of_another: dict[str, float]) -> None:
    """Every series is there from the start, and none counts what was before."""
    assert metrics.keys() == of_another.keys()
    assert {name: value for name, value in metrics.items() if "_total" in name and value} == {}


def assert_metrics_are_its_own(server: Server, queried: int) -> None:
    """They moved by this server's traffic alone, and `inspect` says the same."""
    stats, metrics = server.settled(), server.metrics()
    assert metrics["kvortex_queried_tokens_total"] == stats["tokens"]["queried"] == queried
    assert metrics["kvortex_store_blocks_total"] == stats["store"]["blocks"] > 0
    document = run_kvortex("inspect", "--url", server.url, "--json")
    assert json.loads(document.stdout)["tokens"] == stats["tokens"]


def stale_metrics(folder: Path) -> dict[str, str]:
    """An environment that names a folder with the metrics of a process that is long gone."""
    folder.mkdir()
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    program = "from prometheus_client import Counter; Counter('stale', 'of a process that is gone').inc(10**6)"
    subprocess.run(
        [sys.executable, "-c", program], env=inherited_environment(**environment), check=True, timeout=ENDED_WITHIN_S
    )
    assert list(folder.glob("*.db"))
    return environment


def open_dashboard(page: Page | None, server: Server, queried: int) -> None:
    if page is not None:
        page.goto(f"{server.url}/kvortex/dashboard")
        page.wait_for_selector("#status.live")
        wait_for(page, lambda: page.inner_text("#queried") == f"{queried:,}")


def assert_shows_that_it_is_gone(page: Page | None, queried: int) -> None:
    if page is not None:
        page.wait_for_selector("#status.gone")
        assert page.inner_text("#status").startswith("No answer since")
        assert page.inner_text("#queried") == f"{queried:,}", "what was known last stays, greyed"


def assert_shows_the_successor(page: Page | None, queried: int) -> None:
    if page is not None:
        page.wait_for_selector("#status.live")
        wait_for(page, lambda: page.inner_text("#queried") == f"{queried:,}")
        page.wait_for_timeout(5000)
        lowest = page.evaluate(f"Math.max(...({HEIGHTS})().flat())")
        assert lowest <= BOTTOM, "counters that begin anew are no negative rates"
        page.close()  # in its mode for developers vLLM logs a trace of each answer of 503 that an ending server gives


def test_two_servers_side_by_side_and_one_is_killed_and_started_again(server, tiny_llama, page, tmp_path):
    """Field trials B20, B58, B67: nothing shared, nothing left behind by a SIGKILL, the other server untouched; and
    each server's figures are its own, from zero after a restart, whatever lies in PROMETHEUS_MULTIPROC_DIR.

    `kvortex serve` becomes the server, so there is no launcher to lose; killing it alone must end its engine too. A
    dashboard that was open tells that the server is gone, and shows its successor.
    """
    first = server.complete(PROMPT)
    other = Server(tiny_llama, log=tmp_path / "log")
    with other:
        assert_all_zero(other.metrics(), server.metrics())
        assert other.stats()["tokens"]["queried"] == 0
        assert other.complete(PROMPT) == first
        before = server.stats()["tokens"]
        assert_metrics_are_its_own(other, 600)
        assert server.listening()[1].isdisjoint(other.listening()[1])
        other.complete(prompt(2, 500))
        open_dashboard(page, other, 1100)
        family = other.family()
        other.process.kill()
        other.process.wait(ENDED_WITHIN_S)
        assert_all_gone(family)
        assert_shows_that_it_is_gone(page, 1100)
    assert server.stats()["tokens"] == before
    assert not [p for p in Path("/dev/shm").iterdir() if "kvortex" in p.name]
    # vLLM has a route for resets in this mode only.
    stale = stale_metrics(tmp_path / "stale") | {"VLLM_SERVER_DEV_MODE": "1"}
    with Server(tiny_llama, port=other.port, environment=stale, log=tmp_path / "again") as again:
        assert_all_zero(again.metrics(), server.metrics())
        assert again.complete(PROMPT) == first
        assert_metrics_are_its_own(again, 600)
        assert_shows_the_successor(page, 600)
        assert "stale_total 1e+06" in again.client.get("/metrics").text, "and the folder was read"
        assert again.complete(PROMPT) == first
        # Field trial B15, over HTTP: a reset means new weights, or a measurement from cold.
        assert again.settled()["tiers"]["ram"]["used_blocks"] > 0
        before = again.stats()["tokens"]
        answer = again.client.post("/reset_prefix_cache")
        assert answer.status_code == 200, answer.text
        assert again.complete(PROMPT) == first
        after = again.stats()["tokens"]
        assert (after["ram_hit"], after["vram_hit"]) == (before["ram_hit"], before["vram_hit"])
        assert_ends_after_its_request(again, signal.SIGTERM)
        assert_no_traceback_of_ours(again.log)
    assert server.complete(PROMPT) == first
