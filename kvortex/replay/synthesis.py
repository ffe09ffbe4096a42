"""Made-up traces: conversations with people thinking in between, one-off documents, agents, and one visited in turn."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from itertools import count
from typing import Final

from kvortex.replay.trace import BLOCK_TOKENS, TracedRequest

_LONGEST_TOKENS: Final = 120_000


@dataclass(frozen=True, slots=True)
class _Kind:
    """One sort of conversation. Sizes are log-normal: (mean, deviation) of the logarithm.

    Attributes:
        goes_on: chance of another turn.
        thinks_s: median seconds between an answer and the next prompt.
    """

    first_tokens: tuple[float, float]
    added_tokens: tuple[float, float]
    output_tokens: tuple[float, float]
    goes_on: float
    thinks_s: float


_KINDS: Final = {
    "chat": _Kind((7.5, 1.2), (4.0, 1.0), (5.5, 0.8), goes_on=0.75, thinks_s=90.0),
    "agent": _Kind((8.5, 0.8), (6.5, 1.0), (4.0, 0.7), goes_on=0.93, thinks_s=4.0),
    "document": _Kind((9.3, 0.9), (4.0, 1.0), (5.5, 0.8), goes_on=0.02, thinks_s=90.0),
}


def mixed_trace(
    seed: int, *, seconds: float, chats: float = 0.5, agents: float = 0.1, documents: float = 0.4, a_second: float = 3.0
) -> list[TracedRequest]:
    """Conversations that start at random, seven in ten of them with one of five shared system prompts.

    Args:
        chats, agents, documents: shares of the conversations.
        a_second: conversations that start.
    """
    dice = random.Random(seed)
    fresh = count()
    order = count()
    systems = [[next(fresh) for _ in range(dice.choice([1, 1, 2, 4, 8]))] for _ in range(5)]
    due: list[tuple[float, int, _Kind, list[int], int]] = []
    starts_s = 0.0
    while (starts_s := starts_s + dice.expovariate(a_second)) < seconds:
        name = dice.choices(("chat", "agent", "document"), (chats, agents, documents))[0]
        kind = _KINDS[name]
        system = dice.choice(systems) if dice.random() < 0.7 else []
        own = int(dice.lognormvariate(*kind.first_tokens))
        blocks = system + [next(fresh) for _ in range(own // BLOCK_TOKENS)]
        heapq.heappush(due, (starts_s, next(order), kind, blocks, len(system) * BLOCK_TOKENS + own))
    requests: list[TracedRequest] = []
    while due:
        now_s, _, kind, blocks, tokens = heapq.heappop(due)
        if now_s > seconds:
            break
        output = int(dice.lognormvariate(*kind.output_tokens))
        rest = [next(fresh)] if tokens % BLOCK_TOKENS else []
        requests.append(TracedRequest(now_s, tokens, output, (*blocks, *rest)))
        if dice.random() < kind.goes_on and tokens < _LONGEST_TOKENS:
            tokens += output + int(dice.lognormvariate(*kind.added_tokens))
            grown = blocks + [next(fresh) for _ in range(tokens // BLOCK_TOKENS - len(blocks))]
            pause_s = dice.lognormvariate(0, 1.0) * kind.thinks_s + output / 40
            heapq.heappush(due, (now_s + pause_s, next(order), kind, grown, tokens))
    return requests


def round_robin(*, conversations: int, blocks_each: int, rounds: int, pause_s: float = 1.0) -> list[TracedRequest]:
    """Conversations of equal length, asked for again and again, one after another."""
    return [
        TracedRequest(
            (turn * conversations + talk) * pause_s,
            blocks_each * BLOCK_TOKENS,
            200,
            tuple(range(talk * blocks_each, (talk + 1) * blocks_each)),
        )
        for turn in range(rounds)
        for talk in range(conversations)
    ]
