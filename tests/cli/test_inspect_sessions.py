"""`kvortex inspect sessions` shows what the server says, for people and as it is."""

from __future__ import annotations

import io
import json
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvortex_cli.main import app
from kvortex_cli.sessions_view import sessions_tables


def line(**changes: Any) -> dict[str, Any]:
    return {
        "session": "chat-1",
        "named": True,
        "salted": False,
        "turns": 3,
        "requests": 0,
        "tokens": 1234,
        "silent_s": 12.4,
        "expected_in_s": 7.6,
        "p_return_60s": 0.83,
        "blocks": 9,
        "vram_blocks": 2,
        "ram_blocks": 9,
        "prefetch": {"issued_blocks": 7, "used_blocks": 5, "wasted_blocks": 1, "late_blocks": 2},
    } | changes


DOCUMENT = {
    "top": 20,
    "engines": [{"enabled": True, "known": 31, "sessions": [line(), line(session="[b]" + "x" * 99, silent_s=None)]}],
}


def text(document: dict[str, Any]) -> str:
    out = io.StringIO()
    for table in sessions_tables(document):
        Console(file=out, width=200, markup=False).print(table)
    return out.getvalue()


def test_a_line_tells_when_it_is_expected_where_its_blocks_are_and_what_was_brought() -> None:
    shown = text(DOCUMENT)
    assert "31 conversations known, the 2 heard of last" in shown
    for part in ("chat-1", "1,234", "12 s", "8 s", "83%", "2 / 9 / 9", "7: 5 / 1 / 2", "talks"):
        assert part in shown


def test_who_is_not_expected_any_more_is_said_and_salts_are_not_shown() -> None:
    document = {
        "top": 1,
        "engines": [{"enabled": True, "known": 1, "sessions": [line(expected_in_s=None, salted=True)]}],
    }
    assert "never" in text(document)
    assert "chat-1 (salted)" in text(document)


def test_a_server_that_tells_no_conversations_apart_says_why() -> None:
    off = {"top": 20, "engines": [{"enabled": False, "known": 0, "sessions": []}]}
    assert "only with kv_cache.prefetch_enabled: true" in text(off)


def test_json_is_the_servers_document(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def get(url: str, **_: Any) -> httpx.Response:
        asked.append(url)
        return httpx.Response(200, json=DOCUMENT)

    monkeypatch.setattr(httpx, "get", get)
    for top in ([], ["--top", "50"]):
        result = CliRunner().invoke(app, ["inspect", "sessions", "--url", "http://h:1", "--json", *top])
        assert result.exit_code == 0
        assert json.loads(result.stdout) == DOCUMENT
    assert asked == ["http://h:1/kvortex/sessions?top=20", "http://h:1/kvortex/sessions?top=50"]
