"""`kvortex inspect --watch`: a full screen that is drawn anew at each look, at each new size of the terminal, and gives
the terminal back as it was."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from kvortex.errors import UsageError
from kvortex_cli.console import stdout
from kvortex_cli.server_documents import ServerError

RATES_OVER_S: Final = 10.0
_LEAVE: Final = frozenset("qQ\x03\x04")


@dataclass(slots=True)
class Watched:
    """What has been seen.

    Attributes:
        looks: (time in seconds, document) of the last RATES_OVER_S, oldest first; empty before the first answer.
        error: why the last look failed; None if it did not.
    """

    every_s: float
    looks: deque[tuple[float, dict[str, Any]]] = field(default_factory=deque)
    error: str | None = None

    def look(self, read: Callable[[], dict[str, Any]]) -> None:
        """Asks the server once; a server that is gone is no reason to stop watching."""
        try:
            document = read()
        except ServerError as error:
            self.error = error.message
            return
        now_s = time.monotonic()
        if self.looks and _is_another(document, self.looks[-1][1]):
            self.looks.clear()
        self.looks.append((now_s, document))
        while len(self.looks) > 2 and self.looks[1][0] <= now_s - RATES_OVER_S:
            self.looks.popleft()
        self.error = None

    @property
    def state(self) -> str:
        """One line for the screen's foot."""
        if self.error is None:
            return f"live, every {self.every_s:g} s; q leaves"
        since = f" for {time.monotonic() - self.looks[-1][0]:.0f} s" if self.looks else ""
        return f"no answer{since}, trying on; q leaves: {self.error}"


def _is_another(document: dict[str, Any], before: dict[str, Any]) -> bool:
    """Counters only grow: one that is smaller is another server's. Documents without counters are of one server."""
    if "tokens" not in document:
        return False
    return bool(
        document["uptime_s"] < before["uptime_s"]
        or any(count < before["tokens"][name] for name, count in document["tokens"].items())
    )


Screen = Callable[[Watched, int], list[RenderableType]]
"""The lines of a screen, from what was seen and the number of lines that there is room for."""


def watch_documents(read: Callable[[], dict[str, Any]], screen: Screen, *, every_s: float) -> None:
    """Shows a document of the server until q or Ctrl-C.

    Raises:
        UsageError: there is no terminal to draw on.
        ServerError: the server does not answer the first time: a wrong address is not worth a screen.
    """
    console = stdout()
    if not console.is_terminal or not sys.stdin.isatty():
        raise UsageError("--watch needs a terminal", hint="--json gives one document, for scripts")
    watched = Watched(every_s)
    watched.look(read)
    if watched.error is not None:
        raise ServerError(watched.error)
    with (
        _keys_at_once(),
        _wake_on_resize() as resized,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            live.update(_Page(watched, screen), refresh=True)
            left_s = every_s
            while left_s > 0:
                began_s = time.monotonic()
                ready, _, _ = select.select([sys.stdin, resized], [], [], left_s)
                left_s -= time.monotonic() - began_s
                if sys.stdin in ready and _LEAVE & set(os.read(sys.stdin.fileno(), 64).decode(errors="replace")):
                    return
                if resized in ready:
                    os.read(resized, 64)
                    live.refresh()
            watched.look(read)


@dataclass(frozen=True, slots=True)
class _Page:
    """As many lines as the terminal has when it is drawn, the last one for the state."""

    watched: Watched
    screen: Screen

    def __rich_console__(self, console: Console, _: ConsoleOptions) -> Iterator[RenderableType | Segment]:
        width, height = console.size
        options = console.options.update(width=width, height=None)
        room = height - 1
        parts = self.screen(self.watched, room)
        lines = [line for part in parts for line in console.render_lines(part, options, pad=False)][:room]
        for line in [*lines, *([[]] * (room - len(lines)))]:
            yield from line
            yield Segment.line()
        style = "dim" if self.watched.error is None else "bold"
        yield Text(self.watched.state, style=style, no_wrap=True, overflow="ellipsis", end="")


@contextmanager
def _keys_at_once() -> Iterator[None]:
    """A key is read when it is pressed, and not shown; Ctrl-C still interrupts."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


@contextmanager
def _wake_on_resize() -> Iterator[int]:
    """A file descriptor that can be read once the terminal has another size."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.signal(signal.SIGWINCH, lambda *_: None)
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGWINCH, before)
        os.close(reader)
        os.close(writer)
