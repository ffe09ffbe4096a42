"""A completion server on loopback that answers, or fails, as it is told: in this process or as a program.

As a program it takes vLLM's command line: MODEL is a list of behaviours for its requests, such as `good` or
`good,status_500`, and is repeated; the options beside --port are ignored.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Behaviour(StrEnum):
    """What one request meets."""

    GOOD = "good"
    NO_TOKEN_IDS = "no_token_ids"
    ONE_TOKEN = "one_token"
    ALL_AT_ONCE = "all_at_once"
    STATUS_500 = "status_500"
    CLOSE_BEFORE = "close_before"
    CLOSE_MID_STREAM = "close_mid_stream"
    END_MID_STREAM = "end_mid_stream"
    EMPTY = "empty"
    ERROR_IN_STREAM = "error_in_stream"
    NOT_A_STREAM = "not_a_stream"
    HANG = "hang"
    DIE = "die"
    DIE_SLOWLY = "die_slowly"
    """Its connections are closed before it is gone."""


class StubServer(ThreadingHTTPServer):
    """Answers with the token ids of `answer_to`, after `delay_s` and then each after `token_delay_s`.

    Attributes:
        prompts: of the completion requests, in the order in which they came.
        stats: the document of /kvortex/stats; None is a server without it.
        metrics: the page of /metrics; None is a server without it.
        blocks: the document of /kvortex/blocks; None is a server without it.
        asked: the paths of GETs, with their queries.
        hinted: the sessions of hints, each with the number of completions asked for before it.
        hint_status: of the answer to a hint.
    """

    daemon_threads = True

    def __init__(
        self, choose: Callable[[int], Behaviour], *, port: int = 0, delay_s: float = 0.0, token_delay_s: float = 0.0
    ) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.choose = choose
        self.delay_s = delay_s
        self.token_delay_s = token_delay_s
        self.prompts: list[list[int]] = []
        self.headers: list[dict[str, str]] = []
        self.stats: dict[str, Any] | None = None
        self.metrics: str | None = None
        self.blocks: dict[str, Any] | None = None
        self.asked: list[str] = []
        self.hinted: list[tuple[str, int]] = []
        self.hint_status = 202
        self.max_model_len = 100_000
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away are what a stub is for."""


def answer_to(prompt: list[int], num_tokens: int) -> list[int]:
    """Token ids that depend on the prompt."""
    return [(sum(prompt) + i) % 500 for i in range(num_tokens)]


@contextmanager
def stub_server(behaviours: Iterable[Behaviour], **options: Any) -> Iterator[StubServer]:
    """A server for a `with` block: one behaviour for each request in turn, and the last one for all others."""
    given = list(behaviours)
    server = StubServer(lambda index: given[min(index, len(given) - 1)], **options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StubServer

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        models = [{"id": "stub", "root": "/no/such/model", "max_model_len": self.server.max_model_len}]
        documents = {"/health": {}, "/version": {"version": "0.32.0"}, "/v1/models": {"data": models}}
        self.server.asked.append(self.path)
        if self.path.startswith("/kvortex/blocks") and self.server.blocks is not None:
            self._send(200, json.dumps(self.server.blocks))
        elif self.path == "/kvortex/stats" and self.server.stats is not None:
            self._send(200, json.dumps(self.server.stats))
        elif self.path == "/metrics" and self.server.metrics is not None:
            self._send(200, self.server.metrics)
        elif self.path in documents:
            self._send(200, json.dumps(documents[self.path]))
        else:
            self._send(404, json.dumps({"detail": "Not Found"}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/kvortex/prefetch":
            with self.server.lock:
                self.server.hinted.append((body["session"], len(self.server.prompts)))
            self._send(self.server.hint_status, "{}")
            return
        with self.server.lock:
            index = len(self.server.prompts)
            self.server.prompts.append(body["prompt"])
            self.server.headers.append(dict(self.headers))
            self.server.in_flight += 1
            self.server.most_in_flight = max(self.server.most_in_flight, self.server.in_flight)
        try:
            self._answer(self.server.choose(index), body)
        finally:
            with self.server.lock:
                self.server.in_flight -= 1

    def _answer(self, behaviour: Behaviour, body: dict[str, Any]) -> None:
        time.sleep(self.server.delay_s)
        if behaviour in (Behaviour.DIE, Behaviour.DIE_SLOWLY):
            print("EngineCore: torch.OutOfMemoryError: no room for the KV cache", flush=True)
            if behaviour is Behaviour.DIE:
                os._exit(3)
            threading.Timer(1.0, os._exit, (3,)).start()
            self.server.socket.close()
            self.close_connection = True
            return
        if behaviour is Behaviour.STATUS_500:
            self._send(500, json.dumps({"error": {"message": "the engine is busy", "code": 500}}))
            return
        if behaviour is Behaviour.CLOSE_BEFORE:
            self.close_connection = True
            return
        if behaviour is Behaviour.HANG:
            self.server.closing.wait()
            self.close_connection = True
            return
        if behaviour is Behaviour.NOT_A_STREAM:
            self._send(200, "<html>a login page</html>")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._stream(behaviour, answer_to(body["prompt"], body["max_tokens"]))

    def _stream(self, behaviour: Behaviour, ids: list[int]) -> None:
        if behaviour is Behaviour.EMPTY:
            self._end(["[DONE]"])
            return
        if behaviour is Behaviour.ONE_TOKEN:
            ids = ids[:1]
        if behaviour in (Behaviour.CLOSE_MID_STREAM, Behaviour.END_MID_STREAM, Behaviour.ERROR_IN_STREAM):
            ids = ids[: len(ids) // 2]
        at_once = [ids] if behaviour is Behaviour.ALL_AT_ONCE else [[i] for i in ids]
        for part in at_once:
            choice: dict[str, Any] = {"index": 0, "text": " ".join(map(str, part)), "finish_reason": None}
            if behaviour is not Behaviour.NO_TOKEN_IDS:
                choice["token_ids"] = part
            self._chunk(json.dumps({"choices": [choice]}))
            time.sleep(self.server.token_delay_s)
        if behaviour is Behaviour.CLOSE_MID_STREAM:
            self.close_connection = True
        elif behaviour is Behaviour.END_MID_STREAM:
            self._end([])
        elif behaviour is Behaviour.ERROR_IN_STREAM:
            self._end([json.dumps({"error": {"message": "the engine is gone"}}), "[DONE]"])
        else:
            usage = {"prompt_tokens": 1, "completion_tokens": len(ids)}
            self._end([json.dumps({"choices": [], "usage": usage}), "[DONE]"])

    def _chunk(self, data: str) -> None:
        line = f"data: {data}\n\n".encode()
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        self.wfile.flush()

    def _end(self, last: list[str]) -> None:
        for data in last:
            self._chunk(data)
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json" if body[:1] in b"{[" else "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main(argv: list[str]) -> None:
    """Serves until SIGTERM. MODEL may also be `dies_at_start`, `never_ready` or `ignores_sigterm`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    args, _ = parser.parse_known_args(argv)
    if args.model == "dies_at_start":
        print("(EngineCore) ERROR NotImplementedError: offloading needs a GPU")
        print("RuntimeError: Engine core initialization failed. See root cause above.")
        sys.exit(1)
    if args.model == "never_ready":
        time.sleep(600)
    behaviours = [Behaviour.GOOD]
    if args.model == "ignores_sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child {child.pid}", flush=True)
    else:
        behaviours = [Behaviour(name) for name in args.model.split(",")]
    cycle = itertools.cycle(behaviours)
    StubServer(lambda _: next(cycle), port=args.port).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
