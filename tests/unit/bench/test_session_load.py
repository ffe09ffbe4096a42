"""An open load of sessions: when they begin and go on, what is sent, what is made of it."""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

import pytest

from kvortex.bench import session_load
from kvortex.bench.counters import of_kvortex
from kvortex.bench.request import Endpoint, Good
from kvortex.bench.session_figures import Goal, SessionFigures, measure_sessions
from kvortex.bench.session_load import PlayedSessions, SessionLoad, play_sessions
from kvortex.bench.think import AGENTS_S, Think, arrivals_s, think_s
from kvortex.bench.workload import Workload
from tests.fakes.stub_server import Behaviour, StubServer, answer_to, stub_server

SMALL = Workload(conversations=3, turns=3, first=6, add=2, gen=4, concurrency=3)


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody thinks, and all begin at once."""
    monkeypatch.setattr(session_load, "think_s", lambda *_: 0.0)
    monkeypatch.setattr(session_load, "arrivals_s", lambda count, *_: [0.0] * count)


def play(
    server: StubServer,
    workload: Workload = SMALL,
    who: Think = Think.AGENTS,
    hint_s: float | None = None,
    for_s: float | None = None,
) -> PlayedSessions:
    load = SessionLoad(workload, who, 1.0, hint_s, for_s)
    return asyncio.run(play_sessions(Endpoint(server.url, "stub"), load, timeout_s=20.0, say=lambda _: None))


def figures(played: PlayedSessions, *, ttft_s: float = 60.0, tpot_s: float = 60.0) -> SessionFigures:
    return measure_sessions(played, Goal(ttft_s, tpot_s))[1]


def test_people_and_agents_think_as_they_do_and_mixed_are_half_of_each() -> None:
    people = [think_s(Think.PEOPLE, 1, session, 1) for session in range(2000)]
    assert statistics.median(people) == pytest.approx(20.0, rel=0.1)
    agents = [think_s(Think.AGENTS, 1, session, 1) for session in range(2000)]
    assert AGENTS_S[0] <= min(agents) < 1.1
    assert 4.9 < max(agents) <= AGENTS_S[1]
    mixed = [[think_s(Think.MIXED, 1, session, turn) for turn in range(1, 12)] for session in range(400)]
    quick = sum(max(gaps) <= AGENTS_S[1] for gaps in mixed)
    assert 150 < quick < 250


def test_the_same_seed_is_the_same_load() -> None:
    assert think_s(Think.PEOPLE, 3, 5, 2) == think_s(Think.PEOPLE, 3, 5, 2) != think_s(Think.PEOPLE, 4, 5, 2)
    assert arrivals_s(50, 2.0, 7) == arrivals_s(50, 2.0, 7) != arrivals_s(50, 2.0, 8)


def test_sessions_begin_at_the_rate_asked_for() -> None:
    begins = arrivals_s(4000, 2.0, 1)
    assert begins == sorted(begins)
    assert begins[0] == 0.0
    assert begins[-1] == pytest.approx(2000, rel=0.1)
    assert arrivals_s(0, 2.0, 1) == []


@pytest.mark.usefixtures("no_time")
def test_each_session_goes_on_from_its_own_answers_under_its_own_name() -> None:
    with stub_server([Behaviour.GOOD]) as server:
        play(server)
    _, *prompts = server.prompts
    assert len(prompts) == SMALL.conversations * SMALL.turns
    names: dict[str, list[list[int]]] = {}
    for headers, prompt in zip(server.headers[1:], prompts, strict=True):
        names.setdefault(headers["X-Session-Id"], []).append(prompt)
    assert sorted(names) == [f"kvortex-bench-0-{i}" for i in range(SMALL.conversations)]
    for number in range(SMALL.conversations):
        expected: list[int] = []
        for turn, prompt in enumerate(names[f"kvortex-bench-0-{number}"], 1):
            expected = expected + SMALL.user_tokens(number, turn)
            assert prompt == expected
            expected = expected + answer_to(expected, SMALL.gen)


@pytest.mark.usefixtures("no_time")
def test_a_slow_server_gets_a_queue_and_not_a_slower_load() -> None:
    with stub_server([Behaviour.GOOD], delay_s=0.2) as server:
        played = play(server, Workload(conversations=8, turns=1, first=4, add=2, gen=2, concurrency=8))
    assert played.most_in_flight == 8


def test_users_think_between_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def think(who: Think, seed: int, session: int, turn: int) -> float:
        asked.append((session, turn))
        return 0.0

    monkeypatch.setattr(session_load, "think_s", think)
    with stub_server([Behaviour.GOOD]) as server:
        play(server, Workload(conversations=1, turns=3, first=4, add=2, gen=2, concurrency=1))
    assert asked == [(0, 1), (0, 2)]


@pytest.mark.parametrize("hint_s", [60.0, 0.001])
def test_each_later_turn_is_announced_before_it_comes(monkeypatch: pytest.MonkeyPatch, hint_s: float) -> None:
    """The whole pause ahead, where that is shorter than what was asked for."""
    monkeypatch.setattr(session_load, "think_s", lambda *_: 0.05)
    with stub_server([Behaviour.GOOD]) as server:
        played = play(server, Workload(conversations=1, turns=3, first=4, add=2, gen=2, concurrency=1), hint_s=hint_s)
    # The first of the requests is the warm-up.
    assert server.hinted == [("kvortex-bench-0-0", 2), ("kvortex-bench-0-0", 3)]
    assert figures(played).hints == {"HTTP 202": 2}


@pytest.mark.usefixtures("no_time")
def test_hints_that_the_server_refuses_are_told_and_the_load_goes_on() -> None:
    with stub_server([Behaviour.GOOD]) as server:
        server.hint_status = 409
        played = play(server, hint_s=1.0)
    measured, sessions = measure_sessions(played, Goal(60.0, 60.0))
    assert sessions.hints == {"HTTP 409": 6}
    assert measured.requests.ok == 9
    assert any("HTTP 409 6 times" in note for note in measured.notes)


@pytest.mark.usefixtures("no_time")
def test_nothing_is_announced_unless_asked_for() -> None:
    with stub_server([Behaviour.GOOD]) as server:
        assert figures(play(server)).hints == {}
    assert server.hinted == []


@pytest.mark.parametrize("hint_s", [None, 900.0])
def test_no_turn_begins_after_the_time_that_was_given(monkeypatch: pytest.MonkeyPatch, hint_s: float | None) -> None:
    """Of three sessions the first goes on once and the second never; the third would begin too late. Nobody waits for
    those who are gone, or announces them."""
    pauses = {(0, 1): 0.0, (0, 2): 1000.0, (1, 1): 1000.0}
    monkeypatch.setattr(session_load, "think_s", lambda _who, _seed, session, turn: pauses[session, turn])
    monkeypatch.setattr(session_load, "arrivals_s", lambda *_: [0.0, 0.0, 900.0])
    with stub_server([Behaviour.GOOD]) as server:
        played = play(server, hint_s=hint_s, for_s=500.0)
    assert [len(results) for results in played.turns] == [2, 1, 0]
    assert [name for name, _ in server.hinted] == ([] if hint_s is None else ["kvortex-bench-0-0"])
    measured, sessions = measure_sessions(played, Goal(60.0, 60.0))
    assert (measured.requests.sent, measured.requests.ok) == (3, 3)
    assert [(turn.ok, turn.ttft_p50_s is None) for turn in measured.turns] == [(2, False), (1, False), (0, True)]
    assert sessions.goodput_share == 1.0
    assert any("later than 500 s" in note for note in measured.notes)


@pytest.mark.usefixtures("no_time")
def test_goodput_counts_what_met_both_limits_and_failures_never_do() -> None:
    with stub_server([Behaviour.GOOD, *[Behaviour.STATUS_500] * 3, *[Behaviour.GOOD] * 6]) as server:
        played = play(server)
    generous, strict = figures(played), figures(played, ttft_s=1e-9)
    assert generous.goodput_share == pytest.approx(6 / 9)
    assert generous.goodput_requests_per_s == pytest.approx(6 / played.wall_s)
    assert strict.goodput_share == 0
    measured, _ = measure_sessions(played, Goal(60.0, 60.0))
    assert (measured.requests.ok, measured.requests.failed) == (6, 3)
    assert any("goodput" in note and "66.7%" in note for note in measured.notes)


@pytest.mark.usefixtures("no_time")
def test_each_turn_has_its_own_times_between_tokens() -> None:
    """First turns are those that nobody can bring anything back for."""
    with stub_server([Behaviour.GOOD]) as server:
        played = play(server, Workload(conversations=2, turns=2, first=6, add=2, gen=4, concurrency=2))
    tpots = [[result.tpot_s for result in turn if isinstance(result, Good)] for turn in played.turns]
    measured, _ = measure_sessions(played, Goal(60.0, 60.0))
    for of_turn, told in zip(tpots, measured.turns, strict=True):
        assert all(seconds is not None for seconds in of_turn)
        assert told.tpot_p50_s == pytest.approx(sum(seconds or 0.0 for seconds in of_turn) / 2)
        assert told.tpot_p99_s is not None
    assert any(note.startswith("turn 2, p50 / p99: TTFT ") and "TPOT " in note for note in measured.notes)


def stats(used: int, wasted: int, loaded: int) -> dict[str, Any]:
    return {
        "tokens": {"queried": 30, "vram_hit": loaded, "ram_hit": 10, "computed": 10},
        "store": {"bytes": 0},
        "load": {"bytes": 7 * loaded, "blocks": loaded},
        "failures": {"store": 0, "load": 0},
        "tiers": {"vram": {"capacity_bytes": 10}, "ram": {"capacity_bytes": 100}},
        "prefetch": {"issued_blocks": used + wasted, "used_blocks": used, "wasted_blocks": wasted, "late_blocks": 0},
    }


@pytest.mark.usefixtures("no_time")
def test_what_was_there_before_its_request_is_told_of_this_load_only() -> None:
    with stub_server([Behaviour.GOOD]) as server:
        server.stats = stats(100, 100, 1000)

        def choose(index: int) -> Behaviour:
            server.stats = stats(100, 100, 1000) if index == 0 else stats(170, 110, 1100)
            return Behaviour.GOOD

        server.choose = choose
        played = play(server)
    measured, sessions = measure_sessions(played, Goal(1.0, 1.0))
    assert (sessions.prefetched_share, sessions.wasted_share) == (0.7, 0.1)
    assert measured.sources is not None
    assert measured.sources.tokens.vram == 100
    assert measured.sources.loaded_bytes == 700


@pytest.mark.usefixtures("no_time")
def test_a_server_without_statistics_has_no_sources() -> None:
    with stub_server([Behaviour.GOOD]) as server:
        played = play(server)
    measured, sessions = measure_sessions(played, Goal(1.0, 1.0))
    assert measured.sources is None
    assert (sessions.prefetched, sessions.prefetched_share) == (None, None)


def test_an_older_kvortex_without_prefetch_is_read_too() -> None:
    import json

    document = stats(1, 2, 3)
    del document["prefetch"]
    counters = of_kvortex(json.dumps(document))
    assert counters is not None
    assert counters.prefetched is None
