"""The questions of `kvortex init --interactive`: each answer is checked by the rules of the file it goes into."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import typer

from kvortex.config.checks import problems
from kvortex.config.machine import MachineFacts
from kvortex.config.resolve import CommandLine, resolve
from kvortex.errors import ConfigError, KVortexError
from kvortex_cli.console import report


@dataclass(slots=True)
class Interview:
    """Asks on stderr and reads standard input; an empty answer takes what is suggested.

    Attributes:
        model: what will be served.
        answers: settings so far, as text, by key: `kv_cache.ram_cache_size`, `tensor_parallel_size`.
    """

    model: str
    machine: MachineFacts
    answers: dict[str, str] = field(default_factory=dict)

    def ask(self, key: str, question: str, suggested: str) -> str:
        """The answer, which `kvortex serve` would accept on this machine; asks again until it would.

        Raises:
            typer.Abort: standard input ended, or Ctrl-C.
        """
        while True:
            text = _prompt(f"{question}\n  {key}", suggested)
            refused = next(self._refusals({**self.answers, key: text}, key), None)
            if refused is None:
                self.answers[key] = text
                return text
            report("error", refused.message, refused.hint)

    def _refusals(self, answers: dict[str, str], key: str) -> Iterator[KVortexError]:
        command_line = CommandLine(self.model, None, [f"{name}={text}" for name, text in answers.items()])
        try:
            resolved = resolve(command_line, {}, self.machine)
        except ConfigError as error:
            yield KVortexError(_without_set(error), hint=error.hint)
            return
        for problem in problems(resolved, self.machine, None):
            # What was not asked yet, such as the cache's size, may still change.
            if not isinstance(problem, ConfigError):
                yield problem
            elif problem.place.source == f"--set {key}":
                yield KVortexError(_without_set(problem), hint=problem.hint)


def _without_set(error: ConfigError) -> str:
    """The key and what is wrong: nobody has written `--set`."""
    return error.message.removeprefix("--set ")


def ask_model() -> str:
    return _prompt("Model to serve: a Hub name or a directory\n  model", "")


def _prompt(text: str, suggested: str) -> str:
    """One line of standard input. Not typer's prompt: it writes to stdout, where only data goes."""
    print(f"{text} [{suggested}]: " if suggested else f"{text}: ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        print(file=sys.stderr)
        raise typer.Abort
    return line.strip() or suggested
