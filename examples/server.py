"""A `kvortex serve` for as long as a `with` block runs."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

READY_WITHIN_S = 300.0
STOPPED_WITHIN_S = 30.0
LOG_TAIL_LINES = 80  # vLLM says why its engine died well before its last words


class ServerError(Exception):
    """The server died or did not become ready; the message ends with the tail of its log."""


class Server:
    """Starts `kvortex serve ARGUMENTS` on a free port of this machine and stops it again, whatever happens.

    The server runs in a process group of its own, so that Ctrl-C reaches it only through `stop`, and so that
    `stop` finds whatever it started.

    Args:
        arguments: what follows `kvortex serve`; without `--port`.
        say: told, in a few words, what is going on.

    Raises:
        ServerError: on entering, when it dies or is not ready in time.
    """

    def __init__(self, arguments: Sequence[str], *, say: Callable[[str], None]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        with tempfile.NamedTemporaryFile(prefix="kvortex-demo-", suffix=".log", delete=False) as log:
            self.log = Path(log.name)  # stays: it is what there is to look at afterwards
        # No proxy stands between this machine and itself.
        self.http = httpx.Client(base_url=self.url, timeout=120.0, trust_env=False)
        self._command = [kvortex(), "serve", *arguments, "--port", str(self.port)]
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
            self._wait_until_ready()
        except BaseException:  # Ctrl-C while it starts must stop it, too
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if isinstance(error, Exception):  # not Ctrl-C
            self._say(f"the server, until then:\n{self.tail()}")

    def stop(self) -> None:
        """SIGTERM and time to drain, then SIGKILL to all that is left of the group. Twice is once."""
        self.http.close()
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOPPED_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._say(f"the server ignores SIGTERM for {STOPPED_WITHIN_S:.0f} s: killing it")
        finally:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # nothing left, as it should be
            self._process.wait()

    def tail(self) -> str:
        """The last lines of the server's log, with the name of the whole."""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"--- the end of {self.log}", *lines])

    def _start(self) -> None:
        self._say(f"starting {' '.join(self._command)} (log: {self.log})")
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _wait_until_ready(self) -> None:
        assert self._process is not None, "_start comes first"
        started = time.monotonic()
        while not self._healthy():
            waited = time.monotonic() - started
            if self._process.poll() is not None:
                raise ServerError(f"the server died (exit {self._process.returncode})\n{self.tail()}")
            if waited > READY_WITHIN_S:
                raise ServerError(f"the server is not ready after {waited:.0f} s\n{self.tail()}")
            time.sleep(0.5)
        self._say(f"ready after {time.monotonic() - started:.0f} s")

    def _healthy(self) -> bool:
        try:
            return self.http.get("/health", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False


def kvortex() -> str:
    """The `kvortex` command of the Python that runs this, or the one on the path."""
    beside = Path(sys.executable).with_name("kvortex")
    return str(beside) if beside.exists() else shutil.which("kvortex") or "kvortex"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
