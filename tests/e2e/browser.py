"""Chromium without a window, driven by Playwright; skips where either is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Nothing of the browser's own may look for the outside.
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
MORE_QUIET = ("--disable-component-update", "--disable-sync")


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
