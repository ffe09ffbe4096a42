"""What a command prints: data on stdout, everything else on stderr; colour carries no meaning of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

import typer

from kvortex.errors import KVortexError

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH_OF_A_PIPE: Final = 200
_EXIT_INTERRUPTED: Final = 130
# Typer carries click under different names over its versions; this is click's exception for a wrong call.
_CLICK_ERRORS: Final = tuple(
    cast("type[Exception]", kind)
    for kind in typer.BadParameter.__mro__
    if kind.__name__ in ("UsageError", "ClickException")
)


@cache
def stdout() -> Console:
    """Where data goes. Text in brackets stays text: values are not markup."""
    return _console(to_stderr=False)


@cache
def stderr() -> Console:
    """Where progress, notes and messages go."""
    return _console(to_stderr=True)


def _console(*, to_stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if to_stderr else sys.stdout
    # A table in a pipe is not cut to a terminal's width: what reads it looks for whole values.
    width = None if stream.isatty() or "COLUMNS" in os.environ else _WIDTH_OF_A_PIPE
    return Console(stderr=to_stderr, markup=False, highlight=False, emoji=False, width=width)


def report(kind: str, message: str, hint: str | None = None) -> None:
    """One message on stderr, unwrapped: `error: ...` or `warning: ...`, then `hint: ...` on its own line."""
    print(f"{kind}: {message}", file=sys.stderr)
    if hint is not None:
        print(f"hint: {hint}", file=sys.stderr)


def run_reporting_errors(run: Callable[[], object]) -> NoReturn:
    """Runs a command and exits: with its exit code, or with a KVortexError's after its message.

    Args:
        run: a typer app in non-standalone mode; an int it returns is the exit code.
    """
    try:
        returned = run()
    except KVortexError as error:
        report("error", error.message, error.hint)
        sys.exit(error.exit_code)
    except _CLICK_ERRORS as error:
        report("error", _message(error), _help_hint(error))
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        report("error", "interrupted")
        sys.exit(_EXIT_INTERRUPTED)
    except BrokenPipeError:
        # Whoever read the output has gone; the interpreter would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(returned if isinstance(returned, int) and not isinstance(returned, bool) else 0)


def _message(error: Exception) -> str:
    """What is wrong with the call. Newer typers read values with pydantic, and hand on its words without the value."""
    error_ = cast(Any, error)
    faults = getattr(error.__cause__, "errors", None)
    if callable(faults):
        fault = next(iter(faults(include_url=False)))
        error_.message = _in_words(fault["type"], fault["msg"], fault["input"], fault.get("ctx", {}))
    return str(error_.format_message())


def _in_words(kind: str, message: str, given: object, context: Mapping[str, Any]) -> str:
    """One of pydantic's faults."""
    match kind:
        case "value_error":
            return str(context["error"])
        case "greater_than_equal":
            return f"takes {context['ge']:g} or more, not {given}"
        case "less_than_equal":
            return f"takes {context['le']:g} or less, not {given}"
        case "int_parsing" | "int_from_float" | "int_parsing_size":
            return f"takes a whole number, not {given!r}"
        case "float_parsing" | "finite_number":
            return f"takes a number, not {given!r}"
        case _:
            return f"{message}, not {given!r}"


def _help_hint(error: Exception) -> str | None:
    context = getattr(error, "ctx", None)
    return f"see `{context.command_path} --help`" if context is not None else None
