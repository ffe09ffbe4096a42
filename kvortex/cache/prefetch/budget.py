"""How much may be prefetched, by what became of it so far.

A prefetched block is `issued`, and then `used` by a request or `wasted`: given up by VRAM before anybody asked, or its
load failed. Wasted ones may make up WASTE_SHARE of all blocks loaded, requests' own loads included, and a small credit
to begin with, without which nothing would ever be tried. Blocks whose fate is open count with the share of those that
were wasted lately, each cause for itself. Hints and guesses share what may be wasted, and a part of it is always there
for either: a client whose hints are worth nothing does not stop the guesses, nor do wrong guesses stop the hints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

WASTE_SHARE: Final = 0.10
"""Aimed at, so that 15 % holds with the credit and with what is found out late: 0.13 became 0.17 on an H200."""

_CREDIT_SHARE: Final = 0.02
"""Of VRAM: what may be wasted before anything was loaded."""

_OWN_PART: Final = 1 / 3
"""Of what may be wasted: for hints whatever guesses waste, and the other way round."""

_PRIOR_BLOCKS: Final = 16.0
_REMEMBERED_BLOCKS: Final = 2048.0

_LEAST_SHARE: Final = 0.02
_MOST_SHARE: Final = 0.5
"""Of VRAM for blocks whose fate is open, and of the link's time while requests run."""


class Cause(Enum):
    """Why something is prefetched."""

    QUEUED = "queued"
    """A request that asks for it waits behind others."""
    HINT = "hint"
    GUESS = "guess"


_PRIOR_RATE: Final = {Cause.QUEUED: 0.95, Cause.HINT: 0.8, Cause.GUESS: 0.5}
_OTHER: Final = {Cause.HINT: Cause.GUESS, Cause.GUESS: Cause.HINT}


@dataclass(slots=True)
class PrefetchCount:
    """Blocks, counters that only grow; `late` ones are also used or wasted.

    Attributes:
        late: were under way when their request came.
    """

    issued: int = 0
    used: int = 0
    wasted: int = 0
    late: int = 0

    @property
    def open(self) -> int:
        """Neither used nor wasted yet."""
        return self.issued - self.used - self.wasted

    def as_dict(self) -> dict[str, Any]:
        return {
            "issued_blocks": self.issued,
            "used_blocks": self.used,
            "wasted_blocks": self.wasted,
            "late_blocks": self.late,
        }


class _UseRate:
    """The share of blocks that were used, of those that were decided lately."""

    def __init__(self, prior: float) -> None:
        self._used = prior * _PRIOR_BLOCKS
        self._decided = _PRIOR_BLOCKS

    @property
    def value(self) -> float:
        return self._used / self._decided

    @property
    def cautious(self) -> float:
        """What it is at least, as far as so few blocks tell."""
        return max(0.0, self.value - 1 / math.sqrt(self._decided))

    def saw(self, count: int, *, used: bool) -> None:
        self._used += count * used
        self._decided += count
        if self._decided > _REMEMBERED_BLOCKS:
            self._used *= 0.5
            self._decided *= 0.5


class PrefetchBudget:
    """Args:
    capacity_blocks: of VRAM.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._credit = max(4.0, _CREDIT_SHARE * capacity_blocks)
        self._rates = {cause: _UseRate(_PRIOR_RATE[cause]) for cause in Cause}
        self._open = dict.fromkeys(Cause, 0)
        self._wasted = dict.fromkeys(Cause, 0)
        self._tried: set[Cause] = set()
        self._requests_loaded = 0
        self.count = PrefetchCount()

    def issued(self, cause: Cause, num_blocks: int) -> None:
        self.count.issued += num_blocks
        self._tried.add(cause)
        self._open[cause] += num_blocks

    def used(self, cause: Cause, num_blocks: int) -> None:
        self.count.used += num_blocks
        self._decided(cause, num_blocks, used=True)

    def wasted(self, cause: Cause, num_blocks: int) -> None:
        self.count.wasted += num_blocks
        self._wasted[cause] += num_blocks
        self._decided(cause, num_blocks, used=False)

    def _decided(self, cause: Cause, num_blocks: int, *, used: bool) -> None:
        self._open[cause] -= num_blocks
        assert self._open[cause] >= 0, (cause, self._open[cause], num_blocks)
        self._rates[cause].saw(num_blocks, used=used)

    def requests_loaded(self, num_blocks: int) -> None:
        """Requests loaded so many blocks themselves."""
        self._requests_loaded += num_blocks

    def use_rate(self, cause: Cause) -> float:
        return self._rates[cause].value

    def share(self, cause: Cause) -> float:
        """Of VRAM, and of the link while requests run."""
        return min(_MOST_SHARE, max(_LEAST_SHARE, _MOST_SHARE * self.use_rate(cause)))

    def allowed(self, cause: Cause) -> int:
        """Blocks that may be issued now."""
        in_vram = int(self.share(cause) * self._capacity_blocks) - self.count.open
        risk = 1 - self._rates[cause].cautious - WASTE_SHARE
        if risk <= 0 or in_vram <= 0:
            return max(0, in_vram)
        return max(0, min(in_vram, int(self._may_be_wasted(cause) / risk)))

    def _may_be_wasted(self, cause: Cause) -> float:
        """Blocks, beyond those that were and those that are expected to be."""
        allowance = self._credit + WASTE_SHARE * (self._requests_loaded + self.count.issued)
        rest = allowance - sum(map(self._expected_waste, Cause))
        other = _OTHER.get(cause)
        if other is None:
            return rest
        most = allowance * (1 - _OWN_PART if other in self._tried else 1) - self._expected_waste(cause)
        return max(min(rest, most), allowance * _OWN_PART - self._expected_waste(cause))

    def _expected_waste(self, cause: Cause) -> float:
        return self._wasted[cause] + self._open[cause] * (1 - self._rates[cause].cautious)
