"""`kvortex inspect`: what is in the cache of a running server right now, and is it hitting?"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from kvortex_cli.server_documents import DEFAULT_URL, fetch


class View(StrEnum):
    """What to look at."""

    STATS = "stats"


def inspect_command(
    view: Annotated[View, typer.Argument(help="What to look at.")] = View.STATS,
    url: Annotated[str, typer.Option("--url", metavar="URL", help="The running server.")] = DEFAULT_URL,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="VLLM_API_KEY", show_envvar=True, help="The key that /v1 asks for."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's document as it is.")] = False,
) -> None:
    """Shows what is in the cache of a running server, and whether it is helping.

    Example: kvortex inspect stats --url http://localhost:8000
    """
    document = fetch(url, f"/kvortex/{view.value}", api_key)
    if as_json:
        print(json.dumps(document, indent=2))
        return
    from kvortex_cli.console import stdout
    from kvortex_cli.stats_view import advice, stats_tables

    for line in advice(document):
        stdout().print(line)
    for table in stats_tables(document):
        stdout().print(table)
