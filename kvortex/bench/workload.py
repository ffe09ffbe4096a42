"""What is played: conversations of token ids that grow turn by turn, the same ones for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum

from kvortex.bench.vocabulary import Vocabulary


class _Stream(Enum):
    """Random numbers that must not depend on each other, nor on the order in which requests end."""

    USER = "user"
    STAND_IN = "stand-in"
    WARM_UP = "warm-up"


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations that all take turn 1, then all turn 2, and so on.

    Attributes:
        conversations: how many.
        turns: requests of each.
        first: tokens of a conversation's first prompt.
        add: tokens that each further turn adds to prompt and answer of the one before.
        gen: tokens to generate a turn.
        concurrency: requests in flight at a time.
        seed: of all token ids.
        vocabulary: where they are drawn from.
    """

    conversations: int = 40
    turns: int = 4
    first: int = 4096
    add: int = 512
    gen: int = 128
    concurrency: int = 16
    seed: int = 0
    vocabulary: Vocabulary = field(default_factory=Vocabulary)

    @property
    def measured_from_turn(self) -> int:
        """The first turn that is measured: the second, since nothing can be known of a conversation before."""
        return min(2, self.turns)

    @property
    def longest(self) -> int:
        """Tokens of a conversation at its end, prompt and answers."""
        return self.first + (self.turns - 1) * (self.add + self.gen) + self.gen

    def user_tokens(self, conversation: int, turn: int) -> list[int]:
        """What the user says in turn `turn` (from 1)."""
        return self._draw(_Stream.USER, f"{conversation}/{turn}", self.first if turn == 1 else self.add)

    def stand_in_answer(self, conversation: int, turn: int, num_tokens: int) -> list[int]:
        """Tokens in place of an answer whose ids are not known."""
        return self._draw(_Stream.STAND_IN, f"{conversation}/{turn}", num_tokens)

    def warm_up_prompt(self) -> list[int]:
        """As long as a first prompt, and none of them."""
        return self._draw(_Stream.WARM_UP, "", self.first)

    def _draw(self, stream: _Stream, name: str, count: int) -> list[int]:
        # Seeded by text: the same numbers on every machine and with every version of Python.
        rng = random.Random(f"{stream.value}/{self.seed}/{name}")
        return rng.choices(range(self.vocabulary.low, self.vocabulary.high), k=count)
