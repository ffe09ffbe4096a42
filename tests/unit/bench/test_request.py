"""One request against a server that fails in every way: field trial B62."""

from __future__ import annotations

import asyncio

import pytest

from kvortex.bench.request import Endpoint, Failed, FailureKind, Good, complete, message_of
from tests.fakes.stub_server import Behaviour, answer_to, stub_server

PROMPT = [5, 6, 7]


def ask(
    *behaviours: Behaviour,
    num_tokens: int = 8,
    timeout_s: float = 20.0,
    delay_s: float = 0.0,
    token_delay_s: float = 0.0,
) -> Good | Failed:
    """The last answer of a server with these behaviours."""

    async def run(url: str) -> Good | Failed:
        endpoint = Endpoint(url, "stub")
        async with endpoint.open_client() as client:
            for _ in behaviours[1:]:
                await complete(client, endpoint, PROMPT, num_tokens, timeout_s)
            return await complete(client, endpoint, PROMPT, num_tokens, timeout_s)

    with stub_server(behaviours, delay_s=delay_s, token_delay_s=token_delay_s) as server:
        return asyncio.run(run(server.url))


def good(*behaviours: Behaviour, num_tokens: int = 8) -> Good:
    answer = ask(*behaviours, num_tokens=num_tokens)
    assert isinstance(answer, Good), answer
    return answer


def test_a_good_answer_has_its_token_ids_and_times() -> None:
    answer = good(Behaviour.GOOD)
    assert answer.token_ids == tuple(answer_to(PROMPT, 8))
    assert answer.output_tokens == 8
    assert answer.tpot_s is not None
    assert 0 < answer.ttft_s <= answer.ttft_s + answer.tpot_s * 7 <= answer.latency_s


def test_the_time_to_the_first_token_begins_when_the_request_is_sent() -> None:
    answer = ask(Behaviour.GOOD, delay_s=0.05)
    assert isinstance(answer, Good)
    assert answer.ttft_s >= 0.05


def test_tokens_are_timed_as_they_come() -> None:
    """Not when the whole answer is there. Half of the delay, since a busy machine may take up the first one late."""
    answer = ask(Behaviour.GOOD, token_delay_s=0.05)
    assert isinstance(answer, Good)
    assert answer.tpot_s is not None
    assert answer.tpot_s > 0.025


@pytest.mark.parametrize("behaviour", [Behaviour.ONE_TOKEN, Behaviour.ALL_AT_ONCE])
def test_the_time_a_token_is_undefined_where_there_is_nothing_between_tokens(behaviour: Behaviour) -> None:
    answer = good(behaviour)
    assert answer.tpot_s is None
    assert answer.output_tokens == (1 if behaviour is Behaviour.ONE_TOKEN else 8)


def test_an_answer_without_token_ids_is_good_and_its_ids_are_unknown() -> None:
    answer = good(Behaviour.NO_TOKEN_IDS)
    assert answer.token_ids is None
    assert answer.output_tokens == 8


@pytest.mark.parametrize(
    ("behaviour", "kind", "detail"),
    [
        (Behaviour.STATUS_500, FailureKind.HTTP_STATUS, "the engine is busy"),
        (Behaviour.CLOSE_BEFORE, FailureKind.NO_CONNECTION, "disconnected"),
        (Behaviour.CLOSE_MID_STREAM, FailureKind.CLOSED_MID_STREAM, "RemoteProtocolError"),
        (Behaviour.END_MID_STREAM, FailureKind.CLOSED_MID_STREAM, "after 4 tokens"),
        (Behaviour.EMPTY, FailureKind.EMPTY_STREAM, "no token"),
        (Behaviour.ERROR_IN_STREAM, FailureKind.ERROR_IN_STREAM, "the engine is gone"),
        (Behaviour.NOT_A_STREAM, FailureKind.NOT_UNDERSTOOD, "a login page"),
    ],
)
def test_each_failure_has_its_kind(behaviour: Behaviour, kind: FailureKind, detail: str) -> None:
    answer = ask(behaviour)
    assert isinstance(answer, Failed), answer
    assert answer.kind is kind
    assert detail in answer.detail
    assert answer.status == (500 if kind is FailureKind.HTTP_STATUS else None)


@pytest.mark.timeout(20)
def test_a_hanging_request_ends_by_its_timeout_and_the_next_one_is_answered() -> None:
    answer = ask(Behaviour.HANG, timeout_s=0.2)
    assert isinstance(answer, Failed)
    assert answer.kind is FailureKind.TIMEOUT
    assert isinstance(ask(Behaviour.HANG, Behaviour.GOOD, timeout_s=0.5), Good)


def test_nobody_there_is_no_connection() -> None:
    with stub_server([Behaviour.GOOD]) as server:
        url = server.url

    async def run() -> Good | Failed:
        endpoint = Endpoint(url, "stub")
        async with endpoint.open_client() as client:
            return await complete(client, endpoint, PROMPT, 4, 20)

    answer = asyncio.run(run())
    assert isinstance(answer, Failed)
    assert answer.kind is FailureKind.NO_CONNECTION


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"error": {"message": "too long", "code": 400}}', "too long"),
        ('{"detail": "Unauthorized"}', "Unauthorized"),
        ("Bad Gateway", "Bad Gateway"),
        ("[1]", "[1]"),
    ],
)
def test_what_an_error_body_says(body: str, message: str) -> None:
    assert message_of(body) == message
