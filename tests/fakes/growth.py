"""How large every table of an object is, and of what it holds: for tests that nothing grows without a bound."""

from __future__ import annotations

import array
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

_OURS = ("kvortex.", "tests.")


def tables(owner: Any, name: str = "") -> dict[str, int]:
    """Length of each container by the path of attributes to it. Objects of vLLM and torch are not looked into."""
    found: dict[str, int] = {}
    seen: set[int] = set()

    def look(value: Any, path: str) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, dict | list | set | frozenset | deque | bytearray | array.array | np.ndarray | tuple):
            found[path] = len(value)
            if isinstance(value, dict):
                values = list(value.values())
            elif isinstance(value, list | deque | tuple):
                values = list(value)
            else:
                values = []
            # All of one kind: the first tells what is in them, and a table in each is the sum of them.
            for item in values[:50]:
                look(item, f"{path}[]")
        elif type(value).__module__.startswith(_OURS):
            for attribute, inner in _attributes(value):
                look(inner, f"{path}.{attribute}")

    look(owner, name or type(owner).__name__)
    return found


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        for slot in getattr(kind, "__slots__", ()):
            if isinstance(slot, str) and hasattr(value, slot):
                yield slot, getattr(value, slot)
