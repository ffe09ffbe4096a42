"""What is known of a run when it is born: how a prompt is cut into runs, and the facts a hazard is learnt from."""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvortex.cache.policies.adaptive.runs import Visit

_USES: Final = (2, 3, 4, 6, 10)
_SESSIONS: Final = (2, 4, 10)
NUM_FACTS: Final = 21
_OUTPUT: Final = 4
_EDGE: Final = 10
_SHORT_OUTPUT: Final = 15
_SHORT_OUTPUT_TOKENS: Final = 50
_FACTS: Final = struct.Struct(f"{NUM_FACTS}f")


class Cut(NamedTuple):
    """Blocks `start` to `end` of a prompt: one run.

    Attributes:
        uses, sessions: prompts, and conversations, that have asked for it, this one included.
        is_new: no prompt before had these blocks, as far as is remembered.
        is_edge: the prompt's last block, which its next turn may not have.
    """

    start: int
    end: int
    uses: int
    sessions: int
    is_new: bool
    is_edge: bool


def cut(history: Sequence[tuple[int, int]], num_blocks: int) -> Iterator[Cut]:
    """Cuts a prompt wherever the history of its blocks changes.

    Args:
        history: (uses, sessions), this prompt included, of its leading blocks; those behind are new.
    """
    assert num_blocks > 0
    starts: list[int] = []
    before: tuple[int, int] | None = None
    last_tag: tuple[int, int] | None = None
    for j, uses_and_sessions in enumerate(history):
        if uses_and_sessions is before or uses_and_sessions == before:
            continue
        before = uses_and_sessions
        tag = (_uses_bucket(before[0]), _steps(before[1], _SESSIONS))
        if tag != last_tag:
            starts.append(j)
            last_tag = tag
    for start in (len(history), num_blocks - 1):  # the first new block, and the last of all
        if start < num_blocks and (not starts or starts[-1] < start):
            starts.append(start)
    for start, end in zip(starts, [*starts[1:], num_blocks], strict=True):
        is_new = start >= len(history)
        yield Cut(start, end, *((1, 1) if is_new else history[start]), is_new=is_new, is_edge=end == num_blocks)


def facts_of(visit: Visit, part: Cut, num_known: int) -> tuple[float, ...]:
    """The facts of a run, on logarithmic scales, near zero and of size one for usual prompts.

    Args:
        num_known: leading blocks of the prompt that are not new.
    """
    goes_on = visit.turn > 0
    again = not part.is_new
    num_new = visit.num_blocks - num_known
    log_turn = math.log1p(visit.turn) - 1
    log_new = math.log1p(num_new)
    shared = part.sessions >= 2
    return (
        float(not goes_on),
        log_turn if goes_on else 0.0,
        math.log(visit.gap_s) - 4.6 if goes_on else 0.0,
        visit.sum_log_gaps / visit.turn - 4.6 if goes_on else 0.0,
        _log_output(visit.output_tokens),
        math.log1p(visit.num_blocks) - 3,
        log_new - 1 if goes_on else 0.0,
        0.0 if goes_on else log_new - 2.5,
        float(again),
        math.log(part.uses) - 1 if again else 0.0,
        float(part.is_edge),
        math.log1p(part.start) - 2.5,
        log_new - 1 if again else 0.0,
        float(again and not goes_on),
        float(goes_on and part.is_new and num_new >= 4),
        float(visit.output_tokens < _SHORT_OUTPUT_TOKENS),
        log_turn if again and goes_on else 0.0,
        float(shared),
        math.log(part.sessions),
        math.log(part.sessions / part.uses) if shared else 0.0,
        math.log1p(visit.added_tokens) / 2 - 2 if goes_on else 0.0,
    )


def pack(facts: Sequence[float]) -> bytes:
    """Facts as the model takes them."""
    return _FACTS.pack(*facts)


def with_output(packed: bytes, output_tokens: float) -> tuple[float, ...]:
    """The same facts, now that the length of the answer is known."""
    facts = list(_FACTS.unpack(packed))
    facts[_OUTPUT] = _log_output(output_tokens)
    facts[_SHORT_OUTPUT] = float(output_tokens < _SHORT_OUTPUT_TOKENS)
    return tuple(facts)


def is_edge(packed: bytes) -> bool:
    return bool(_FACTS.unpack(packed)[_EDGE])


def traits_of(visit: Visit, uses: int, *, is_edge: bool) -> tuple[int, ...]:
    """The coarse class of a run, by which the regression is corrected."""
    return (
        _uses_bucket(uses),
        _steps(visit.turn, (1, 2, 4)),
        _steps(visit.output_tokens, (50, 200, 500)),
        _steps(visit.gap_s, (1e-9, 60, 180)),
        int(is_edge),
    )


def _log_output(tokens: float) -> float:
    return (math.log1p(tokens) - 5.5) / 1.5


def _uses_bucket(uses: int) -> int:
    return _steps(uses, _USES)


def _steps(value: float, edges: Sequence[float]) -> int:
    return bisect_right(edges, value)
