"""The document of /kvortex/sessions for people. Imported late: rich is not needed for `--help`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from kvortex.sizes import counted

Line = Mapping[str, Any]

_MAX_NAME = 40


def sessions_tables(document: Line) -> list[Table]:
    """The conversations heard of last, one table an engine."""
    engines: Sequence[Line] = document["engines"]
    return [_of_engine(engine, document["top"]) for engine in engines]


def _of_engine(engine: Line, top: int) -> Table:
    lines: Sequence[Line] = engine["sessions"]
    if not engine["enabled"]:
        return Table("conversations are told apart only with kv_cache.prefetch_enabled: true", box=None)
    title = f"{counted(engine['known'], 'conversation')} known, the {min(top, len(lines))} heard of last"
    table = Table(title=title, title_justify="left")
    table.add_column("conversation", overflow="fold")
    for name in ("turns", "tokens", "silent", "back in", "within 60 s", "VRAM / RAM / all blocks"):
        table.add_column(name, justify="right")
    table.add_column("brought: used / wasted / late", justify="right")
    for line in lines:
        table.add_row(*_cells(line))
    return table


def _cells(line: Line) -> tuple[str, ...]:
    name: str = line["session"] if len(line["session"]) <= _MAX_NAME else line["session"][: _MAX_NAME - 3] + "..."
    brought = line["prefetch"]
    return (
        name + (" (salted)" if line["salted"] else ""),
        f"{line['turns']:,}",
        f"{line['tokens']:,}",
        "talks" if line["silent_s"] is None else f"{line['silent_s']:.0f} s",
        _expected(line),
        f"{line['p_return_60s']:.0%}",
        f"{line['vram_blocks']:,} / {line['ram_blocks']:,} / {line['blocks']:,}",
        f"{brought['issued_blocks']:,}: {brought['used_blocks']:,} / {brought['wasted_blocks']:,}"
        f" / {brought['late_blocks']:,}",
    )


def _expected(line: Line) -> str:
    if line["silent_s"] is None:
        return "-"
    return "never" if line["expected_in_s"] is None else f"{line['expected_in_s']:.0f} s"
