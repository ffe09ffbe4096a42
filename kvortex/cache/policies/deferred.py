"""Another policy that hears of everything late: when it is asked something, or when there is time for it.

What the adaptive policy learns from a prompt takes a millisecond, and the prompt's request waits for that to be over.
So it is written down with its time, and told once the request's kernels run. Since nothing is asked of a policy that
was not told all, its answers are those that it would have given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from kvortex.cache.policies.base import Choice, EvictionPolicy
from kvortex.keys import BlockKey

_MAX_UNTOLD: Final = 1024
"""Calls. Nobody asks anything while there are free slots."""


class Deferred:
    """
    Args:
        make: the policy, given the clock that it is to read: of what it is told late, the time at which that was.
        clock: seconds.
    """

    def __init__(self, make: Callable[[Callable[[], float]], EvictionPolicy], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told_s: float | None = None
        self._untold: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []
        self._policy = make(self._now_s)

    def _now_s(self) -> float:
        return self._clock() if self._told_s is None else self._told_s

    def settle(self) -> None:
        """Tells the policy all that it was not told yet."""
        if not self._untold:
            return
        untold, self._untold = self._untold, []
        for self._told_s, tell, arguments in untold:
            tell(*arguments)
        self._told_s = None

    def _later(self, tell: Callable[..., None], *arguments: Any) -> None:
        self._untold.append((self._clock(), tell, arguments))
        if len(self._untold) >= _MAX_UNTOLD:
            self.settle()

    # ---- told late; what it is told of may have changed by then

    def prompt(self, keys: Sequence[BlockKey], num_tokens: int) -> None:
        self._later(self._policy.prompt, tuple(keys), num_tokens)

    def answered(self, keys: Sequence[BlockKey], num_output_tokens: int) -> None:
        self._later(self._policy.answered, tuple(keys), num_output_tokens)

    def admitted(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        self._later(self._policy.admitted, tuple(slots), tuple(keys))

    def used(self, slots: Sequence[int]) -> None:
        self._later(self._policy.used, tuple(slots))

    def blocked(self, slots: Sequence[int]) -> None:
        self._later(self._policy.blocked, tuple(slots))

    def evictable(self, slots: Sequence[int]) -> None:
        self._later(self._policy.evictable, tuple(slots))

    def removed(self, slots: Sequence[int]) -> None:
        self._later(self._policy.removed, tuple(slots))

    # ---- asked

    def __len__(self) -> int:
        self.settle()
        return len(self._policy)

    def evict(self, count: int) -> list[int]:
        self.settle()
        return self._policy.evict(count)

    def choose(self, keys: Sequence[BlockKey], count: int) -> Choice:
        self.settle()
        return self._policy.choose(keys, count)

    def reset(self) -> None:
        self._untold.clear()
        self._policy.reset()
