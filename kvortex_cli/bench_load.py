"""What `bench serve` and `bench compare` share: the load's options, and how a result is shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvortex.bench.workload import Workload

if TYPE_CHECKING:
    from rich.table import Table

    from kvortex.bench.report import Report
    from kvortex.bench.vocabulary import Vocabulary

LOAD: Final = Workload()
REQUEST_TIMEOUT: Final = "10m"
MAX_FAILURES: Final = 0.05

Conversations = Annotated[int, typer.Option("--conversations", min=1, help="Conversations that take turns.")]
Turns = Annotated[int, typer.Option("--turns", min=1, help="Requests of each; turns from the second on are measured.")]
First = Annotated[int, typer.Option("--first", min=1, help="Tokens of each first prompt.")]
Add = Annotated[int, typer.Option("--add", min=1, help="Tokens that each further turn adds.")]
Gen = Annotated[int, typer.Option("--gen", min=1, help="Tokens to generate a turn.")]
Concurrency = Annotated[int, typer.Option("--concurrency", min=1, help="Requests at a time.")]
Vocab = Annotated[
    str | None,
    typer.Option(
        "--vocab", metavar="LOW-HIGH", help="Token ids to draw from. By default 1000 to 29999, if it has them."
    ),
]
Timeout = Annotated[
    str, typer.Option("--timeout", metavar="DURATION", help="A request that has not ended by then has failed.")
]
MaxFailures = Annotated[
    float,
    typer.Option("--max-failures", min=0, max=1, metavar="SHARE", help="Exit 1 if more of the requests fail."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the result as an HTML page, too.")]


def asked_vocabulary(text: str | None) -> Vocabulary | None:
    """The range asked for, before anything else is; raises UsageError for one that is none."""
    from kvortex.bench.vocabulary import parse_vocabulary

    return None if text is None else parse_vocabulary(text)


def seconds(option: str, text: str) -> float:
    """A duration of more than zero; raises UsageError naming the option."""
    from kvortex.errors import UsageError
    from kvortex.sizes import BadValueError, parse_duration

    try:
        parsed = parse_duration(text)
    except BadValueError as bad:
        raise UsageError(f"{option}: {bad.message}", hint=bad.hint) from None
    if parsed == 0:
        raise UsageError(f"{option}: takes more than 0 seconds, not {text!r}", hint="such as 30s or 5m")
    return parsed


def check_writable(file: Path | None) -> None:
    """Raises UsageError if the file cannot be written, before there is anything to lose."""
    from kvortex.errors import UsageError

    if file is None:
        return
    try:
        with file.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise UsageError(f"--html {file} cannot be written: {error.strerror}") from None


def say(text: str) -> None:
    """Progress, on stderr."""
    from kvortex_cli.console import report

    report("bench", text)


def show(report: Report, document: dict[str, Any], *, as_json: bool, html: Path | None) -> None:
    """Prints the result on stdout, as a table with its conditions or as JSON; writes the page."""
    if html is not None:
        from kvortex.bench.page import page

        html.write_text(page(report), encoding="utf-8")
        say(f"wrote {html}")
    if as_json:
        from kvortex.bench.documents import to_json

        print(to_json(document))
        return
    from kvortex_cli.console import stdout

    stdout().print(_table(report))
    for note in report.notes:
        print(f"note: {note}")
    for name, text in report.conditions:
        print(f"{name}: {text}")


def _table(report: Report) -> Table:
    from rich.table import Table

    from kvortex.bench.report import COLUMNS, NOTHING

    lines = [row.cells for row in report.rows]
    # A lone server has nothing to be compared with.
    kept = [i for i, name in enumerate(COLUMNS) if not name.startswith("of ") or any(c[i] != NOTHING for c in lines)]
    table = Table(title=report.title, title_justify="left")
    for i in kept:
        table.add_column(COLUMNS[i], justify="left" if i == 0 else "right", no_wrap=i == 0, overflow="fold")
    for cells in lines:
        table.add_row(*(cells[i] for i in kept))
    return table
