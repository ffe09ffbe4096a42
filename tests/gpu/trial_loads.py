"""The loads of the trials."""

from __future__ import annotations

import random
from typing import Any

from tests.e2e.engine import Engine, prompt
from tests.gpu.trial_engine import Played, StalledError, play
from tests.gpu.trial_sizes import Size

FIRST_PREEMPTIONS = 300


def same_prompts(vllm: Engine, size: Size, rounds: int | None = None) -> dict[str, Any]:
    """B03: the answers of each round, in the prompts' order; asked in another order each time."""
    num, length, answer, all_rounds = size.same
    prompts = [prompt(seed, length) for seed in range(num)]
    said = []
    for number in range(rounds or all_rounds):
        order = list(range(num))
        random.Random(number).shuffle(order)
        played = play(vllm, [prompts[i] for i in order], answer, size.seqs)
        by_prompt = dict(zip(order, played.answers, strict=True))
        said.append([by_prompt[i] for i in range(num)])
    return {"prompts": prompts, "rounds": said}


Answers = list[tuple[int, ...]]


def under_pressure(vllm: Engine, size: Size, runs: int) -> dict[str, Any]:
    """B23: requests that are preempted and come back; the answers of each run, and how often that was. Of the first
    preemptions: free blocks, requests that run, requests that wait, and the request's tokens.

    A second run asks so few at a time that nobody is preempted: what decoding wrote and what a prefill of the same
    tokens writes then have to be the same, too.
    """
    num, length, answer = size.pressure
    prompts = [prompt(5000 + seed, length) for seed in range(num)]
    scheduler, preempt = vllm.scheduler, vllm.scheduler._preempt_request
    num_preempted = 0
    first: list[tuple[int, int, int, int]] = []

    def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_preempted
        num_preempted += 1
        if len(first) < FIRST_PREEMPTIONS:
            running = len(scheduler.running)
            first.append(
                (vllm.free_blocks, running, scheduler.get_num_unfinished_requests() - running, request.num_tokens)
            )
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = counted
    try:
        played = [play(vllm, prompts, answer, at_once) for at_once in (num, max(1, num // 8))[:runs]]
    finally:
        scheduler._preempt_request = preempt
    said = [one.answers for one in played]
    walls = [round(one.wall_s, 2) for one in played]
    return {"prompts": prompts, "runs": said, "preempted": num_preempted, "first": first, "wall_s": walls}


def returning_sessions(vllm: Engine, size: Size, runs: int) -> dict[str, Any]:
    """B33: A and B, then C and D, which each need all of the pool, then A and B again, longer and together."""
    runs_said: list[Answers] = []
    prompts: list[list[int]] = []
    for _ in range(runs):
        rng = random.Random(33)
        said: Answers = []
        prompts = []
        for number in range(size.returns):
            a, b, c, d = (
                prompt(6000 + 4 * number + i, int(size.pool_tokens * rng.uniform(least, most)))
                for i, (least, most) in enumerate([(0.40, 0.49), (0.40, 0.49), (0.80, 0.95), (0.80, 0.95)])
            )
            play(vllm, [a, b], 4, 2)
            play(vllm, [c, d], 4, 2)
            longer = [tokens + prompt(7000 + number, rng.randrange(16, 200)) for tokens in (a, b)]
            prompts += longer
            said += play(vllm, longer, 8, 2).answers
        runs_said.append(said)
    return {"prompts": prompts, "runs": runs_said}


def stalls(vllm: Engine, size: Size) -> bool:
    """The control of B33, on an engine that loses loads: whether a session that comes back is seen to hang."""
    tokens = prompt(6500, size.pool_tokens // 4)
    play(vllm, [tokens], 1, 1)
    lose_vram(vllm, size, 60)
    vllm.settle()
    try:
        play(vllm, [tokens], 1, 1, stall_s=3)
    except StalledError:
        return True
    return False


def shared_prefix(vllm: Engine, size: Size, seed: int) -> Played:
    """B38: requests with one prefix, which RAM has and VRAM has lost."""
    num, at_once, prefix, own, answer = size.shared
    tokens = prompt(8000 + seed, prefix)
    play(vllm, [tokens], 1, 1)
    lose_vram(vllm, size, seed)
    return play(vllm, [tokens + prompt(seed * num + i, own) for i in range(num)], answer, at_once)


def lose_vram(vllm: Engine, size: Size, seed: int) -> None:
    """Pushes everything out of VRAM, with what comes only once."""
    length = size.pool_tokens // 4
    play(vllm, [prompt(9000 + 10 * seed + i, length) for i in range(6)], 1, 1)


def fresh_prompts(vllm: Engine, size: Size, seed: int) -> Played:
    """B39: nothing ever comes again."""
    num, at_once, length, answer = size.fresh
    return play(vllm, [prompt(10**6 * (seed + 1) + i, length) for i in range(num)], answer, at_once)
