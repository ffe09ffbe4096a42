"""Watches a server from inside: how far its start is, and how its processes end."""

from __future__ import annotations

import math
import multiprocessing
import signal
import socket
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterable
from multiprocessing.process import BaseProcess

from kvortex.sizes import format_bytes

_TICK_S = 0.5
_TELL_EVERY_S = 15.0
_ASK_AGAIN_S = 10.0
"""After SIGTERM, while the engine starts: longer than vLLM, where it has heard of it, takes to end its engine."""


class Watch:
    """A thread of the server's process, from before vLLM starts its engine to the end."""

    def __init__(self, args: Namespace, asked_to_end: threading.Event) -> None:
        self._args = args
        self._asked_to_end = asked_to_end
        self._ask_again_at: float | None = None
        self._processes: dict[int, BaseProcess] = {}
        self._ready = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvortex-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; what it has seen stays."""
        self._closing.set()
        self._thread.join()

    def exits(self) -> dict[str, int]:
        """Exit code, negative for a signal, of each process that has ended."""
        self._look()
        return {process.name: process.exitcode for process in self._processes.values() if process.exitcode is not None}

    def _look(self) -> None:
        for process in multiprocessing.active_children():
            if process.pid is not None:
                self._processes[process.pid] = process

    def _ask_again_if_dropped(self, now: float) -> None:
        """Once: vLLM drops a SIGTERM that comes while its engine starts (`zmq_socket_ctx`). Then it waits for an engine
        that it does not answer any more, or goes on as if nothing had come."""
        if self._ask_again_at is None and self._asked_to_end.is_set():
            self._ask_again_at = math.inf if self._ready else now + _ASK_AGAIN_S
        self._ready = self._ready or is_listening(self._args)
        if self._ask_again_at is not None and self._ask_again_at < (math.inf if self._ready else now):
            self._ask_again_at = math.inf
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGTERM)  # it sleeps in a call that only its own signals end

    def _run(self) -> None:
        begin = told = time.monotonic()
        while not self._closing.wait(_TICK_S):
            self._look()
            now = time.monotonic()
            self._ask_again_if_dropped(now)
            if not self._ready and self._ask_again_at is None and now - told >= _TELL_EVERY_S:
                told = now
                shown = _memory_in_words(self._processes)
                print(f"kvortex: starting for {now - begin:.0f} s, {shown}", file=sys.stderr, flush=True)


def is_listening(args: Namespace) -> bool:
    """Whether the server takes connections: vLLM listens when its engine is ready."""
    uds = getattr(args, "uds", None)
    address = uds or (_reachable(args.host), args.port)
    family = socket.AF_UNIX if uds else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(_TICK_S)
        return probe.connect_ex(address) == 0


def _reachable(host: str | None) -> str:
    """An address to connect to, of one to listen on."""
    if host is None or host in ("", "0.0.0.0"):
        return "127.0.0.1"
    return "::1" if host == "::" else host


def _memory_in_words(pids: Iterable[int]) -> str:
    """What grows while a model is loaded: of these processes and all below them."""
    import psutil

    resident, count = 0, 0
    for pid in pids:
        try:
            top = psutil.Process(pid)
            for process in (top, *top.children(recursive=True)):
                resident += process.memory_info().rss
                count += 1
        except psutil.Error:
            continue
    if not count:
        return "the engine is not there yet"
    return f"{count} process{'es' if count > 1 else ''} of the engine with {format_bytes(resident)} of RAM"
