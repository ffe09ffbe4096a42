"""Chromium without a window, driven by Playwright; skips where either is missing."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# Nothing of the browser's own may look for the outside.
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
MORE_QUIET = ("--disable-component-update", "--disable-sync")

WITHIN_MS = 300_000

HEIGHTS = """() => [...document.querySelectorAll('.plot')].map(plot =>
    [...plot.querySelectorAll('polyline')].flatMap(line =>
        line.getAttribute('points').split(' ').map(point => Number(point.split(',')[1]))))"""
"""Of each chart, where its points are drawn: pixels from the top."""
BOTTOM = 148
"""Where a chart's zero lies."""


@contextmanager
def browser() -> Iterator[Browser]:
    """The machine's Chromium, for a `with` block."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install .[dev]")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium on this machine: the page was not tried (apt-get install chromium)")
    with playwright.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=path, args=[*QUIET, *MORE_QUIET])
        try:
            yield chromium
        finally:
            chromium.close()


def new_page(chromium: Browser, **options: Any) -> Page:
    """In a profile of its own, which waits for a slow machine as long as the tests do."""
    context = chromium.new_context(**options)
    context.set_default_timeout(WITHIN_MS)
    return context.new_page()


def wait_for(page: Page, holds: Callable[[], bool]) -> None:
    """Lets the page live until `holds()`. The page's policy forbids what Playwright's own wait for a script needs."""
    deadline = time.monotonic() + WITHIN_MS / 1000
    while not holds():
        assert time.monotonic() < deadline, page.inner_text("body")
        page.wait_for_timeout(200)
