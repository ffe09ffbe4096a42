"""The errors a user can meet, as one tree.

    KVortexError                 says what happened, why, and what to do; a command prints it and ends
    ├── UsageError               the call or the configuration is wrong            -> exit 2
    │   └── ConfigError          ... at a place: a file and line, an option, an environment variable
    └── UnfitError               this machine, vLLM or model cannot do what was asked -> exit 1

Our own bugs are assertions with numbers; faults at run time are counted misses, never exceptions to the caller.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    """The command line or the configuration asks for something that cannot be."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Place:
    """Where a configuration value stands: `kvortex.yaml:7`, `--set kv_cache.num_streams`, `KVORTEX_NUM_STREAMS`."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


class ConfigError(UsageError):
    """A configuration value is wrong, at a known place."""

    def __init__(self, place: Place, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"{place}: {message}", hint=hint)
        self.place = place


class UnfitError(KVortexError):
    """The machine, the vLLM installed or the model cannot run KVortex as configured."""
