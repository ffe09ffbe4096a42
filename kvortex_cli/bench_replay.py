"""`kvortex bench replay TRACE`: what a RAM tier would hit on a trace, with each eviction policy. Needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvortex_cli.replay_options import BlockSize, Html, KvCacheDtype, Model, PrefillSpeed, Trace, Vram, WarmUp

if TYPE_CHECKING:
    from kvortex.replay.simulator import ReplayResult
    from kvortex_cli.replay_options import Replayed

_DEFAULT_POLICIES: Final = ("lru", "belady", "default")
_COLUMNS: Final = (
    "RAM",
    "policy",
    "hit rate",
    "tokens from VRAM",
    "from RAM",
    "prefill saved by RAM",
    "stored",
    "loaded",
    "replay",
)


def bench_replay(
    trace: Trace,
    model: Model = "llama-3.1-8b",
    kv_cache_dtype: KvCacheDtype = "auto",
    ram: Annotated[
        list[str] | None,
        typer.Option("--ram", metavar="SIZE", help="RAM for blocks; may be repeated. [default: 128GiB]"),
    ] = None,
    vram: Vram = "0",
    block_size: BlockSize = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="adaptive, lru, priority, belady (the bound) or default; may be repeated. "
            "[default: lru, belady, default]",
        ),
    ] = None,
    prefill_speed: PrefillSpeed = None,
    warm_up: WarmUp = 0.5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    html: Html = None,
) -> None:
    """Play a trace of requests through the cache's index and eviction policies, with no GPU and no model.

    The hit rate is the share of prompt tokens found, in VRAM or RAM, over the requests after the warm-up.

    Example: kvortex bench replay trace.jsonl.gz --ram 128GiB --ram 512GiB --policy lru --policy adaptive
    """
    from kvortex_cli.bench_load import check_writable
    from kvortex_cli.replay_options import check_room, parsed_size, read_replayed

    names = _checked_policies(policies or _DEFAULT_POLICIES)
    ram_sizes = [parsed_size("--ram", text) for text in dict.fromkeys(ram or ["128GiB"])]
    check_writable(html)
    replayed = read_replayed(
        trace,
        model=model,
        kv_cache_dtype=kv_cache_dtype,
        vram=vram,
        block_size=block_size,
        prefill_speed=prefill_speed,
        warm_up=warm_up,
    )
    check_room(ram_sizes, replayed)
    results = _play(replayed, names, ram_sizes)
    if html is not None:
        _write_page(html, replayed, results)
    if as_json:
        _print_json(replayed, results)
    else:
        _print_table(replayed, results)


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


def _play(replayed: Replayed, names: Sequence[str], ram_sizes: Sequence[int]) -> list[ReplayResult]:
    from kvortex.replay.simulator import replay
    from kvortex.sizes import counted, format_bytes
    from kvortex_cli.console import report

    results = []
    for size in ram_sizes:
        for name in names:
            requests = counted(len(replayed.requests), "request")
            report("bench", f"{name}, {format_bytes(size)} of RAM, {requests}")
            results.append(
                replay(
                    replayed.requests,
                    name,
                    ram_bytes=size,
                    vram_bytes=replayed.vram_bytes,
                    token_bytes=replayed.model.token_bytes,
                    prefill=replayed.prefill,
                    warm_up=replayed.warm_up,
                )
            )
    return results


def _print_json(replayed: Replayed, results: Sequence[ReplayResult]) -> None:
    import json
    from dataclasses import asdict

    from kvortex import __version__
    from kvortex.bench.conditions import read_hardware

    document: dict[str, Any] = {
        "benchmark": "replay",
        "kvortex": __version__,
        "trace": str(replayed.trace),
        "requests": len(replayed.requests),
        "model": replayed.model.name,
        "token_bytes": replayed.model.token_bytes,
        "block_tokens": replayed.block_tokens,
        "warm_up": replayed.warm_up,
        "prefill": replayed.prefill.source if replayed.prefill is not None else None,
        "hardware": asdict(read_hardware()),
        "results": [asdict(result) for result in results],
    }
    print(json.dumps(document, indent=2))


def _title(replayed: Replayed) -> str:
    from kvortex.sizes import counted

    return (
        f"{replayed.trace.name}, {counted(len(replayed.requests), 'request')} in blocks of "
        f"{replayed.block_tokens} tokens, {replayed.model.name}; hits after the first {replayed.warm_up:.0%}"
    )


def _cells(results: Sequence[ReplayResult]) -> list[tuple[str, ...]]:
    from kvortex.sizes import format_bytes
    from kvortex_cli.replay_options import shown_saving

    return [
        (
            format_bytes(result.ram_bytes),
            result.policy if result.policy == result.eviction_policy else f"default: {result.eviction_policy}",
            f"{result.hit_rate:.2%}",
            f"{result.vram_hit_tokens:,}",
            f"{result.ram_hit_tokens:,}",
            shown_saving(result.prefill_saved_s, result.prefill_s),
            format_bytes(result.bytes_stored),
            format_bytes(result.bytes_loaded),
            f"{result.seconds:.1f} s",
        )
        for result in results
    ]


def _print_table(replayed: Replayed, results: Sequence[ReplayResult]) -> None:
    from rich.table import Table

    from kvortex_cli.console import stdout

    table = Table(title=_title(replayed), title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for cells in _cells(results):
        table.add_row(*cells)
    stdout().print(table)
    if replayed.prefill is not None:
        print(f"prefill: {replayed.prefill.source}; the time of the loads is not subtracted")


def _write_page(html: Path, replayed: Replayed, results: Sequence[ReplayResult]) -> None:
    from kvortex.bench.replay_page import replay_page
    from kvortex_cli.console import report
    from kvortex_cli.replay_options import conditions

    page = replay_page(_title(replayed), _COLUMNS, _cells(results), results, conditions(replayed))
    html.write_text(page, encoding="utf-8")
    report("bench", f"wrote {html}")
