"""A vLLM server in a process group of its own, for as long as a `with` block runs."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import httpx
import psutil

from kvortex.errors import KVortexError

_DRAIN_WITHIN_S: Final = 45.0
_GONE_WITHIN_S: Final = 15.0
_TAIL_LINES: Final = 80  # vLLM says why its engine died well before its last words
_ERROR: Final = re.compile(r"\b(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b: .+")
# What vLLM's processes say about each other's death; the reason stands before it.
_SECOND_HAND: Final = (
    "Engine core initialization failed",
    "Engine core proc",
    "EngineCore encountered",
    "Worker failed with error",
    "WorkerProc",
)


class ServerFailedError(KVortexError):
    """The server did not start, or died. `log_tail` is the end of what it wrote."""

    def __init__(self, message: str, log_tail: tuple[str, ...]) -> None:
        super().__init__(message)
        self.log_tail = log_tail


class ServerProcess:
    """Starts a server on entering, ready to answer; ends it and all that it started on leaving, whatever happened.

    A process group of its own: Ctrl-C reaches it only through `stop`, and `stop` finds all of it.

    Args:
        command: to run; `--host` and `--port` are added.
        environment: of the process, whole.
        log: where its output goes; overwritten, and kept.
        ready_within_s: from starting until /health answers.
        say: told what takes long.

    Raises:
        ServerFailedError: on entering, when it dies or is not ready in time.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        log: Path,
        ready_within_s: float,
        say: Callable[[str], None],
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.start_s = 0.0
        self._command = [*command, "--host", "127.0.0.1", "--port", str(port)]
        self._environment = environment
        self._ready_within_s = ready_within_s
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        started = time.monotonic()
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    self._command,
                    env=dict(self._environment),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._wait_until_ready(started)
        except BaseException:  # Ctrl-C while it starts must end it, too
            self.stop()
            raise
        self.start_s = time.monotonic() - started
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def check_alive(self, within_s: float = 0.0) -> None:
        """Raises ServerFailedError if the server is no longer running, or ends within so many seconds: one that dies
        closes its connections before it is gone."""
        if self._process is None:
            return
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return
        raise self._died(code)

    def stop(self) -> None:
        """SIGTERM and time to drain, then SIGKILL to what is left; returns when none of it is. Twice is once."""
        process, self._process = self._process, None
        if process is None:
            return
        family = _family(process.pid)
        try:
            process.terminate()
            process.wait(_DRAIN_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._say(f"the server ignores SIGTERM for {_DRAIN_WITHIN_S:.0f} s: killing it")
        finally:
            # Also after a second Ctrl-C. A group that is gone is as it should be.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        # The next server needs the memory of this one.
        _wait_until_gone(family)

    def log_tail(self) -> tuple[str, ...]:
        """The last lines of its output."""
        return tuple(self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])

    def _wait_until_ready(self, started: float) -> None:
        with httpx.Client(base_url=self.url, timeout=5.0, trust_env=False) as client:
            while not _is_healthy(client):
                self.check_alive()
                waited = time.monotonic() - started
                if waited > self._ready_within_s:
                    raise ServerFailedError(f"not ready after {waited:.0f} s", self.log_tail())
                time.sleep(0.25)

    def _died(self, code: int) -> ServerFailedError:
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
        said = reason_in(self.log.read_text(errors="replace"))
        if not said and code == -signal.SIGKILL:
            said = "out of memory? The kernel's log says so if it was"
        return ServerFailedError(f"the server died ({how})" + (f": {said}" if said else ""), self.log_tail())


def reason_in(log: str) -> str:
    """The error that ended a vLLM server, from its output: the last that is not about another's; "" if none."""
    found = [match[0].strip() for line in log.splitlines() if (match := _ERROR.search(line))]
    first_hand = [error for error in found if not any(words in error for words in _SECOND_HAND)]
    return (first_hand or found or [""])[-1]


def free_port() -> int:
    """A port of this machine's loopback on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.RequestError:
        return False


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _wait_until_gone(family: Sequence[psutil.Process]) -> None:
    """Waits for the processes to end, not for long: in some containers nobody buries the dead."""
    deadline = time.monotonic() + _GONE_WITHIN_S
    while any(_is_running(process) for process in family) and time.monotonic() < deadline:
        time.sleep(0.05)


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
