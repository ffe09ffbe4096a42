"""`kvortex bench replay TRACE`: what a RAM tier would hit on a trace, with each eviction policy. Needs no GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

if TYPE_CHECKING:
    from kvortex.replay.simulator import ReplayResult
    from kvortex.replay.trace import TracedRequest

_DEFAULT_POLICIES: Final = ("lru", "belady", "default")


def bench_replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Requests as JSON lines, .gz or not, as Mooncake's.")],
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="Whose KV: llama-3.1-8b, ..., a directory or a Hub name.")
    ] = "llama-3.1-8b",
    ram: Annotated[
        list[str] | None,
        typer.Option("--ram", metavar="SIZE", help="RAM for blocks; may be repeated. [default: 128GiB]"),
    ] = None,
    vram: Annotated[
        str, typer.Option("--vram", metavar="SIZE", help="VRAM for blocks in front of it, as an LRU; 0 is none.")
    ] = "0",
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="adaptive, lru, priority, belady (the bound) or default; may be repeated. "
            "[default: lru, belady, default]",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Play a trace of requests through the cache's index and eviction policies, with no GPU and no model.

    The hit rate is the share of prompt tokens found, in VRAM or RAM, over the last half of the requests.

    Example: kvortex bench replay trace.jsonl.gz --ram 128GiB --ram 512GiB --policy lru --policy adaptive
    """
    from kvortex.replay.token_sizes import token_bytes
    from kvortex.replay.trace import load_trace

    names = _checked_policies(policies or _DEFAULT_POLICIES)
    ram_sizes = [_size("--ram", text) for text in dict.fromkeys(ram or ["128GiB"])]
    has_vram = re.fullmatch(r"0+ *[KMGTP]?i?B?", vram.strip()) is None
    vram_bytes = _size("--vram", vram) if has_vram else 0
    bytes_a_token = token_bytes(model)
    _check_room(ram_sizes, bytes_a_token, model)
    requests = load_trace(trace)
    results = _play(requests, names, ram_sizes, vram_bytes, bytes_a_token)
    if as_json:
        _print_json(trace, model, bytes_a_token, requests, results)
    else:
        _print_table(trace, model, requests, results)


def _checked_policies(names: Sequence[str]) -> list[str]:
    """Each name once; raises UsageError for one that does not exist."""
    import difflib

    from kvortex.cache.policies import EVICTION_POLICIES
    from kvortex.errors import UsageError
    from kvortex.replay.simulator import BELADY, DEFAULT

    known = (*EVICTION_POLICIES, BELADY, DEFAULT)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"--policy {name}: there is no such policy", hint=f"{hint}Known: {', '.join(known)}")
    return list(dict.fromkeys(names))


def _size(option: str, text: str) -> int:
    from kvortex.errors import UsageError
    from kvortex.sizes import BadValueError, parse_size

    try:
        return parse_size(text)
    except BadValueError as bad:
        raise UsageError(f"{option}: {bad.message}", hint=bad.hint) from None


def _check_room(ram_sizes: Sequence[int], bytes_a_token: int, model: str) -> None:
    from kvortex.errors import UsageError
    from kvortex.replay.trace import BLOCK_TOKENS

    block_bytes = BLOCK_TOKENS * bytes_a_token
    for size in ram_sizes:
        if size < block_bytes:
            raise UsageError(
                f"--ram {size} is less than one block: {BLOCK_TOKENS} tokens of {model} are {block_bytes:,} bytes",
                hint="a size is a number and a unit, such as 128GiB",
            )


def _play(
    requests: Sequence[TracedRequest], names: Sequence[str], ram_sizes: Sequence[int], vram_bytes: int, per_token: int
) -> list[ReplayResult]:
    from kvortex.replay.simulator import replay
    from kvortex.sizes import format_bytes
    from kvortex_cli.console import report

    results = []
    for size in ram_sizes:
        for name in names:
            report("bench", f"{name}, {format_bytes(size)} of RAM, {len(requests):,} requests")
            results.append(replay(requests, name, ram_bytes=size, vram_bytes=vram_bytes, token_bytes=per_token))
    return results


def _print_json(
    trace: Path, model: str, bytes_a_token: int, requests: Sequence[TracedRequest], results: Sequence[ReplayResult]
) -> None:
    import json
    from dataclasses import asdict

    from kvortex import __version__
    from kvortex.bench.conditions import read_hardware
    from kvortex.replay.trace import BLOCK_TOKENS

    document: dict[str, Any] = {
        "benchmark": "replay",
        "kvortex": __version__,
        "trace": str(trace),
        "requests": len(requests),
        "model": model,
        "token_bytes": bytes_a_token,
        "block_tokens": BLOCK_TOKENS,
        "hardware": asdict(read_hardware()),
        "results": [asdict(result) for result in results],
    }
    print(json.dumps(document, indent=2))


def _print_table(trace: Path, model: str, requests: Sequence[TracedRequest], results: Sequence[ReplayResult]) -> None:
    from rich.table import Table

    from kvortex.sizes import format_bytes
    from kvortex_cli.console import stdout

    title = f"{trace.name}, {len(requests):,} requests, {model}; hits of the last half"
    table = Table(title=title, title_justify="left")
    for column in ("RAM", "policy", "hit rate", "tokens from VRAM", "from RAM", "stored", "loaded", "replay"):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for result in results:
        table.add_row(
            format_bytes(result.ram_bytes),
            result.policy if result.policy == result.eviction_policy else f"default: {result.eviction_policy}",
            f"{result.hit_rate:.2%}",
            f"{result.vram_hit_tokens:,}",
            f"{result.ram_hit_tokens:,}",
            format_bytes(result.bytes_stored),
            format_bytes(result.bytes_loaded),
            f"{result.seconds:.1f} s",
        )
    stdout().print(table)
