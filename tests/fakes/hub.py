"""A Hugging Face hub on loopback that has models by the answer they get.

`o/code-403` is answered with 403, `o/gated-401` as the real one answers for a gated model, `o/slow-200` late, and
`o/llama-200` is there, its weights in one file, `o/shards-200` with its weights in several.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

CONFIG: Final = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
}
WEIGHT_BYTES: Final = 16_060_522_496


@dataclass
class FakeHub:
    """
    Attributes:
        tokens: what each request had in its Authorization header; "" without one.
    """

    url: str
    tokens: list[str] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        owner, _, model = self.path.lstrip("/").partition("/")
        if owner != "o":  # the client has questions of its own
            self.send_error(404)
            return
        self.hub.tokens.append(self.headers.get("Authorization", "").removeprefix("Bearer "))
        kind, code = model.split("/")[0].split("-")
        if kind == "slow":
            time.sleep(8)
        file = self.path.rsplit("/", 1)[1]
        body, length, error = _file(kind, file) if code == "200" else (b"", 0, "")
        self.send_response(404 if error else int(code))
        error = "GatedRepo" if kind == "gated" else "RepoNotFound" if code in ("401", "404") else error
        if error:
            self.send_header("X-Error-Code", error)
        if code == "200":
            self.send_header("ETag", f'"{kind}-{file}"')
            self.send_header("X-Repo-Commit", "1" * 40)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_request(self, *_: object) -> None:
        pass


def _file(kind: str, name: str) -> tuple[bytes, int, str]:
    """Content, length and, where there is no such file, the Hub's word for it."""
    if name == "config.json":
        body = json.dumps(CONFIG).encode()
    elif (kind, name) == ("llama", "model.safetensors"):
        return b"", WEIGHT_BYTES, ""
    elif (kind, name) == ("shards", "model.safetensors.index.json"):
        body = json.dumps({"metadata": {"total_size": WEIGHT_BYTES}, "weight_map": {}}).encode()
    else:
        return b"", 0, "EntryNotFound"
    return body, len(body), ""


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub = handler.hub = FakeHub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
