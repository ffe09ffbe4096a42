"""How many sessions are announced, and how long before."""

from __future__ import annotations

import pytest

from kvortex.cache.sessions.announcements import HINT_LASTS_S, Announcements
from kvortex.cache.sessions.book import SessionBook
from kvortex.cache.sessions.session import Scope
from kvortex.keys import block_key

KEYS = [block_key(f"{i:032}".encode(), 0) for i in range(3)]


def test_nobody_is_expected_to_be_announced_before_somebody_was() -> None:
    announcements = Announcements()
    assert announcements.share == 0.0
    for _ in range(50):
        announcements.returned(None)
    assert announcements.share == 0.0
    assert announcements.lead_s == pytest.approx(5.0)


def test_the_share_and_the_lead_are_learnt_and_follow_a_change() -> None:
    announcements = Announcements()
    for _ in range(200):
        announcements.returned(1.0)
    assert announcements.share > 0.95
    assert announcements.lead_s == pytest.approx(1.0, abs=0.1)
    for _ in range(200):
        announcements.returned(None)
    assert announcements.share < 0.1


def test_a_session_is_announced_by_a_hint_until_it_goes_on() -> None:
    book = SessionBook(1000)
    session = book.arrived(Scope(), "a", KEYS, 0.0)
    book.announced(session, 0.5)
    assert session.hinted_at is None, "it speaks"
    book.ended(session, KEYS, 3, 60, 1.0)
    assert book.p_unannounced(session) == 1.0
    book.announced(session, 4.0)
    book.announced(session, 5.0)
    book.arrived(Scope(), "a", KEYS, 6.0)
    assert (session.announces, session.hinted_at) == (True, None)
    assert book.announcements.lead_s == pytest.approx((5.0 + 2.0) / 2), "since the first time that somebody said so"
    book.ended(session, KEYS, 3, 60, 7.0)
    assert book.p_unannounced(session) == 0.0
    book.arrived(Scope(), "a", KEYS, 8.0)
    assert session.announces is False


def test_an_old_hint_is_no_announcement_and_may_be_given_again() -> None:
    book = SessionBook(1000)
    session = book.arrived(Scope(), "a", KEYS, 0.0)
    book.ended(session, KEYS, 3, 60, 1.0)
    book.announced(session, 2.0)
    assert book.p_return_within(session, 3.0, 0.001) == 1.0
    later = 3.0 + HINT_LASTS_S
    assert book.p_return_within(session, later, 0.001) < 1.0
    book.announced(session, later)
    assert book.p_return_within(session, later, 0.001) == 1.0
    book.arrived(Scope(), "a", KEYS, later + HINT_LASTS_S + 1)
    assert session.announces is False
    assert book.announcements.lead_s == 5.0, "it says nothing of how early hints come"


def test_others_announcements_say_nothing_of_a_session_that_comes_unannounced() -> None:
    book = SessionBook(1000)
    for _ in range(200):
        book.announcements.returned(1.0)
    session = book.arrived(Scope(), "a", KEYS, 0.0)
    book.ended(session, KEYS, 3, 60, 1.0)
    assert book.p_unannounced(session) < 0.05, "a new one is as most are"
    book.arrived(Scope(), "a", KEYS, 5.0)
    assert book.p_unannounced(session) == 1.0
