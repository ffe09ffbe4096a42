"""Which options stood on the command line: one that would change nothing is refused, not ignored."""

from __future__ import annotations

from collections.abc import Iterable

import typer


def refuse_without(ctx: typer.Context, options: Iterable[str], other: str) -> None:
    """Refuses options that mean something with another one only, where that one is not there.

    Args:
        options: their flags, such as `--every`.
        other: what they go with, for the message: `--watch`.

    Raises:
        UsageError: names the first that was given.
    """
    from kvortex.errors import UsageError

    flag = next((flag for flag in options if is_given(ctx, flag)), None)
    if flag is not None:
        raise UsageError(f"{flag} goes with {other}", hint=f"leave {flag} out; see `{ctx.command_path} --help`")


def is_given(ctx: typer.Context, flag: str) -> bool:
    """Whether the option stood on the command line, be it with its default value."""
    parameter = next(parameter for parameter in ctx.command.params if flag in parameter.opts)
    source = ctx.get_parameter_source(str(parameter.name))
    # Typer carries click's enumeration under different names over its versions.
    return source is not None and source.name == "COMMANDLINE"
