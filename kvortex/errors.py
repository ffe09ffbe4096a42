"""The errors a user can meet, as one tree.

    KVortexError                 says what happened, why, and what to do; a command prints it and ends
    ├── UsageError               the call or the configuration is wrong            -> exit 2
    │   └── ConfigError          ... at a place: a file and line, an option, an environment variable
    └── UnfitError               this machine, vLLM or model cannot do what was asked -> exit 1

Our own bugs are assertions with numbers; faults at run time are counted misses, never exceptions to the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MOST_CHARACTERS: Final = 800


class KVortexError(Exception):
    """Base of every message meant for the user.

    Args:
        message: what is wrong, in one sentence.
        hint: what to do instead; printed on a line of its own.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class UsageError(KVortexError):
    """The command line or the configuration asks for something that cannot be.

    What was written may be anything: its message and its hint are one printable line each, whatever they quote.
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(_one_line(message), hint=None if hint is None else _one_line(hint))


def _one_line(text: str) -> str:
    """A terminal's control characters are spelled out, and a long quotation loses its middle."""
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[: _MOST_CHARACTERS // 2]} [...] {text[-_MOST_CHARACTERS // 2 :]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a configuration value stands: `kvortex.yaml:7`, `--set kv_cache.num_streams`, `KVORTEX_NUM_STREAMS`."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"

    def without_key(self, message: str) -> str:
        """What a message says after its key, where this place names that key already: `--port: takes ...`."""
        key, blank, rest = message.partition(" ")
        names_it = self.line is None and _key(key.removesuffix(":")) == _key(self.source)
        return rest if names_it and blank else message


def _key(name: str) -> str:
    """`num_streams` of `--set kv_cache.num_streams`, `kv_cache.num_streams`, `--num-streams`, `KVORTEX_NUM_STREAMS`."""
    last = name.rpartition(" ")[2].rpartition(".")[2]
    return last.lstrip("-").replace("-", "_").lower().removeprefix("kvortex_")


class ConfigError(UsageError):
    """A configuration value is wrong, at a known place."""

    def __init__(self, place: Place, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"{place}: {place.without_key(message)}", hint=hint)
        self.place = place


class UnfitError(KVortexError):
    """The machine, the vLLM installed or the model cannot run KVortex as configured."""
