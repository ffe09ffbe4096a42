"""Eviction policies by name: what `eviction_policy` in the configuration may say."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvortex.cache.policies.base import BlockInfo, EvictionPolicy
from kvortex.cache.policies.lru import LRU
from kvortex.errors import UsageError

__all__ = ["EVICTION_POLICIES", "LRU", "BlockInfo", "EvictionPolicy", "make_policy"]

EVICTION_POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType({"lru": LRU})
"""From a policy's name to what makes one for a number of slots."""


def make_policy(name: str, num_slots: int) -> EvictionPolicy:
    """A new policy for an index of `num_slots`.

    Raises:
        UsageError: no policy has this name.
    """
    factory = EVICTION_POLICIES.get(name)
    if factory is None:
        near = difflib.get_close_matches(name, EVICTION_POLICIES, n=1)
        known = ", ".join(sorted(EVICTION_POLICIES))
        hint = f"did you mean {near[0]!r}? Known: {known}" if near else f"one of: {known}"
        raise UsageError(f"eviction_policy {name!r} does not exist", hint=hint)
    return factory(num_slots)
