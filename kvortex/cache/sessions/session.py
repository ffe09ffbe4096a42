"""One conversation: whose it is, which blocks it has, when it spoke last."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvortex.cache.sessions.rhythm import RECENT_GAPS, Habit, habit_of, pace_of
from kvortex.keys import BlockKey

_MAX_NAME: Final = 128


class Scope(NamedTuple):
    """Inside which names mean the same session: one cache salt, one caller. Digests: neither is kept or shown."""

    salt: str = ""
    caller: str = ""


def scope_of(cache_salt: str | None, caller: str = "") -> Scope:
    """The scope of a request.

    Args:
        cache_salt: the request's, if any.
        caller: which of the server's API keys it came with, as a digest; "" where there is one or none.
    """
    salt = hashlib.blake2b(cache_salt.encode(), digest_size=16).hexdigest() if cache_salt else ""
    return Scope(salt, caller)


def session_name(given: object) -> str | None:
    """The name that a client gave, None for no usable one. A long one is known by its digest."""
    if not isinstance(given, str) or not given:
        return None
    if len(given) <= _MAX_NAME:
        return given
    return "sha256:" + hashlib.sha256(given.encode(errors="surrogatepass")).hexdigest()


@dataclass(slots=True, eq=False)
class Session:
    """One conversation between its first request and the day it is forgotten.

    Attributes:
        number: never used twice.
        name: given by the client; None where it was recognised by its blocks.
        keys: of the complete blocks of its last prompt and answer; empty while its first request runs.
        requests: of it that live now.
        silent_since: when its last request ended, in the book's clock.
        turns: requests that have ended.
        gaps_s: recent silences.
        hinted_at: when it was announced that it goes on; None where nobody did since it spoke last.
        announces: whether its last return was announced; None before the first.
        issued, used, wasted, late: blocks that were prefetched for it, see `PrefetchCount`.
    """

    number: int
    scope: Scope
    name: str | None
    keys: Sequence[BlockKey] = ()
    num_tokens: int = 0
    requests: int = 0
    silent_since: float = 0.0
    turns: int = 0
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_GAPS))
    pace: int = 0
    bin: int = 0
    hinted_at: float | None = None
    announces: bool | None = None
    issued: int = 0
    used: int = 0
    wasted: int = 0
    late: int = 0
    ends: tuple[BlockKey, ...] = ()

    @property
    def habit(self) -> Habit:
        """Of one that is silent."""
        return habit_of(self.pace, self.turns)

    @property
    def is_silent(self) -> bool:
        return self.requests == 0 and self.turns > 0

    def spoke_after(self, gap_s: float) -> None:
        self.gaps_s.append(gap_s)
        self.pace = pace_of(self.gaps_s)
