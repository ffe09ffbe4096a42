"""The policy that learns when blocks are asked for again; docs/eviction.md tells how and what it gains."""

from kvortex.cache.policies.adaptive.policy import Adaptive

__all__ = ["Adaptive"]
