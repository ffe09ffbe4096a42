"""Eviction policies by name: what `eviction_policy` in the configuration may say."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvortex.cache.policies.adaptive import Adaptive
from kvortex.cache.policies.base import Choice, EvictionPolicy
from kvortex.cache.policies.deferred import Deferred
from kvortex.cache.policies.lru import LRU
from kvortex.cache.policies.priority import Priority
from kvortex.errors import UsageError

__all__ = [
    "EVICTION_POLICIES",
    "LRU",
    "Adaptive",
    "Choice",
    "Deferred",
    "EvictionPolicy",
    "Priority",
    "make_deferred",
    "make_policy",
]

Clock = Callable[[], float]

_MAKERS: Mapping[str, Callable[[int, Clock, float], EvictionPolicy]] = MappingProxyType(
    {
        "adaptive": lambda num_slots, clock, _: Adaptive(num_slots, clock=clock),
        "lru": lambda num_slots, _clock, _idle: LRU(num_slots),
        "priority": lambda num_slots, clock, idle: Priority(num_slots, clock=clock, idle_after_s=idle),
    }
)

EVICTION_POLICIES: tuple[str, ...] = tuple(_MAKERS)
"""Their names."""


def make_policy(
    name: str, num_slots: int, *, clock: Clock = time.monotonic, idle_after_s: float = 30.0
) -> EvictionPolicy:
    """A new policy for an index of `num_slots`.

    Args:
        clock: seconds, for policies that look at ages.
        idle_after_s: a block unused for this long is a first candidate, for policies that ask.

    Raises:
        UsageError: no policy has this name.
    """
    maker = _MAKERS.get(name)
    if maker is None:
        near = difflib.get_close_matches(name, EVICTION_POLICIES, n=1)
        known = ", ".join(sorted(EVICTION_POLICIES))
        hint = f"did you mean {near[0]!r}? Known: {known}" if near else f"one of: {known}"
        raise UsageError(f"eviction_policy {name!r} does not exist", hint=hint)
    return maker(num_slots, clock, idle_after_s)


def make_deferred(name: str, num_slots: int, *, clock: Clock = time.monotonic, idle_after_s: float = 30.0) -> Deferred:
    """The same policy, told late; see `Deferred`."""
    return Deferred(lambda told: make_policy(name, num_slots, clock=told, idle_after_s=idle_after_s), clock)
