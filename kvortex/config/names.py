"""The nearest right name for a wrong one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

_LEAST_LIKENESS: Final = 0.7
"""difflib's ratio. From 0.6 on, as it has it, `nope` would be like `nnodes`."""


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that is most like `name`; None if none is. Dashes and underscores are alike."""
    spelled = {candidate.replace("-", "_").lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.replace("-", "_").lower(), spelled, n=1, cutoff=_LEAST_LIKENESS)
    return spelled[close[0]] if close else None
