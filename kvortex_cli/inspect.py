"""`kvortex inspect`: what is in the cache of a running server right now, and is it hitting?"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvortex.errors import UsageError
from kvortex_cli.given import refuse_without
from kvortex_cli.server_documents import DEFAULT_URL, fetch

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvortex_cli.watch import Screen


MOST_SESSIONS: Final = 100
"""That the server lists."""


class View(StrEnum):
    """What to look at."""

    STATS = "stats"
    BLOCKS = "blocks"
    SESSIONS = "sessions"


class Order(StrEnum):
    """Which blocks come first: unused longest, stored longest ago, asked for most."""

    IDLE = "idle"
    AGE = "age"
    USES = "uses"


def inspect_command(
    ctx: typer.Context,
    view: Annotated[View, typer.Argument(help="What to look at.")] = View.STATS,
    url: Annotated[str, typer.Option("--url", metavar="URL", help="The running server.")] = DEFAULT_URL,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="VLLM_API_KEY", show_envvar=True, help="The key that /v1 asks for."),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            "--top",
            min=1,
            max=1000,
            metavar="N",
            help=f"blocks, sessions (at most {MOST_SESSIONS}): how many to list. [default: 10 blocks, 20 sessions]",
        ),
    ] = None,
    by: Annotated[
        Order, typer.Option("--by", help="blocks: unused longest, stored longest ago or used most first.")
    ] = Order.IDLE,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Full screen, live; q leaves.")] = False,
    every: Annotated[
        float, typer.Option("--every", min=0.2, max=3600, metavar="SECONDS", help="--watch: how often to look.")
    ] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's document as it is.")] = False,
) -> None:
    """Shows what is in the cache of a running server, and whether it is helping.

    Example: kvortex inspect stats --url http://localhost:8000

    Example: kvortex inspect blocks --by uses --top 20

    Example: kvortex inspect sessions

    Example: kvortex inspect --watch
    """
    _check_options(ctx, view, top, watch=watch)
    path = _path(view, top, by)
    if watch:
        if as_json:
            raise UsageError("--watch and --json do not go together", hint="--json prints one document")
        from kvortex_cli.watch import watch_documents

        watch_documents(lambda: fetch(url, path, api_key), _screen(view), every_s=every)
        return
    document = fetch(url, path, api_key)
    if as_json:
        print(json.dumps(document, indent=2))
        return
    from kvortex_cli.console import stdout

    for part in _page(view, document):
        stdout().print(part)


def _check_options(ctx: typer.Context, view: View, top: int | None, *, watch: bool) -> None:
    if view is View.STATS:
        refuse_without(ctx, ["--top"], "blocks or sessions")
    if view is not View.BLOCKS:
        refuse_without(ctx, ["--by"], "blocks")
    if view is View.SESSIONS and top is not None and top > MOST_SESSIONS:
        raise UsageError(f"--top: takes at most {MOST_SESSIONS} for sessions, not {top}")
    if not watch:
        refuse_without(ctx, ["--every"], "--watch")


def _path(view: View, top: int | None, by: Order) -> str:
    asked = {View.BLOCKS: f"?top={top or 10}&by={by.value}", View.SESSIONS: f"?top={top or 20}"}
    return f"/kvortex/{view.value}" + asked.get(view, "")


def _page(view: View, document: dict[str, Any]) -> list[RenderableType]:
    if view is View.BLOCKS:
        from kvortex_cli.blocks_view import blocks_tables

        return [*blocks_tables(document)]
    if view is View.SESSIONS:
        from kvortex_cli.sessions_view import sessions_tables

        return [*sessions_tables(document)]
    from kvortex_cli.stats_view import advice, alarm, stats_tables

    return [*alarm(document), *advice(document), *stats_tables(document)]


def _screen(view: View) -> Screen:
    if view is not View.STATS:
        return lambda watched, _: _page(view, watched.looks[-1][1])
    from kvortex_cli.stats_screen import stats_screen

    return stats_screen
