"""Which token ids prompts are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvortex.errors import KVortexError, UsageError

# Below are often control and byte tokens; nearly every vocabulary is larger than this.
_USUAL_LOW: Final = 1000
_USUAL_HIGH: Final = 30000


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids to draw from: `low` and above, below `high`."""

    low: int = _USUAL_LOW
    high: int = _USUAL_HIGH

    def __str__(self) -> str:
        return f"{self.low}-{self.high - 1}"


def parse_vocabulary(text: str) -> Vocabulary:
    """`1000-29999`, both ends included; raises UsageError for anything else."""
    low, dash, high = text.partition("-")
    if not dash or not low.isdecimal() or not high.isdecimal() or int(low) > int(high):
        raise UsageError(f"--vocab {text!r} is no range of token ids", hint="write LOW-HIGH, such as 1000-29999")
    return Vocabulary(int(low), int(high) + 1)


def vocabulary_of(vocab_size: int) -> Vocabulary:
    """The usual ids, or those that a smaller vocabulary has of them; never its first quarter."""
    if vocab_size >= _USUAL_HIGH:
        return Vocabulary()
    return Vocabulary(min(_USUAL_LOW, vocab_size // 4), vocab_size)


def vocabulary_of_model(model: str) -> Vocabulary:
    """By the model's `config.json`; the usual ids where it cannot be read from here.

    Args:
        model: a Hub name or a directory.
    """
    from kvortex.model_files import read_model_files

    try:
        config = read_model_files(model).config
    except KVortexError:
        # Ids that the model lacks are refused by the server, with a message: nothing is measured wrongly.
        return Vocabulary()
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, Mapping) else {}):
        if isinstance(part.get("vocab_size"), int) and part["vocab_size"] > 0:
            return vocabulary_of(part["vocab_size"])
    return Vocabulary()
