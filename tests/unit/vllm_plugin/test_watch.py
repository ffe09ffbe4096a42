"""What a server sees of its own start and of its processes."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Iterator

import pytest

from kvortex.vllm_plugin import server, watch
from kvortex.vllm_plugin.watch import Watch


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


@pytest.fixture
def args(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    monkeypatch.setattr(watch, "_TICK_S", 0.01)
    monkeypatch.setattr(watch, "_TELL_EVERY_S", 0.02)
    return Namespace(host="127.0.0.1", port=listener.getsockname()[1], uds=None)


def test_it_tells_how_far_a_start_is_until_the_server_listens(
    args: Namespace, listener: socket.socket, capfd: pytest.CaptureFixture[str]
) -> None:
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), name="EngineCore")
    watching = Watch(args, threading.Event())
    told = ""

    def until(words: str) -> str:
        text = ""
        for _ in range(3000):
            text += capfd.readouterr().err
            if words in text:
                return text
            time.sleep(0.01)
        raise AssertionError(text)

    try:
        told = until("the engine is not there yet")
        child.start()
        until("of the engine with ")
        listener.listen()
        for _ in range(3000):
            if watching._ready:
                break
            time.sleep(0.01)
        assert watching._ready
        capfd.readouterr()
        time.sleep(0.1)
        assert capfd.readouterr().err == ""
    finally:
        child.kill()
        watching.close()
    assert re.match(r"kvortex: starting for \d+ s, ", told)


def test_it_knows_how_each_process_ended(args: Namespace) -> None:
    context = multiprocessing.get_context("spawn")
    killed = context.Process(target=time.sleep, args=(60,), name="EngineCore")
    may_end = context.Event()
    good = context.Process(target=may_end.wait, name="Good")
    watching = Watch(args, threading.Event())
    killed.start()
    good.start()
    for _ in range(3000):  # a tick that sees both
        if len(watching._processes) == 2:
            break
        time.sleep(0.01)
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGKILL)
    may_end.set()
    killed.join(60)
    good.join(60)
    watching.close()
    assert watching.exits() == {"EngineCore": -signal.SIGKILL, "Good": 0}


@pytest.mark.parametrize("gets_ready", [False, True])
def test_a_server_that_was_asked_to_end_while_it_starts_is_asked_once_more(
    args: Namespace, monkeypatch: pytest.MonkeyPatch, listener: socket.socket, gets_ready: bool
) -> None:
    """After a while, or as soon as it is ready: then it has not heard."""
    monkeypatch.setattr(watch, "_ASK_AGAIN_S", 1000.0 if gets_ready else 0.05)
    asked: list[tuple[int | None, int]] = []
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: asked.append((thread, number)))
    to_end = threading.Event()
    watching = Watch(args, to_end)
    time.sleep(0.1)
    assert asked == []
    to_end.set()
    time.sleep(0.1)
    if gets_ready:
        assert asked == []
        listener.listen()
    for _ in range(3000):
        if asked:
            break
        time.sleep(0.01)
    time.sleep(0.2)
    watching.close()
    assert asked == [(threading.main_thread().ident, signal.SIGTERM)]


def test_a_server_that_is_ready_is_not_asked_again(
    args: Namespace, monkeypatch: pytest.MonkeyPatch, listener: socket.socket
) -> None:
    monkeypatch.setattr(watch, "_ASK_AGAIN_S", 0.01)
    asked: list[int] = []
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: asked.append(number))
    listener.listen()
    to_end = threading.Event()
    watching = Watch(args, to_end)
    for _ in range(3000):
        if watching._ready:
            break
        time.sleep(0.01)
    to_end.set()
    time.sleep(0.2)
    watching.close()
    assert asked == []


def test_processes_are_spawned_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "VLLM_WORKER_MULTIPROC_METHOD"
    monkeypatch.setenv(variable, "fork")
    server.spawn_processes()
    assert os.environ[variable] == "fork"
    monkeypatch.delenv(variable)
    server.spawn_processes()
    assert os.environ[variable] == "spawn"
    monkeypatch.delenv(variable)
