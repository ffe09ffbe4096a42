"""A clock that moves only when told."""

from __future__ import annotations


class FakeClock:
    """Seconds, monotonic; call it to read it."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
