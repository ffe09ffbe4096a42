"""How many of the sessions that go on are announced, and how long before."""

from __future__ import annotations

from typing import Final

HINT_LASTS_S: Final = 60.0
"""An announcement is forgotten after that."""

_PRIOR_RETURNS: Final = 8.0
_REMEMBERED_RETURNS: Final = 64.0

_PRIOR_LEAD_S: Final = 5.0
"""Somebody types."""


class Announcements:
    """Learned from all sessions, the last few dozen returns count. Scheduler thread."""

    def __init__(self) -> None:
        self._announced = 0.0
        self._returns = _PRIOR_RETURNS
        self._leads_s = _PRIOR_LEAD_S
        self._leads = 1.0

    def returned(self, lead_s: float | None) -> None:
        """A session goes on, which was announced `lead_s` ago; None for not at all."""
        self._returns += 1
        if lead_s is not None:
            self._announced += 1
            self._leads_s += lead_s
            self._leads += 1
        if self._returns > _REMEMBERED_RETURNS:
            self._returns /= 2
            self._announced /= 2
            self._leads_s /= 2
            self._leads /= 2

    @property
    def share(self) -> float:
        """Of the sessions that go on, those that are announced."""
        return self._announced / self._returns

    @property
    def lead_s(self) -> float:
        """How long before, on average."""
        return self._leads_s / self._leads
