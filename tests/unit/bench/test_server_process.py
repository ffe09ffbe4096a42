"""Servers that start, fail and end in every way."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from kvortex.bench import server_process
from kvortex.bench.server_process import ServerFailedError, ServerProcess, reason_in
from tests.fakes import stub_server

STUB = (sys.executable, stub_server.__file__)


def stubs() -> list[psutil.Process]:
    """Those that run now. They may not be this process's only children: multiprocessing has a resource tracker."""
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and stub_server.__file__ in child.cmdline()
    ]


def server(behaviour: str, tmp_path: Path, *, ready_within_s: float = 30.0) -> ServerProcess:
    return ServerProcess(
        [*STUB, behaviour], {}, log=tmp_path / "log", ready_within_s=ready_within_s, say=lambda _: None
    )


def test_it_is_ready_inside_and_gone_after(tmp_path: Path) -> None:
    with server("good", tmp_path) as running:
        assert httpx.get(running.url + "/health").status_code == 200
        assert running.start_s > 0
        running.check_alive()
    with pytest.raises(httpx.ConnectError):
        httpx.get(running.url + "/health")


def test_one_that_dies_at_start_says_why_and_keeps_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ServerFailedError) as failed, server("dies_at_start", tmp_path):
        raise AssertionError("not reached")
    assert failed.value.message == "the server died (exit 1): NotImplementedError: offloading needs a GPU"
    assert "Engine core initialization failed" in failed.value.log_tail[-1]


def test_one_that_never_gets_ready_is_ended_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(ServerFailedError, match="not ready after"), server("never_ready", tmp_path, ready_within_s=0.5):
        raise AssertionError("not reached")
    assert stubs() == []


def test_one_that_ignores_sigterm_is_killed_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "_DRAIN_WITHIN_S", 0.2)
    with server("ignores_sigterm", tmp_path) as running:
        child = psutil.Process(int(running.log.read_text().split()[1]))
        assert child.is_running()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_an_interruption_ends_it(tmp_path: Path) -> None:
    pids: list[int] = []

    def interrupted() -> None:
        with server("good", tmp_path):
            pids.extend(stub.pid for stub in stubs())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_one_that_died_is_noticed(tmp_path: Path) -> None:
    with server("die", tmp_path) as running:
        (process,) = stubs()
        with pytest.raises(httpx.TransportError):
            httpx.post(running.url + "/v1/completions", json={"prompt": [1], "max_tokens": 1})
        while process.status() != psutil.STATUS_ZOMBIE:  # waiting for it by psutil would take its exit code away
            time.sleep(0.01)
        with pytest.raises(ServerFailedError, match=r"exit 3.*OutOfMemoryError: no room"):
            running.check_alive()


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("INFO fine", ""),
        (
            "E  ValueError: bad size\nsh: RuntimeError: Engine core initialization failed. See above",
            "ValueError: bad size",
        ),
        ("torch.cuda.OutOfMemoryError: 3 GiB\nINFO", "torch.cuda.OutOfMemoryError: 3 GiB"),
        ("RuntimeError: Engine core initialization failed.", "RuntimeError: Engine core initialization failed."),
        ("ValueError: first\nTypeError: second", "TypeError: second"),
    ],
)
def test_the_reason_in_a_log_is_the_first_hand_error(log: str, reason: str) -> None:
    assert reason_in(log) == reason
