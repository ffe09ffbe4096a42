"""Hashing beside the scheduler's thread, in the same interpreter.

Who waits for the interpreter takes it from a busy thread after 5 ms only, and a step lets go of it several times:
beside prompts that were hashed without a pause, steps of 8 ms took 37.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

_HASH_FOR_S: Final = 50e-6
_LET_GO_FOR_S: Final = 50e-6


def patient(hash_of: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """The same hash; whoever calls it for many blocks lets go of the interpreter every few of them."""
    until = time.perf_counter() + _HASH_FOR_S

    def hashed(value: Any) -> bytes:
        nonlocal until
        if time.perf_counter() >= until:
            time.sleep(_LET_GO_FOR_S)
            until = time.perf_counter() + _HASH_FOR_S
        return hash_of(value)

    return hashed
