"""A command in a real terminal (a pty) of a given size, and what its user sees there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable

_CLAIM = (
    "import fcntl, signal, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.default_int_handler)"
)
"""Makes the terminal the command's own, as a shell does: it is then told of a new size, and Ctrl-C ends it, also where
the tests run in the background of a script, with SIGINT ignored."""
_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_HOME = "\x1b[H"


class Terminal:
    """`kvortex` in a terminal, for a `with` block."""

    def __init__(self, *arguments: str, columns: int = 80, lines: int = 24) -> None:
        self._command = [sys.executable, "-c", f"{_CLAIM}; from kvortex_cli.main import main; main()", *arguments]
        self._size = (columns, lines)
        self.received = b""

    def __enter__(self) -> Terminal:
        self._master, slave = pty.openpty()
        self._set_size(*self._size)
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            self._command,
            **{"stdin": slave, "stdout": slave, "stderr": slave},
            env={**environment, "TERM": "xterm-256color"},
            start_new_session=True,
        )
        os.close(slave)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        os.close(self._master)

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def resize(self, columns: int, lines: int) -> None:
        """As a user drags the window: the terminal has the new size, and its program is told."""
        self.received = b""
        self._set_size(columns, lines)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    @property
    def rows(self) -> list[str]:
        """The lines of the picture drawn last: each picture begins at the upper left corner."""
        picture = self.received.decode(errors="ignore").rpartition(_HOME)[2]
        return [row.rstrip() for row in _SEQUENCE.sub("", picture).split("\r\n")]

    @property
    def text(self) -> str:
        return "\n".join(self.rows)

    def wait_for(self, holds: Callable[[list[str]], bool], within_s: float = 60.0) -> list[str]:
        """The rows once `holds(rows)`."""
        deadline = time.monotonic() + within_s
        while not holds(self.rows):
            assert time.monotonic() < deadline, f"not on the screen:\n{self.text}"
            self._read(0.1)
        return self.rows

    def wait_for_end(self, within_s: float = 30.0) -> int:
        """The command's exit code."""
        deadline = time.monotonic() + within_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it does not end:\n{self.text}"
            self._read(0.05)
        self._read(0.05)
        return self.process.returncode

    def _read(self, wait_s: float) -> None:
        ready, _, _ = select.select([self._master], [], [], wait_s)
        if not ready:
            return
        try:
            data = os.read(self._master, 65536)
        except OSError:
            time.sleep(wait_s)  # the program has closed its side
            return
        self.received += data
