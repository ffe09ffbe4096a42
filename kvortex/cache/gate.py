"""Whether a request had better wait: VRAM would take blocks for it that are not copied yet.

To copy a block takes a tenth of the time of computing it, or less. Sixteen conversations that return in one step may
take more of VRAM than any share kept clean: the first of them waits until the blocks that it displaces are safe, those
behind it wait for their turn, and the planner copies first what they wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

MAX_WAIT_S: Final = 1.0
"""The first in line is let through after this, whatever it costs. Copies for 128K tokens of an 8B model take 0.4 s."""


class Line(NamedTuple):
    """Requests that wait, in VRAM blocks that they want: all of them, and the first."""

    blocks: int
    first_blocks: int


NOBODY: Final = Line(0, 0)


class Gate:
    """One step's line of requests that wait. EngineCore process, scheduler thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._first: str | None = None
        self._first_since = 0.0
        self._is_waiting = False
        self._first_overdue = False
        self._line = NOBODY
        self.waited = 0
        """Requests that were first in line so far."""
        self.waited_s = 0.0
        """How long those of them have waited that were let through."""
        self.overdue = 0
        """Those of them that were let through because they had waited for too long."""

    def must_wait(self, request_id: str, blocks: int, at_stake: Callable[[], bool]) -> bool:
        """True: do not admit this request in this step. Requests ask in the order in which they would be admitted.

        Args:
            blocks: VRAM blocks that it would take.
            at_stake: whether one of those is about to be copied, or being copied. Asked for the first in line only.
        """
        if self._line is NOBODY:
            if not self._holds_up(request_id, at_stake):
                return False
            self._line = Line(0, blocks)
        self._line = self._line._replace(blocks=self._line.blocks + blocks)
        return True

    def _holds_up(self, request_id: str, at_stake: Callable[[], bool]) -> bool:
        if not at_stake():
            self._let_through(request_id)
            return False
        now_s = self._clock()
        if self._first != request_id:
            self._first, self._first_since = request_id, now_s
            self._is_waiting = True
            self._first_overdue = False
            self.waited += 1
        if now_s - self._first_since < MAX_WAIT_S:
            return True
        self._let_through(request_id)
        self.overdue += not self._first_overdue
        self._first_overdue = True
        return False

    def _let_through(self, request_id: str) -> None:
        if self._first == request_id and self._is_waiting:
            self.waited_s += self._clock() - self._first_since
            self._is_waiting = False

    def take_line(self) -> Line:
        """Those that have to wait in this step; the line forms anew in the next."""
        line, self._line = self._line, NOBODY
        return line
