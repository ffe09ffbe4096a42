"""Blocks are in VRAM before the request that asks for them, and answers are what they always were."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvortex.cache.prefetch.budget import WASTE_SHARE, Cause
from kvortex.cache.sessions.rhythm import HABITS, Habit, Rhythms, bin_of
from kvortex.cache.sessions.session import Scope, scope_of
from kvortex.vllm_plugin.prefetcher import Prefetcher
from tests.e2e.engine import BLOCK_SIZE, WRITE_THROUGH, Answer, Engine, engine, greedy, prompt

PREFETCH = {**WRITE_THROUGH, "prefetch_enabled": True}
LENGTHS = (300, 420, 230, 350)


def named(session: str, max_tokens: int = 8, **params: Any) -> Any:
    return greedy(max_tokens, extra_args={"kv_transfer_params": {"session_id": session, **params}})


def conversation(number: int) -> list[int]:
    return prompt(100 + number, LENGTHS[number % len(LENGTHS)])


def next_turn(number: int, first: Answer) -> list[int]:
    return [*conversation(number), *first[0], *prompt(200 + number, 40)]


@pytest.fixture(scope="module")
def expected(tiny_llama: str) -> list[tuple[Answer, Answer]]:
    """Both turns of each conversation, from vLLM alone."""
    with engine(tiny_llama, None) as plain:
        answers = []
        for number in range(4):
            first = plain.ask(conversation(number))
            answers.append((first, plain.ask(next_turn(number, first))))
    return answers


def prefetcher(running: Engine) -> Prefetcher:
    found = running.side._prefetcher
    assert found is not None
    return found


def expect_returns(running: Engine, within_s: float = 8.0) -> None:
    """Teaches that every session comes back after so long, and that guesses were good so far."""
    rhythms = prefetcher(running).book.rhythms
    for habit in HABITS:
        for _ in range(200):
            rhythms.returned(habit, within_s)
    prefetcher(running).budget.requests_loaded(100_000)
    prefetcher(running).budget._rates[Cause.GUESS].saw(400, used=True)


def in_vram(running: Engine, scope: Scope, name: str) -> tuple[int, int]:
    """(blocks of the session that VRAM holds, all)."""
    session = prefetcher(running).book.named(scope, name)
    assert session is not None
    return sum(map(running.side._residency.holds, session.keys)), len(session.keys)


def bring_back(running: Engine, name: str) -> None:
    """Has the idle engine look now and then, as its server does, until the session is back."""
    deadline = time.monotonic() + 10.0
    running.settle()
    while len(set(in_vram(running, Scope(), name))) > 1 and time.monotonic() < deadline:
        prefetcher(running)._has_more = True
        running.settle()
        time.sleep(0.1)


def push_out(running: Engine, *sessions: str) -> None:
    """Prompts that nobody will ask for again, until VRAM has lost these sessions; nothing is guessed meanwhile."""
    book = prefetcher(running).book
    known = {session.number for session in book.recent(1000)}
    held = prefetcher(running)._planner._room
    prefetcher(running)._planner._room = lambda *, running: 0  # type: ignore[method-assign]
    running.evict_vram()
    prefetcher(running)._planner._room = held  # type: ignore[method-assign]
    for session in list(book.recent(1000)):
        if session.number not in known:
            book._forget(session)
    prefetcher(running)._owners.clear()
    prefetcher(running)._demand._taken = 0.0  # VRAM is not used over that fast all the time
    for name in sessions:
        assert in_vram(running, Scope(), name)[0] < 3


def test_a_returning_sessions_blocks_are_in_vram_before_its_request(
    tiny_llama: str, expected: list[tuple[Answer, Answer]]
) -> None:
    with engine(tiny_llama, PREFETCH) as running:
        expect_returns(running)
        first = running.ask(conversation(0), named("a"))
        push_out(running, "a")
        free = running.free_blocks
        bring_back(running, "a")
        before = running.stats()
        assert in_vram(running, Scope(), "a") == (9, 9)
        assert before["prefetch"] == {"issued_blocks": 9, "used_blocks": 0, "wasted_blocks": 0, "late_blocks": 0}
        assert running.free_blocks == free, "a block is not given back"

        second = running.ask(next_turn(0, first), named("a"))
        after = running.stats()
        assert (first, second) == expected[0]
        assert after["tokens"]["vram_hit"] - before["tokens"]["vram_hit"] == 9 * BLOCK_SIZE
        assert after["tokens"]["ram_hit"] == before["tokens"]["ram_hit"]
        assert after["prefetch"] == {"issued_blocks": 9, "used_blocks": 9, "wasted_blocks": 0, "late_blocks": 0}
        (line,) = [line for line in prefetcher(running).lines(10, None) if line["session"] == "a"]
        assert line["turns"] == 2
        assert (line["prefetch"]["used_blocks"], line["prefetch"]["late_blocks"]) == (9, 0)


def test_without_a_name_the_conversation_is_known_by_its_blocks(
    tiny_llama: str, expected: list[tuple[Answer, Answer]]
) -> None:
    with engine(tiny_llama, PREFETCH) as running:
        first = running.ask(conversation(1))
        known = len(prefetcher(running).book)
        assert (first, running.ask(next_turn(1, first))) == expected[1]
        assert len(prefetcher(running).book) == known
        assert running.stats()["sessions"] == {"known": known, "active": 0}


def test_a_prefetch_that_fails_leaves_nothing_and_the_request_loads_or_computes(
    tiny_llama: str, expected: list[tuple[Answer, Answer]]
) -> None:
    with engine(tiny_llama, PREFETCH) as running:
        expect_returns(running)
        first = running.ask(conversation(0), named("a"))
        push_out(running, "a")
        free = running.free_blocks
        for job in held_in_flight(running):
            job.failed, job.detail = True, "made to fail"
        running.settle()
        stats = running.stats()
        assert stats["failures"]["load"] >= 1
        assert stats["prefetch"]["wasted_blocks"] >= 1
        assert stats["tiers"]["ram"]["pinned_blocks"] == 0
        assert running.free_blocks == free
        assert (first, running.ask(next_turn(0, first), named("a"))) == expected[0]


def held_in_flight(running: Engine) -> Iterator[Any]:
    """Orders what is due, and gives the jobs before any answer has come."""
    prefetcher(running)._has_more = True
    with running.side._lock:
        in_use = running.side.view.in_use_blocks
        running.side._prefetch(prefetcher(running), running=False)
        assert running.side.view.in_use_blocks > in_use, "nothing was ordered"
    yield from prefetcher(running)._in_flight


def test_what_a_reset_overtakes_is_not_found(tiny_llama: str, expected: list[tuple[Answer, Answer]]) -> None:
    """Weights may have changed: no block from before may be published after."""
    with engine(tiny_llama, PREFETCH) as running:
        expect_returns(running)
        first = running.ask(conversation(0), named("a"))
        push_out(running, "a")
        jobs = list(held_in_flight(running))
        assert jobs
        running.side.reset()
        running.settle()
        assert in_vram(running, Scope(), "a")[0] < 3
        stats = running.stats()
        assert stats["tiers"]["ram"]["pinned_blocks"] == 0
        assert stats["prefetch"]["wasted_blocks"] == len(jobs[0].keys)
        assert (first, running.ask(next_turn(0, first), named("a"))) == expected[0]


def test_a_request_that_comes_while_its_blocks_are_on_their_way_waits_for_them(
    tiny_llama: str, expected: list[tuple[Answer, Answer]]
) -> None:
    with engine(tiny_llama, PREFETCH) as running:
        expect_returns(running)
        first = running.ask(conversation(0), named("a"))
        push_out(running, "a")
        (job,) = held_in_flight(running)
        before = running.stats()["tokens"]
        assert (first, running.ask(next_turn(0, first), named("a"))) == expected[0]
        after = running.stats()
        assert job.late
        assert after["prefetch"]["late_blocks"] == len(job.keys)
        assert after["tokens"]["vram_hit"] - before["vram_hit"] >= len(job.keys) * BLOCK_SIZE
        assert after["prefetch"]["used_blocks"] >= len(job.keys)


def test_a_request_behind_others_has_its_blocks_before_its_turn(
    tiny_llama: str, expected: list[tuple[Answer, Answer]]
) -> None:
    with engine(tiny_llama, PREFETCH, max_num_seqs=1) as running:
        first = running.ask(conversation(2))
        push_out(running)
        tokens = running.stats()["tokens"]
        busy, waiting = prompt(77, 64), next_turn(2, first)
        params = [greedy(60), greedy()]
        outputs = running.llm.generate(
            [{"prompt_token_ids": busy}, {"prompt_token_ids": waiting}], params, use_tqdm=False
        )
        assert tuple(outputs[1].outputs[0].token_ids) == expected[2][1][0]
        after = running.stats()
        assert after["tokens"]["vram_hit"] - tokens["vram_hit"] >= 7 * BLOCK_SIZE
        assert after["tokens"]["ram_hit"] == tokens["ram_hit"]
        assert after["prefetch"]["used_blocks"] >= 7


def test_callers_with_other_salts_share_nothing(tiny_llama: str) -> None:
    with engine(tiny_llama, PREFETCH) as running:
        expect_returns(running)
        tokens = conversation(0)
        for salt in ("one", "two"):
            running.llm.generate([{"prompt_token_ids": tokens, "cache_salt": salt}], named("same"), use_tqdm=False)
        book = prefetcher(running).book
        one, two = book.named(scope_of("one"), "same"), book.named(scope_of("two"), "same")
        assert one is not None
        assert two is not None
        assert one is not two
        assert not set(one.keys) & set(two.keys)
        assert book.named(Scope(), "same") is None
        push_out(running)
        assert running.side.hint("same", None, cache_salt=None)["known"] is False
        assert running.side.hint("same", None, cache_salt="one")["known"] is True
        running.settle()
        assert one.issued > 0 or two.issued > 0


class Inverted(Rhythms):
    """Says of the unlikely that it is sure, and of the likely that it is not."""

    def p_return_within(self, habit: Habit, silent_s: float, horizon_s: float) -> float:
        return 1 - super().p_return_within(habit, silent_s, horizon_s)


def test_wrong_predictions_waste_within_the_bound_and_answers_stay_right(
    tiny_llama: str, expected: list[tuple[Answer, Answer]]
) -> None:
    """The negative control: every guess is wrong, and requests for what was pushed out come all the time."""
    with engine(tiny_llama, PREFETCH) as running:
        prefetcher(running).book.rhythms = Inverted()
        rng = random.Random(4)
        firsts = [running.ask(conversation(n), named(f"s{n}")) for n in range(4)]
        for _ in range(12):
            number = rng.randrange(4)
            assert (firsts[number], running.ask(next_turn(number, firsts[number]), named(f"s{number}"))) == expected[
                number
            ]
            running.ask(prompt(rng.randrange(10**9), 900), named(f"once{rng.random()}", 1))
            prefetcher(running)._owners.clear()  # nor does it know whom it takes the blocks from
            prefetcher(running)._planner._look_again_at = 0.0
            prefetcher(running)._has_more = True
            running.settle()
        stats = running.stats()
        credit = prefetcher(running).budget._credit
        loaded = stats["load"]["blocks"]
        assert stats["prefetch"]["issued_blocks"] > 0
        assert stats["prefetch"]["wasted_blocks"] <= WASTE_SHARE * loaded + 2 * credit


def test_sessions_that_never_return_cost_a_bounded_share(tiny_llama: str) -> None:
    with engine(tiny_llama, PREFETCH) as running:
        for i in range(60):
            running.ask(prompt(5000 + i, 200), named(f"once-{i}", 2))
            running.side.hint(f"once-{i}", None, cache_salt=None)  # and somebody hints for each
        running.settle()
        stats = running.stats()
        credit = prefetcher(running).budget._credit
        assert stats["prefetch"]["used_blocks"] == 0
        assert stats["prefetch"]["issued_blocks"] <= WASTE_SHARE * stats["load"]["blocks"] + 3 * credit + 20
        assert stats["sessions"]["known"] == 60


def test_switched_off_nothing_is_known_and_nothing_moves(tiny_llama: str) -> None:
    with engine(tiny_llama, {**PREFETCH, "prefetch_enabled": False}) as running:
        first = running.ask(conversation(0), named("a"))
        running.evict_vram()
        running.ask(next_turn(0, first), named("a"))
        stats = running.stats()
        assert running.side._prefetcher is None
        assert stats["sessions"]["known"] == 0
        assert not any(stats["prefetch"].values())
        assert bin_of(0.0) == 0
