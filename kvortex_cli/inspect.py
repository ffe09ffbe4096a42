"""`kvortex inspect`: what is in the cache of a running server right now, and is it hitting?"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvortex.errors import KVortexError, UsageError

if TYPE_CHECKING:
    from rich.table import Table

DEFAULT_URL: Final = "http://localhost:8000"
TIMEOUT_S: Final = 10.0


class View(StrEnum):
    """What to look at."""

    STATS = "stats"
    SESSIONS = "sessions"


class ServerError(KVortexError):
    """The server cannot be asked, or its answer cannot be read."""


def inspect_command(
    view: Annotated[View, typer.Argument(help="What to look at.")] = View.STATS,
    url: Annotated[str, typer.Option("--url", metavar="URL", help="The running server.")] = DEFAULT_URL,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="VLLM_API_KEY", show_envvar=True, help="The key that /v1 asks for."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's document as it is.")] = False,
) -> None:
    """Shows what is in the cache of a running server, and whether it is hitting.

    Example: kvortex inspect stats --url http://localhost:8000

    Example: kvortex inspect sessions
    """
    document = fetch(url, f"/kvortex/{view.value}", api_key)
    if as_json:
        print(json.dumps(document, indent=2))
        return
    from kvortex_cli.console import stdout

    for table in _tables(view, document):
        stdout().print(table)


def _tables(view: View, document: dict[str, Any]) -> list[Table]:
    if view is View.SESSIONS:
        from kvortex_cli.sessions_view import sessions_tables

        return sessions_tables(document)
    return stats_tables(document)


def fetch(url: str, path: str, api_key: str | None) -> dict[str, Any]:
    """GETs one of KVortex's documents.

    Raises:
        UsageError: `url` is not an HTTP address.
        ServerError: nobody answers there, or not with what was asked for.
    """
    import httpx

    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--url {url!r} is not an address", hint=f"it looks like {DEFAULT_URL}")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = url.rstrip("/").removesuffix("/v1")
    try:
        response = httpx.get(base + path, headers=headers, timeout=TIMEOUT_S)
    except httpx.InvalidURL as error:
        raise UsageError(f"--url {url!r} is not an address: {error}") from error
    except httpx.TransportError as error:
        raise ServerError(
            f"no answer from {base}: {error}", hint="is the server up? `kvortex serve MODEL` starts one"
        ) from error
    if response.status_code == 401:
        raise ServerError(f"{base} asks for an API key", hint="give it with --api-key or VLLM_API_KEY")
    if response.status_code == 404:
        raise ServerError(
            f"{base} answers, but has no {path}",
            hint="start it with `kvortex serve`, or name kvortex and kvortex_routes in VLLM_PLUGINS",
        )
    if response.status_code != 200:
        raise ServerError(f"{base}{path} answers {response.status_code}: {_detail(response.text)}")
    try:
        document = response.json()
    except ValueError as error:
        raise ServerError(f"{base}{path} does not answer with JSON", hint="is this a vLLM server?") from error
    if not isinstance(document, dict):
        raise ServerError(f"{base}{path} answers with something else than statistics")
    return document


def _detail(body: str) -> str:
    try:
        return str(json.loads(body)["detail"])
    except (ValueError, KeyError, TypeError):
        return body[:200]


def stats_tables(stats: dict[str, Any]) -> list[Table]:
    """The document of /kvortex/stats as tables: tokens first, since that is what one looks for."""
    from rich.table import Table

    from kvortex.sizes import format_bytes

    tokens = stats["tokens"]
    title = f"{stats['model']}: KVortex {stats['kvortex']}, vLLM {stats['vllm']}, up {stats['uptime_s']:.0f} s"
    hits = Table("prompt tokens", "count", "share", title=title, title_justify="left")
    rows = (("from VRAM", "vram_hit"), ("from RAM", "ram_hit"), ("computed", "computed"), ("in all", "queried"))
    for name, field in rows:
        share = f"{tokens[field] / tokens['queried']:.1%}" if tokens["queried"] else "-"
        hits.add_row(name, f"{tokens[field]:,}", share)

    tiers = Table("tier", "blocks", "of", "bytes", "in detail")
    vram, ram = stats["tiers"]["vram"], stats["tiers"]["ram"]
    vram_blocks = vram["resident_blocks"] + vram["clean_blocks"]
    block_bytes = vram["capacity_bytes"] // vram["capacity_blocks"]
    tiers.add_row(
        "vram",
        f"{vram_blocks:,}",
        f"{vram['capacity_blocks']:,}",
        format_bytes(vram_blocks * block_bytes),
        f"{vram['resident_blocks']:,} resident, {vram['clean_blocks']:,} clean, {vram['in_use_blocks']:,} in use",
    )
    tiers.add_row(
        "ram",
        f"{ram['used_blocks']:,}",
        f"{ram['capacity_blocks']:,}",
        format_bytes(ram["used_bytes"]),
        f"{ram['pinned_blocks']:,} pinned, {stats['evicted']['ram_blocks']:,} evicted so far",
    )

    copies = Table("copies", "blocks", "bytes", "seconds", "in flight", "failed blocks")
    for direction, name in (("store", "VRAM to RAM"), ("load", "RAM to VRAM")):
        count = stats[direction]
        copies.add_row(
            name,
            f"{count['blocks']:,}",
            format_bytes(count["bytes"]),
            f"{count['seconds']:.3f}",
            f"{count['in_flight']:,}",
            f"{stats['failures'][direction]:,}",
        )
    brought = stats["prefetch"]
    names = ("issued", "used", "wasted", "late")
    prefetch = Table(*(f"prefetched: {name}" for name in names))
    prefetch.add_row(*(f"{brought[f'{name}_blocks']:,}" for name in names))
    return [hits, tiers, copies, prefetch]
