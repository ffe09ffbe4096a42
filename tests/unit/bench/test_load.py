"""A whole load against a server: what is sent, what is counted, what the figures are made of."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from typing import Any

import pytest

from kvortex.bench.figures import Measured, measure
from kvortex.bench.load import Played, WarmUpError, play
from kvortex.bench.request import Endpoint, Failed, FailureKind
from kvortex.bench.workload import Workload
from tests.fakes.stub_server import Behaviour, StubServer, answer_to, stub_server

SMALL = Workload(conversations=3, turns=3, first=6, add=2, gen=4, concurrency=2)


def play_on(server: StubServer, workload: Workload, *, timeout_s: float = 20.0, api_key: str | None = None) -> Played:
    endpoint = Endpoint(server.url, "stub", api_key)
    return asyncio.run(play(endpoint, workload, timeout_s=timeout_s, say=lambda _: None))


def measured(behaviours: Iterable[Behaviour], workload: Workload, *, timeout_s: float = 20.0) -> Measured:
    """Of a server that first answers the warm-up, then behaves like this."""
    with stub_server([Behaviour.GOOD, *behaviours]) as server:
        return measure(play_on(server, workload, timeout_s=timeout_s))


def test_each_turn_continues_what_was_said_and_answered() -> None:
    with stub_server([Behaviour.GOOD]) as server:
        play_on(server, SMALL)
    warm_up, *prompts = server.prompts
    assert len(warm_up) == SMALL.first
    assert len(prompts) == SMALL.conversations * SMALL.turns
    for conversation in range(SMALL.conversations):
        expected: list[int] = []
        for turn in (1, 2, 3):
            expected = expected + SMALL.user_tokens(conversation, turn)
            assert expected in prompts, (conversation, turn)
            expected = expected + answer_to(expected, SMALL.gen)


def test_the_same_seed_sends_the_same_prompts_and_another_one_others() -> None:
    sent = []
    for seed in (1, 1, 2):
        with stub_server([Behaviour.GOOD]) as server:
            play_on(server, Workload(conversations=2, turns=2, first=5, add=2, gen=2, concurrency=2, seed=seed))
        sent.append(sorted(server.prompts))
    assert sent[0] == sent[1] != sent[2]


def test_no_more_requests_are_in_flight_than_was_asked_for() -> None:
    with stub_server([Behaviour.GOOD], delay_s=0.01) as server:
        play_on(server, Workload(conversations=6, turns=1, first=3, add=1, gen=2, concurrency=2))
    assert server.most_in_flight == 2


def test_the_api_key_is_sent() -> None:
    with stub_server([Behaviour.GOOD]) as server:
        play_on(server, SMALL, api_key="sk-TEST")
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer sk-TEST"}


def test_failures_are_counted_exactly_and_kept_out_of_the_figures() -> None:
    """Field trial B62: 30 % HTTP 500, 10 % closed, 5 % empty, 5 % one token, one that hangs."""
    behaviours = [
        *[Behaviour.STATUS_500] * 12,
        *[Behaviour.CLOSE_MID_STREAM] * 4,
        *[Behaviour.EMPTY] * 2,
        *[Behaviour.ONE_TOKEN] * 2,
        Behaviour.HANG,
        *[Behaviour.GOOD] * 19,
    ]
    random.Random(0).shuffle(behaviours)
    result = measured(
        behaviours, Workload(conversations=20, turns=2, first=4, add=2, gen=8, concurrency=4), timeout_s=3
    )
    requests = result.requests
    assert (requests.sent, requests.ok, requests.failed) == (40, 21, 19)
    assert requests.failures == {"http_status 500": 12, "closed_mid_stream": 4, "empty_stream": 2, "timeout": 1}
    assert requests.short_answers == 2
    assert sum(turn.ok for turn in result.turns) == 21
    # Also of a turn in which requests failed, only what came is counted.
    assert sum(turn.output_tokens for turn in result.turns) == 19 * 8 + 2
    assert requests.too_many_failed(0.4)
    assert not requests.too_many_failed(0.5)


def test_a_failed_turn_is_left_out_and_the_conversation_goes_on() -> None:
    workload = Workload(conversations=1, turns=2, first=4, add=2, gen=3, concurrency=1)
    with stub_server([Behaviour.GOOD, Behaviour.STATUS_500, Behaviour.GOOD]) as server:
        result = measure(play_on(server, workload))
    assert server.prompts[2] == workload.user_tokens(0, 1) + workload.user_tokens(0, 2)
    assert (result.requests.ok, result.requests.failed) == (1, 1)


def test_when_all_fail_there_are_no_figures_and_nothing_is_divided_by_zero() -> None:
    result = measured([Behaviour.STATUS_500], SMALL)
    assert result.requests.ok == 0
    assert result.requests.too_many_failed(1.0)
    assert result.figures.output_tokens_per_s is None
    assert result.figures.ttft_p50_s is None
    assert result.figures.tpot_p99_s is None


def test_no_conversations_are_no_requests_and_nothing_is_divided_by_zero() -> None:
    result = measured([], Workload(conversations=0, turns=2, first=4, add=2, gen=3, concurrency=1))
    assert (result.requests.sent, result.requests.failed_share) == (0, 0.0)
    assert not result.requests.too_many_failed(0.0)
    assert result.figures.output_tokens_per_s is None


def test_one_token_answers_leave_the_time_a_token_undefined() -> None:
    result = measured([Behaviour.ONE_TOKEN], SMALL)
    assert result.requests.ok == 9
    assert result.figures.ttft_p50_s is not None
    assert (result.figures.tpot_p50_s, result.figures.tpot_p99_s) == (None, None)


def test_a_warm_up_that_fails_ends_the_load() -> None:
    with stub_server([Behaviour.STATUS_500]) as server, pytest.raises(WarmUpError, match=r"http_status 500.*is busy"):
        play_on(server, SMALL)


def test_answers_without_ids_are_replaced_counted_and_said() -> None:
    with stub_server([Behaviour.NO_TOKEN_IDS]) as server:
        played = play_on(server, SMALL)
    assert played.stand_in_answers == 9
    assert any("token ids of 9 answers" in note for note in measure(played).notes)
    second = SMALL.user_tokens(0, 1) + SMALL.stand_in_answer(0, 1, 4) + SMALL.user_tokens(0, 2)
    assert second in server.prompts


def test_a_server_that_goes_away_fails_the_rest() -> None:
    with stub_server([Behaviour.GOOD]) as server:
        server.choose = lambda index: Behaviour.GOOD if index < 4 else Behaviour.CLOSE_BEFORE
        played = play_on(server, SMALL)
    failed = [r for turn in played.turns for r in turn.results if isinstance(r, Failed)]
    assert len(failed) == 6
    assert {failure.kind for failure in failed} == {FailureKind.NO_CONNECTION}


def stats(vram: int, ram: int, computed: int, *, stored: int = 0, loaded: int = 0) -> dict[str, Any]:
    return {
        "tokens": {"queried": vram + ram + computed, "vram_hit": vram, "ram_hit": ram, "computed": computed},
        "store": {"bytes": stored},
        "load": {"bytes": loaded},
        "failures": {"store": 0, "load": 0},
        "tiers": {"vram": {"capacity_bytes": 10}, "ram": {"capacity_bytes": 100}},
    }


def with_stats(documents: list[dict[str, Any]], workload: Workload) -> Measured:
    """Of a server whose statistics are these at the turns' boundaries; each turn, the first request moves them on."""
    with stub_server([Behaviour.GOOD]) as server:
        server.stats = documents[0]

        def choose(index: int) -> Behaviour:
            server.stats = documents[-(-index // workload.conversations)]
            return Behaviour.GOOD

        server.choose = choose
        return measure(play_on(server, workload))


def test_sources_are_those_of_the_measured_turns_only() -> None:
    workload = Workload(conversations=2, turns=2, first=4, add=2, gen=3, concurrency=2)
    result = with_stats([stats(100, 100, 100), stats(100, 100, 108), stats(104, 108, 112, loaded=7)], workload)
    assert result.sources is not None
    tokens = result.sources.tokens
    assert (tokens.vram, tokens.ram, tokens.computed) == (4, 8, 4)
    assert result.sources.loaded_bytes == 7
    assert result.turns[0].tokens is not None
    assert result.turns[0].tokens.computed == 8


def test_stored_and_never_reused_is_said() -> None:
    """Field trial B39."""
    workload = Workload(conversations=2, turns=1, first=4, add=2, gen=3, concurrency=2)
    result = with_stats([stats(0, 0, 0), stats(0, 0, 8, stored=5_000_000)], workload)
    assert any("stored 5 MB, reused 0" in note for note in result.notes)


def test_a_server_that_knew_the_prompts_already_is_said() -> None:
    workload = Workload(conversations=2, turns=2, first=4, add=2, gen=3, concurrency=2)
    result = with_stats([stats(0, 0, 0), stats(6, 0, 2), stats(12, 0, 4)], workload)
    assert any("another --seed" in note for note in result.notes)


def test_without_statistics_the_sources_are_unknown() -> None:
    assert measured([Behaviour.GOOD], SMALL).sources is None
