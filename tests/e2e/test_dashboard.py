"""The dashboard in a real browser against a real server under load: what it shows is what the server counts."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.browser import BOTTOM, HEIGHTS, browser, new_page, wait_for
from tests.e2e.engine import prompt
from tests.e2e.server import KEY, Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

SHOTS = os.environ.get("DASHBOARD_SCREENSHOTS")
"""A folder for pictures of the page, to be looked at."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


class Load:
    """Conversations on a server, one request after the other, for a `with` block; a bounded number of them."""

    def __init__(self, server: Server, most: int = 500, max_tokens: int = 2) -> None:
        self._server, self._most, self._max_tokens = server, most, max_tokens
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.failures: list[BaseException] = []

    def _run(self) -> None:
        try:
            for turn in range(self._most):
                if self._stop.is_set():
                    return
                self._server.complete(prompt(turn % 4, 500 + turn % 200), max_tokens=self._max_tokens)
        except BaseException as error:  # noqa: BLE001 - raised where the block ends
            self.failures.append(error)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert not self.failures, self.failures


def opened(chromium: Browser, server: Server, **options: Any) -> tuple[Page, list[str]]:
    """The dashboard past its key form, and the addresses that its page asks for from now on."""
    page = new_page(chromium, **options)
    addresses: list[str] = []
    page.on("request", lambda request: addresses.append(request.url))
    # What the page's policy stops never becomes a request, and is told here.
    page.on("console", lambda message: addresses.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: addresses.append(f"script: {error}"))
    page.goto(f"{server.url}/kvortex/dashboard")
    addresses.clear()  # the refusal itself is told as an error
    page.fill("#key", KEY)
    page.click("button")
    page.wait_for_selector("#status.live")
    return page, addresses


def whole(page: Page, name: str) -> int:
    return int(page.inner_text(f"#{name}").replace(",", ""))


def second_cell(row: Locator) -> int:
    return int(row.locator("td").nth(1).inner_text().replace(",", ""))


def test_the_page_shows_under_load_what_the_server_counts(chromium, server):
    page, addresses = opened(chromium, server)
    with Load(server):
        found = page.locator(".plot[aria-label^='Prompt tokens found']")
        wait_for(page, lambda: "%" in (found.get_attribute("aria-label") or ""))
        page.wait_for_timeout(8000)
        shown = whole(page, "queried")
        counted = server.stats()["tokens"]["queried"]
        assert 0 < shown <= counted, "the page is never ahead of the server"
        wait_for(page, lambda: whole(page, "queried") >= counted)
    stats = server.settled()
    tokens = stats["tokens"]
    assert tokens["ram_hit"] > 0
    copies = [stats["store"]["blocks"], stats["load"]["blocks"]]
    # Copies end after the requests that they are for.
    wait_for(page, lambda: (whole(page, "queried"), whole(page, "copied")) == (tokens["queried"], sum(copies)))
    assert {name: whole(page, name) for name in ("vram_hit", "ram_hit", "computed", "queried")} == tokens
    assert whole(page, "prompts") == stats["prompts"]["counted"]
    assert whole(page, "failed") == 0
    assert page.inner_text("#verdict") == stats["verdict"]["text"]
    assert stats["model"] in page.inner_text("#facts")
    rows = page.locator("#missed tr").all()
    missed = {
        row.get_attribute("data-reason"): int(row.locator("td").nth(1).inner_text().replace(",", "")) for row in rows
    }
    assert missed == {reason: n for reason, n in stats["missed"].items() if n}
    assert sum(missed.values()) == tokens["computed"]
    assert [second_cell(row) for row in page.locator("#copies tr").all()] == copies
    assert all(address.startswith(server.url + "/kvortex/") for address in addresses), set(addresses)


def test_every_chart_draws_what_it_is_named_for(chromium, server):
    names = (
        *("Prompt tokens found", "Prompt tokens", "Link use", "Blocks on their way", "VRAM", "RAM"),
        *("Evictions", "Prefetch", "Sessions"),
    )
    # Nothing prefetches here, and a copy may be too short to be seen under way; everything else moves, though a look
    # every two seconds may miss a request for a while.
    moving = set(names) - {"Prefetch", "Blocks on their way"}

    def risen() -> set[str]:
        heights = page.evaluate(HEIGHTS)
        return {name for name, ys in zip(names, heights, strict=True) if min(ys, default=BOTTOM) < BOTTOM}

    page, _ = opened(chromium, server)
    with Load(server, max_tokens=16):
        wait_for(page, lambda: risen() >= moving)
    labels = [plot.get_attribute("aria-label") or "" for plot in page.locator(".plot").all()]
    assert [label.split(",")[0].split(":")[0] for label in labels] == list(names)
    assert not [label for label in labels if label.endswith(" -")]
    assert "Prefetch" not in risen()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_cut_or_hidden_at_any_width(chromium, server, width, scheme):
    page, _ = opened(chromium, server, viewport={"width": width, "height": 844}, color_scheme=scheme)
    with Load(server, most=20):
        page.wait_for_timeout(9000)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = page.evaluate("""() => [...document.querySelectorAll('main *')].filter(element => {
        const box = element.getBoundingClientRect();
        return box.width && (box.left < -1 || box.right > innerWidth + 1);
    }).map(element => element.outerHTML.slice(0, 80))""")
    assert not outside
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(15, 19, 23)") == (scheme == "dark")
    if SHOTS:
        page.screenshot(path=Path(SHOTS) / f"dashboard_{width}_{scheme}.png", full_page=True)


def test_a_wrong_key_is_told_and_the_right_one_is_kept_for_the_tab(chromium, server):
    page = new_page(chromium)
    answer = page.goto(f"{server.url}/kvortex/dashboard")
    assert answer.status == 401
    page.fill("#key", "sk-wrong")
    page.click("button")
    wait_for(page, lambda: "does not know this key" in page.inner_text("#error"))
    page.fill("#key", KEY)
    page.click("button")
    page.wait_for_selector("#status.live")
    page.reload()
    page.wait_for_selector("#status.live")
    assert KEY not in page.url
    another = page.context.new_page()
    assert another.goto(f"{server.url}/kvortex/dashboard").status == 401
    another.wait_for_selector("#key")
    assert KEY not in server.log.read_text(errors="replace")
