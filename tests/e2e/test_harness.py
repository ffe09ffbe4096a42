"""The servers that tests start: what comes in the way between processes must not fail a test of something else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.e2e import server as harness
from tests.e2e.server import ENDED_WITHIN_S, Server, inherited_environment, is_running, with_defaults

HEALTHY = """
import http.server, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Healthy).serve_forever()
"""
STAND_IN = [sys.executable, "-c", HEALTHY]
"""Answers as a server does that is ready."""


@pytest.fixture
def another(tmp_path: Path) -> Iterator[Server]:
    """A server of somebody else."""
    with Server("", command=STAND_IN, log=tmp_path / "another") as running:
        yield running


def test_a_port_that_is_taken_meanwhile_is_no_fault(another: Server, tmp_path: Path, monkeypatch) -> None:
    """Whoever has it answers that it is ready."""
    ports = iter([another.port, harness.free_port()])
    monkeypatch.setattr(harness, "free_port", lambda: next(ports))
    with Server("", command=STAND_IN, log=tmp_path / "log") as running:
        assert running.port != another.port
        assert str(running.client.base_url) == running.url
        assert running.client.get("/health").status_code == 200


def test_a_port_that_a_test_asks_for_is_not_replaced(another: Server, tmp_path: Path) -> None:
    taken = Server("", command=STAND_IN, port=another.port, log=tmp_path / "log")
    with pytest.raises(AssertionError, match="Address already in use"), taken:
        pass


def test_a_server_that_ends_for_another_reason_is_not_started_again(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    program = f"open({str(starts)!r}, 'a').write('x'); raise SystemExit('no weights')"
    failing = Server("", command=[sys.executable, "-c", program], log=tmp_path / "log")
    with pytest.raises(AssertionError, match="no weights"), failing:
        pass
    assert starts.read_text() == "x"


def test_kvortex_says_that_a_port_is_taken_in_words_that_are_known(tiny_llama: str, another: Server, tmp_path) -> None:
    refused = Server(tiny_llama, port=another.port, log=tmp_path / "log")
    refused.start()
    assert refused.process.wait(ENDED_WITHIN_S) != 0
    assert harness._TAKEN.search(refused.tail())


def test_a_process_that_ends_while_it_is_looked_at_listens_on_nothing() -> None:
    """One that nobody has buried, and one that is gone."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    process = psutil.Process(ended.pid)
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(process)
    with socket.socket() as tcp:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        family = SimpleNamespace(family=lambda: [process, psutil.Process()])
        for end in (lambda: None, ended.wait):
            end()
            assert tcp.getsockname() in Server.listening(family)[0]


def test_the_tests_own_variables_reach_no_command(monkeypatch) -> None:
    monkeypatch.setenv("KVORTEX_SOAK_S", "1")
    assert "KVORTEX_SOAK_S" not in inherited_environment()
    assert inherited_environment(KVORTEX_NUM_STREAMS="3")["KVORTEX_NUM_STREAMS"] == "3"


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ([], ["--size", "4", "--eager", "--set", "a.x=1", "--set", "a.y=2"]),
        (["--size", "8"], ["--eager", "--set", "a.x=1", "--set", "a.y=2"]),
        (["--size=8", "--more"], ["--eager", "--set", "a.x=1", "--set", "a.y=2"]),
        (["--no-eager"], ["--size", "4", "--set", "a.x=1", "--set", "a.y=2"]),
        (["--set", "a.x=3"], ["--size", "4", "--eager", "--set", "a.y=2"]),
        (["--sizes", "8"], ["--size", "4", "--eager", "--set", "a.x=1", "--set", "a.y=2"]),
    ],
)
def test_an_option_that_is_given_replaces_the_default(given: list[str], left: list[str]) -> None:
    defaults = [("--size", "4"), ("--eager",), ("--set", "a.x=1"), ("--set", "a.y=2")]
    assert with_defaults(defaults, given) == [*left, *given]
