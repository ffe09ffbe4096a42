"""Conversations are found by name or by content, inside their scope, and forgotten when there are too many."""

from __future__ import annotations

import random

from kvortex.cache.sessions.book import SessionBook
from kvortex.cache.sessions.session import Scope, Session, scope_of, session_name
from kvortex.keys import BlockKey, block_key
from tests.fakes.clock import FakeClock

NOBODY = Scope()


def keys(*numbers: int) -> list[BlockKey]:
    return [block_key(n.to_bytes(32, "big"), 0) for n in numbers]


class Talk:
    """A book and its clock."""

    def __init__(self, max_keys: int = 10_000, max_sessions: int = 100) -> None:
        self.book = SessionBook(max_keys, max_sessions)
        self.clock = FakeClock()

    def turn(
        self, of: list[BlockKey], name: str | None = None, scope: Scope = NOBODY, *, prompt_blocks: int | None = None
    ) -> Session:
        """A whole request, answered at once."""
        blocks = len(of) if prompt_blocks is None else prompt_blocks
        session = self.book.arrived(scope, name, of[:blocks], self.clock())
        self.book.ended(session, of, blocks, 16 * len(of), self.clock())
        self.book.check()
        return session


def test_a_name_is_the_session_whatever_it_says() -> None:
    talk = Talk()
    first = talk.turn(keys(1, 2), "a")
    assert talk.turn(keys(7, 8), "a") is first
    assert talk.turn(keys(1, 2), "b") is not first


def test_a_prompt_that_goes_on_from_an_answer_is_that_conversation() -> None:
    talk = Talk()
    first = talk.turn(keys(1, 2, 3), prompt_blocks=2)
    assert talk.turn(keys(1, 2, 3, 4, 5)) is first
    assert first.turns == 2
    assert talk.turn(keys(9, 8)) is not first


def test_a_prompt_that_goes_on_from_a_prompt_whose_answer_was_rewritten_is_too() -> None:
    talk = Talk()
    first = talk.turn(keys(1, 2, 3), prompt_blocks=2)
    assert talk.turn(keys(1, 2, 33, 4)) is first


def test_a_shared_beginning_is_not_a_conversation() -> None:
    talk = Talk()
    assert talk.turn(keys(1, 2, 3)) is not talk.turn(keys(1, 2, 4))


def test_one_name_in_two_scopes_is_two_sessions_that_never_meet() -> None:
    talk = Talk()
    salted = [scope_of("one"), scope_of("two"), scope_of("one", "key"), scope_of(None, "key"), NOBODY]
    sessions = [talk.turn(keys(i, 10 + i), "same", scope) for i, scope in enumerate(salted)]
    assert len({id(s) for s in sessions}) == len(salted)
    for scope, session in zip(salted, sessions, strict=True):
        assert talk.book.named(scope, "same") is session
    # Not even by blocks: with a salt of their own these could not be equal, with another caller they can.
    assert talk.book.continued_by(scope_of(None, "key"), sessions[4].keys) is None
    assert talk.book.continued_by(NOBODY, sessions[4].keys) is sessions[4]
    assert [s.number for s in talk.book.recent(10, "key")] == [sessions[3].number, sessions[2].number]


def test_salts_are_not_kept() -> None:
    assert "secret" not in repr(scope_of("secret"))


def test_names_are_strings_of_bounded_length() -> None:
    assert session_name("chat-1") == "chat-1"
    assert [session_name(x) for x in ("", None, 7, ["a"])] == [None] * 4
    long = [session_name("x" * 10_000 + tail) for tail in "ab"]
    assert len(set(long)) == 2
    assert all(name is not None and len(name) < 100 for name in long)
    assert session_name("\ud800" * 200) is not None


def test_gaps_are_learnt_and_a_session_has_its_pace() -> None:
    talk = Talk()
    for _ in range(20):
        session = talk.turn(keys(1), "tool")
        talk.clock.advance(2.0)
    assert list(session.gaps_s) == [2.0] * 4
    assert talk.book.p_return_within(session, talk.clock() - 1.0, 3.0) > 0.7


