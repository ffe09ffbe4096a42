"""Judges, window after window, whether plain LRU would have done better."""

from __future__ import annotations

from typing import Final

_MARGIN: Final = 0.02
"""Share of the blocks looked up by which LRU must win; at 0.5 % it is called for by chance."""
_MIN_WINDOW: Final = 4096
_LONGEST_STAY: Final = 64
"""Windows."""


class LRUJudge:
    """After a window lost, LRU has the word: for 1, 2, 4, .. windows, less again after windows that were won.

    A window is one cacheful of blocks looked up: in fewer, what is held does not show yet.
    """

    def __init__(self, num_slots: int) -> None:
        self._window = max(_MIN_WINDOW, num_slots)
        self.be_lru = False
        self._own = self._lru = self._blocks = 0
        self._stay = 1
        self._left = 0
        self._grace = False

    def saw(self, own: int, lru: int, blocks: int) -> None:
        """A prompt of `blocks` found `own` of them here, and would have found `lru` in a cache that is LRU."""
        self._own += own
        self._lru += lru
        self._blocks += blocks
        if self._blocks < self._window:
            return
        lost = self._lru - self._own > _MARGIN * self._blocks
        won = self._own > self._lru
        self._own = self._lru = self._blocks = 0
        if self.be_lru:
            self._left -= 1
            if self._left == 0:
                # What is held is still LRU's choice: the next window says nothing of this policy.
                self.be_lru, self._grace = False, True
        elif self._grace:
            self._grace = False
        elif lost:
            self.be_lru, self._left = True, self._stay
            self._stay = min(_LONGEST_STAY, 2 * self._stay)
        elif won:
            self._stay = max(1, self._stay // 2)
