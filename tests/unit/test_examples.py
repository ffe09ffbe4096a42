"""What the clients of examples/ send and print, against servers that are none."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def client(answer: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    return httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer))


# ---- prefetch_hint.py -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (202, {"ram_blocks": 3, "vram_blocks": 1}, "(3 blocks on their way, 1 there)"),
        (409, {"detail": "this server does not prefetch"}, "(no hint: 409 "),
        (429, {"detail": "too many hints wait already"}, "(no hint: 429 "),
    ],
)
def test_a_hint_says_what_became_of_it(capsys, status, body, said):
    with client(lambda request: httpx.Response(status, json=body)) as http:
        load("prefetch_hint").Chat(http, "model")._hint()
    error = capsys.readouterr().err
    assert said in error
    assert status == 202 or body["detail"] in error


def test_the_server_of_the_header_prefetches():
    header = load("prefetch_hint").__doc__ or ""
    assert "kvortex serve MODEL --set kv_cache.prefetch_enabled=true" in header


# ---- openai_sessions.py ---------------------------------------------------------------------------------------------


class StubServer:
    """Answers the OpenAI client and the counters; keeps the names of conversations, and what each was about."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"object": "list", "data": [{"id": "m", "object": "model"}]})
        if request.url.path == "/kvortex/stats":
            return httpx.Response(200, json={"tokens": {"vram_hit": 0, "ram_hit": 0, "computed": 0}})
        body = json.loads(request.content)
        self.asked.append((body["prompt_cache_key"], body["messages"][0]["content"]))
        message = {"role": "assistant", "content": "Yes."}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return httpx.Response(200, json={"id": "1", "object": "chat.completion", "choices": [choice]})


def play(monkeypatch: pytest.MonkeyPatch, documents: list[Path]) -> StubServer:
    openai: Any = pytest.importorskip("openai")
    module: Any = load("openai_sessions")
    stub = StubServer()

    def stubbed(**arguments: Any) -> Any:
        return openai.OpenAI(**arguments, http_client=client(stub))

    monkeypatch.setattr(module, "OpenAI", stubbed)
    monkeypatch.setattr(module, "httpx", SimpleNamespace(Client=lambda **_: client(stub)))
    monkeypatch.setattr(sys, "argv", ["openai_sessions.py", *map(str, documents)])
    module.main()
    return stub


def test_each_file_of_each_run_is_a_conversation_of_its_own(monkeypatch, tmp_path, capsys):
    documents = [tmp_path / folder / "report.txt" for folder in ("a", "b")]
    for document in documents:
        document.parent.mkdir()
        document.write_text(f"about {document.parent.name}")
    runs = []
    for _ in range(2):
        with monkeypatch.context() as patch:
            runs.append(play(patch, documents))
    for stub in runs:
        assert [text for _, text in stub.asked] == ["about a", "about b"] * 3
        assert len(set(stub.asked)) == 2, "one name in every turn"
    assert len({name for stub in runs for name, _ in stub.asked}) == 4
    out = capsys.readouterr().out
    assert all(f"{document}, turn 3: 0 tokens from VRAM" in out for document in documents)
