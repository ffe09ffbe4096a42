"""Which requests of a trace are one conversation: a prompt that goes on where an earlier one ended.

An estimate, since a trace names no conversation: a short prompt that ends inside a shared system prompt is taken for
the beginning of the next one with the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvortex.replay.trace import TracedRequest


@dataclass(frozen=True, slots=True)
class Conversations:
    """
    Attributes:
        median_tokens, p95_tokens: of a conversation at its last request, its answer included.
        at_once: most that had begun and not ended at one time; one ends with its last request.
    """

    number: int
    mean_turns: float
    median_tokens: int
    p95_tokens: int
    at_once: int


@dataclass(slots=True)
class _Talk:
    began_s: float
    ended_s: float
    tokens: int


def find_conversations(requests: Sequence[TracedRequest]) -> Conversations:
    """
    Args:
        requests: at least one, in order of arrival.
    """
    talks: list[_Talk] = []
    ends: dict[int, _Talk] = {}  # last complete block of a conversation -> the conversation
    for request in requests:
        talk = _continued(request, ends)
        tokens = request.input_tokens + request.output_tokens
        if talk is None:
            talk = _Talk(request.arrival_s, request.arrival_s, tokens)
            talks.append(talk)
        talk.ended_s, talk.tokens = request.arrival_s, tokens
        last = _last_complete(request)
        if last is not None:
            ends[last] = talk
    lengths = sorted(talk.tokens for talk in talks)
    return Conversations(
        number=len(talks),
        mean_turns=len(requests) / len(talks),
        median_tokens=lengths[len(lengths) // 2],
        p95_tokens=lengths[len(lengths) * 95 // 100],
        at_once=_at_once(talks),
    )


def _continued(request: TracedRequest, ends: dict[int, _Talk]) -> _Talk | None:
    """The conversation that ended nearest to this prompt's end; its old end counts no more."""
    for block in reversed(request.blocks):
        talk = ends.pop(block, None)
        if talk is not None:
            return talk
    return None


def _last_complete(request: TracedRequest) -> int | None:
    complete = request.blocks[: request.input_tokens // request.block_tokens] + request.output_blocks
    return complete[-1] if complete else None


def _at_once(talks: Sequence[_Talk]) -> int:
    changes = sorted([(talk.began_s, 0) for talk in talks] + [(talk.ended_s, 1) for talk in talks])
    most = now = 0
    for _, ends in changes:
        now += -1 if ends else 1
        most = max(most, now)
    return most
