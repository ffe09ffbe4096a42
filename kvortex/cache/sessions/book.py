"""All conversations that are remembered: found by name or by content, told apart by scope, forgotten when too many.

    arrived   by name, else by the last block of an earlier prompt or answer that this prompt goes on from
    ended     the conversation is silent: its age moves it from bin to bin, which teaches the rhythms
    lost      VRAM gave up its last block: it could be brought back
    forget    the longest unheard of go first; nothing here grows without bound

Plain data of one thread. A request costs a few dictionary lookups, by content one for each block that is new in its
prompt; `advance` costs the sessions that it moves.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

from kvortex.cache.sessions.announcements import HINT_LASTS_S, Announcements
from kvortex.cache.sessions.rhythm import EDGES_S, NUM_BINS, Habit, Rhythms
from kvortex.cache.sessions.session import Scope, Session
from kvortex.keys import BlockKey

MAX_SESSIONS: Final = 4096

_MAX_LOOKUPS: Final = 1024
"""Blocks of a prompt's end that are looked up: a turn that adds more is taken for a new conversation."""

_MAX_FORGOTTEN: Final = 64
"""Sessions looked at to be forgotten when a request ends; it adds one at most."""

_Group = tuple[Habit, int]


class _Groups(dict[_Group, OrderedDict[int, Session]]):
    """Sessions by group; only groups that have some."""

    def put(self, session: Session) -> None:
        group = session.habit, session.bin
        if group not in self:
            self[group] = OrderedDict()
        self[group][session.number] = session

    def has(self, session: Session) -> bool:
        return session.number in self.get((session.habit, session.bin), ())

    def drop(self, session: Session) -> None:
        """Nothing, where it is not."""
        group = session.habit, session.bin
        if self.has(session):
            del self[group][session.number]
            if not self[group]:
                del self[group]


