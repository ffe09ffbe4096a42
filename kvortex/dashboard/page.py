"""Two self-contained HTML documents: the dashboard, and the one that asks for the API key before it."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from kvortex.cache.verdict import WORDS


class Pages(NamedTuple):
    """Attributes:
    dashboard: reads `stats` beside its own address, again and again; holds no data of its own.
    key_form: asks for the API key, and becomes the dashboard with it.
    policy: the Content-Security-Policy of both: these scripts and styles, this server, nothing else.
    """

    dashboard: str
    key_form: str
    policy: str


@cache
def pages() -> Pages:
    """Both documents, put together once."""
    style = _part("style.css")
    script = "\n".join(_part(name) for name in ("format.js", "chart.js", "dashboard.js"))
    script = script.replace("/*reasons*/{}", json.dumps({miss.value: words for miss, words in WORDS.items()}))
    key_script = _part("key_form.js")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(script)} {_hash(key_script)}",
            # Bars have widths: styles set by the scripts, through the object model, need no permission.
            f"style-src {_hash(style)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return Pages(_document("dashboard.html", style, script), _document("key_form.html", style, key_script), policy)


def _document(name: str, style: str, script: str) -> str:
    return _part(name).replace("/*style*/", style).replace("/*script*/", script)


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