def test_requests_of_one_session_that_overlap_are_silent_only_after_the_last() -> None:
    talk = Talk()
    one = talk.book.arrived(NOBODY, "a", keys(1), 0.0)
    assert talk.book.arrived(NOBODY, "a", keys(1), 0.0) is one
    talk.book.ended(one, keys(1), 1, 16, 1.0)
    assert not one.is_silent
    assert talk.book.p_return_within(one, 1.0, 0.0) == 1.0
    talk.book.ended(one, keys(1), 1, 16, 2.0)
    assert (one.is_silent, one.silent_since) == (True, 2.0)
    talk.book.check()


def test_only_a_session_whose_end_was_lost_could_be_brought_back() -> None:
    talk = Talk()
    first, second = talk.turn(keys(1, 2), "a"), talk.turn(keys(3, 4), "b")
    assert talk.book.likeliest(talk.clock(), 10.0, 8) == []
    talk.book.lost(keys(1)[0])
    assert talk.book.likeliest(talk.clock(), 10.0, 8) == []
    talk.book.lost(keys(2)[0])
    assert [s for _, s in talk.book.likeliest(talk.clock(), 10.0, 8)] == [first]
    talk.clock.advance(100.0)  # through several bins
    assert [s for _, s in talk.book.likeliest(talk.clock(), 10.0, 8)] == [first]
    talk.book.settled(first)
    assert talk.book.likeliest(talk.clock(), 10.0, 8) == []
    talk.book.lost(keys(4)[0])
    talk.turn(keys(3, 4, 5), "b")
    assert talk.book.likeliest(talk.clock(), 10.0, 8) == []
    assert second.turns == 2


def test_the_likeliest_come_first() -> None:
    talk = Talk()
    for _ in range(40):
        talk.turn(keys(1), "tool")
        talk.clock.advance(2.0)
    old = talk.turn(keys(5), "old")
    talk.clock.advance(600.0)
    tool = talk.turn(keys(1), "tool")
    for key in keys(1, 5):
        talk.book.lost(key)
    (p_tool, first), (p_old, second) = talk.book.likeliest(talk.clock(), 5.0, 8)
    assert (first, second) == (tool, old)
    assert p_tool > 2 * p_old


def test_the_longest_unheard_of_is_forgotten_wholly() -> None:
    talk = Talk(max_sessions=3)
    for i in range(5):
        talk.turn(keys(10 * i, 10 * i + 1), f"s{i}")
    assert len(talk.book) == 3
    assert talk.book.named(NOBODY, "s0") is None
    assert talk.book.continued_by(NOBODY, keys(0, 1)) is None
    assert talk.book.named(NOBODY, "s4") is not None


def test_keys_are_bounded_too() -> None:
    talk = Talk(max_keys=10)
    for i in range(20):
        talk.turn(keys(*range(10 * i, 10 * i + 4)))
        assert talk.book.num_keys <= 10
    assert len(talk.book) == 2


def test_a_session_that_lives_is_not_forgotten_and_keeps_nobody_else_alive() -> None:
    talk = Talk(max_sessions=3)
    living = talk.book.arrived(NOBODY, "living", keys(1), 0.0)
    for i in range(10):
        talk.turn(keys(100 + i), f"s{i}")
    assert len(talk.book) <= 4
    assert talk.book.named(NOBODY, "living") is living


def test_a_request_without_a_whole_block_leaves_nothing() -> None:
    talk = Talk()
    talk.turn([])
    assert len(talk.book) == 0


def test_random_conversations_keep_the_book_whole() -> None:
    rng = random.Random(5)
    talk = Talk(max_keys=60, max_sessions=12)
    live: list[tuple[Session, list[BlockKey]]] = []
    for _ in range(3000):
        talk.clock.advance(rng.expovariate(1.0) * rng.choice([0.01, 1, 60]))
        if live and rng.random() < 0.5:
            session, of = live.pop(rng.randrange(len(live)))
            talk.book.ended(session, of[: rng.randint(0, len(of))], rng.randint(0, 3), 99, talk.clock())
        elif len(live) < 6:
            of = keys(*(rng.randrange(40) for _ in range(rng.randint(0, 8))))
            name = rng.choice([None, None, "a", "b", "c"])
            live.append((talk.book.arrived(rng.choice([NOBODY, scope_of("x")]), name, of, talk.clock()), of))
        talk.book.lost(keys(rng.randrange(40))[0])
        talk.book.likeliest(talk.clock(), rng.choice([0.1, 10.0]), 5)
        talk.book.check()