class SessionBook:
    """Args:
    max_keys: bound on block keys kept, over all silent sessions.
    """

    def __init__(self, max_keys: int, max_sessions: int = MAX_SESSIONS) -> None:
        assert max_sessions > 0, max_sessions
        self.rhythms = Rhythms()
        self.announcements = Announcements()
        self._max_keys = max_keys
        self._max_sessions = max_sessions
        self._numbers = itertools.count(1)
        self._num_keys = 0
        self._sessions: OrderedDict[int, Session] = OrderedDict()  # the longest unheard of first
        self._named: dict[tuple[Scope, str], Session] = {}
        self._ending: dict[BlockKey, Session] = {}
        # By habit and bin, the longest silent first: all silent sessions, and those of them that VRAM has lost.
        self._silent, self._lost = _Groups(), _Groups()
        self._num_lost = 0
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_keys(self) -> int:
        return self._num_keys

    def named(self, scope: Scope, name: str) -> Session | None:
        """The session of this name, in this scope only."""
        return self._named.get((scope, name))

    def continued_by(self, scope: Scope, keys: Sequence[BlockKey]) -> Session | None:
        """The session whose prompt or answer these keys go on from; the longest such."""
        for i in range(len(keys) - 1, max(-1, len(keys) - 1 - _MAX_LOOKUPS), -1):
            session = self._ending.get(keys[i])
            if session is not None and session.scope == scope:
                return session
        return None

    # ---- a session's life

    def arrived(self, scope: Scope, name: str | None, keys: Sequence[BlockKey], now: float) -> Session:
        """A request came; `ended` is owed for it.

        Args:
            keys: of the complete blocks of its prompt.
        """
        self.advance(now)
        session = self.named(scope, name) if name is not None else self.continued_by(scope, keys)
        if session is None:
            session = self._begin(scope, name)
        if session.is_silent:
            self.rhythms.returned(session.habit, now - session.silent_since)
            self._unlist(session)
            session.spoke_after(now - session.silent_since)
            self._was_announced(session, now)
        session.requests += 1
        self._sessions.move_to_end(session.number)
        return session

    def announced(self, session: Session, now: float) -> None:
        """Somebody says that this silent session is about to go on."""
        if session.is_silent and not _is_announced(session, now):
            session.hinted_at = now

    def _was_announced(self, session: Session, now: float) -> None:
        session.announces = _is_announced(session, now)
        lead_s = now - session.hinted_at if session.announces and session.hinted_at is not None else None
        self.announcements.returned(lead_s)
        session.hinted_at = None

    def _begin(self, scope: Scope, name: str | None) -> Session:
        session = Session(next(self._numbers), scope, name)
        self._sessions[session.number] = session
        if name is not None:
            self._named[scope, name] = session
        return session

    def ended(
        self, session: Session, keys: Sequence[BlockKey], prompt_blocks: int, num_tokens: int, now: float
    ) -> None:
        """A request of the session is over.

        Args:
            keys: of its complete blocks, prompt and answer; kept, not copied.
            prompt_blocks: how many of them are its prompt's.
        """
        assert session.requests > 0, f"session {session.number} has no request that could end"
        self.advance(now)
        session.requests -= 1
        if keys:
            self._set_keys(session, keys, prompt_blocks)
            session.num_tokens = num_tokens
        if session.requests:
            return
        if not session.keys:
            self._forget(session)
            return
        session.turns += 1
        session.silent_since = now
        session.bin = 0
        self._silent.put(session)
        self._sessions.move_to_end(session.number)
        self._forget_oldest()

    def _set_keys(self, session: Session, keys: Sequence[BlockKey], prompt_blocks: int) -> None:
        self._drop_ends(session)
        self._num_keys += len(keys) - len(session.keys)
        session.keys = keys
        # An answer is often sent back in other words: then only its prompt is gone on from.
        session.ends = tuple({keys[-1], keys[max(0, min(prompt_blocks, len(keys)) - 1)]})
        for key in session.ends:
            self._ending[key] = session

    def _drop_ends(self, session: Session) -> None:
        for key in session.ends:
            if self._ending.get(key) is session:
                del self._ending[key]
        session.ends = ()

    def advance(self, now: float) -> None:
        """Moves silent sessions whose age has passed their bin."""
        # The longest silent first, so that each group stays in order.
        for group in sorted(self._silent, key=lambda group: group[1], reverse=True):
            while silent := self._silent.get(group):
                session = next(iter(silent.values()))
                if session.bin == NUM_BINS or now - session.silent_since < EDGES_S[session.bin]:
                    break
                self._move_on(session, now)

    def _move_on(self, session: Session, now: float) -> None:
        was_lost = self._lost.has(session)
        self._unlist(session)
        while session.bin < NUM_BINS and now - session.silent_since >= EDGES_S[session.bin]:
            self.rhythms.stayed_silent(session.habit, session.bin)
            session.bin += 1
        self._silent.put(session)
        if was_lost:
            self._list_lost(session)

    def _unlist(self, session: Session) -> None:
        self._silent.drop(session)
        self.settled(session)

    # ---- what VRAM has of them

    def lost(self, key: BlockKey) -> None:
        """VRAM gave this block up. If a silent session ends with it, that one could be brought back."""
        session = self._ending.get(key)
        if session is not None and session.is_silent and key == session.keys[-1]:
            self._list_lost(session)

    def _list_lost(self, session: Session) -> None:
        self._num_lost += not self._lost.has(session)
        self._lost.put(session)

    def settled(self, session: Session) -> None:
        """There is nothing to bring back of it before its next turn, or its next loss."""
        self._num_lost -= self._lost.has(session)
        self._lost.drop(session)

    @property
    def num_lost(self) -> int:
        """Silent sessions that could be brought back."""
        return self._num_lost

    def likeliest(self, now: float, horizon_s: float, limit: int) -> list[tuple[float, Session]]:
        """Up to `limit` lost sessions with the probability that each goes on within the horizon, the likeliest first.

        Costs the groups and the limit: members of a group are about as likely as its first.
        """
        self.advance(now)
        ranked = sorted(
            (
                (self.p_return_within(next(iter(lost.values())), now, horizon_s), group)
                for group, lost in self._lost.items()
                if group[1] < NUM_BINS
            ),
            reverse=True,
        )
        members = itertools.chain.from_iterable(self._lost[group].values() for _, group in ranked)
        found = [(self.p_return_within(s, now, horizon_s), s) for s in itertools.islice(members, limit)]
        return sorted(found, key=lambda pair: pair[0], reverse=True)

    def p_return_within(self, session: Session, now: float, horizon_s: float) -> float:
        """The probability that a silent session goes on within the next `horizon_s` seconds; 1 for one that has, or of
        which somebody has just said so."""
        if not session.is_silent or _is_announced(session, now):
            return 1.0
        return self.rhythms.p_return_within(session.habit, now - session.silent_since, horizon_s)

    def p_unannounced(self, session: Session) -> float:
        """The probability that nobody says before that this session goes on."""
        return 1.0 - (self.announcements.share if session.announces is None else session.announces)

    def half_back_in_s(self, session: Session, now: float) -> float:
        """In how many seconds half of those like this silent session are back; infinity where so many never are."""
        return self.rhythms.half_back_in_s(session.habit, now - session.silent_since)

    def expected_in_s(self, session: Session, now: float) -> float:
        """When a silent session is expected, from now; infinity for not any more."""
        return self.rhythms.expected_in_s(session.habit, now - session.silent_since)

    # ---- forgetting

    def _forget_oldest(self) -> None:
        for _ in range(_MAX_FORGOTTEN):
            if len(self._sessions) <= self._max_sessions and self._num_keys <= self._max_keys:
                return
            oldest = next(iter(self._sessions.values()))
            if oldest.requests:
                self._sessions.move_to_end(oldest.number)
            else:
                self._forget(oldest)

    def _forget(self, session: Session) -> None:
        self._unlist(session)
        self._drop_ends(session)
        self._num_keys -= len(session.keys)
        session.keys = ()
        if session.name is not None:
            del self._named[session.scope, session.name]
        del self._sessions[session.number]
        self.forgotten += 1

    def recent(self, limit: int, caller: str | None = None) -> Iterator[Session]:
        """The sessions heard of last, of one caller or of all."""
        heard = (s for s in reversed(self._sessions.values()) if caller is None or s.scope.caller == caller)
        return itertools.islice(heard, limit)

    def check(self) -> None:
        """Verifies every count by a scan; for tests and soaks."""
        silent = {n for group in self._silent.values() for n in group}
        assert silent == {s.number for s in self._sessions.values() if s.is_silent}, silent
        assert self._num_lost == sum(map(len, self._lost.values())), self._num_lost
        for group, lost in self._lost.items():
            assert lost.keys() <= self._silent[group].keys(), group
        for groups in (self._silent, self._lost):
            assert all(groups.values()), "a group without a session"
            for sessions in groups.values():
                since = [session.silent_since for session in sessions.values()]
                assert groups is self._lost or since == sorted(since), since
        assert self._num_keys == sum(len(s.keys) for s in self._sessions.values())
        assert set(self._ending) <= {key for s in self._sessions.values() for key in s.ends}
        assert all(self._sessions[s.number] is s for s in self._named.values())
        assert len(self._sessions) <= self._max_sessions + sum(1 for s in self._sessions.values() if s.requests)


def _is_announced(session: Session, now: float) -> bool:
    return session.hinted_at is not None and now - session.hinted_at <= HINT_LASTS_S
