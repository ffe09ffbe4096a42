"""`kvortex plan TRACE`: which RAM size pays for this load and model. Needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvortex_cli.replay_options import BlockSize, Html, KvCacheDtype, Model, PrefillSpeed, Trace, Vram, WarmUp

if TYPE_CHECKING:
    from kvortex.replay.plan import Plan, Recommendation
    from kvortex.replay.simulator import ReplayResult
    from kvortex_cli.replay_options import Replayed


def plan(
    trace: Trace,
    model: Model,
    kv_cache_dtype: KvCacheDtype = "auto",
    ram: Annotated[
        list[str] | None,
        typer.Option("--ram", metavar="SIZE", help="RAM to try; may be repeated. [default: doublings that matter]"),
    ] = None,
    vram: Vram = "0",
    block_size: BlockSize = None,
    prefill_speed: PrefillSpeed = None,
    warm_up: WarmUp = 0.5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    html: Html = None,
) -> None:
    """Tell which RAM size pays, from a trace of requests or a server's own log of them.

    Plays the requests at several sizes through the cache's own index and policies: what is found with the default
    policy and with lru, and beside them the bound, which knows the future. A server writes such a log, block hashes
    only, with kv_cache.request_log.

    Example: kvortex plan requests.jsonl --model meta-llama/Llama-3.1-8B-Instruct --vram 40GB
    """
    from kvortex.hardware import usable_ram_bytes
    from kvortex.replay.plan import Planner
    from kvortex_cli.bench_load import check_writable
    from kvortex_cli.console import report
    from kvortex_cli.replay_options import check_room, parsed_size, read_replayed

    ram_sizes = [parsed_size("--ram", text) for text in ram or []]
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
    made = Planner(
        replayed.requests,
        replayed.model,
        replayed.vram_bytes,
        usable_ram_bytes(),
        replayed.prefill,
        replayed.warm_up,
        lambda text: report("plan", text),
    ).plan(ram_sizes)
    if html is not None:
        _write_page(html, replayed, made)
    if as_json:
        _print_json(replayed, made)
    else:
        _print_text(replayed, made)


def _columns(made: Plan) -> tuple[str, ...]:
    default = made.sizes[0].default.eviction_policy
    return ("RAM", "conversations", f"default: {default}", "lru", "bound", "prefill saved", "stored", "loaded", "")


def _cells(made: Plan) -> list[tuple[str, ...]]:
    from kvortex.sizes import format_bytes
    from kvortex_cli.replay_options import shown_saving

    return [
        (
            format_bytes(size.ram_bytes),
            f"{size.fit_conversations:,}",
            f"{size.default.hit_rate:.1%}",
            f"{size.lru.hit_rate:.1%}",
            f"{size.bound.hit_rate:.1%}",
            shown_saving(size.default.prefill_saved_s, size.default.prefill_s),
            format_bytes(size.default.bytes_stored),
            format_bytes(size.default.bytes_loaded),
            " ".join(_marks(made, size.ram_bytes, within=size.is_within_machine)),
        )
        for size in made.sizes
    ]


def _marks(made: Plan, ram_bytes: int, *, within: bool) -> Sequence[str]:
    recommended = ["<- pays"] if ram_bytes == made.recommended.ram_bytes else []
    return recommended if within else [*recommended, "(more than is usable here)"]


def _title(replayed: Replayed) -> str:
    from kvortex.sizes import counted

    return (
        f"{replayed.trace.name}: prompt tokens found after the first {replayed.warm_up:.0%} of "
        f"{counted(len(replayed.requests), 'request')}, {replayed.model.name}"
    )


def _facts(replayed: Replayed, made: Plan) -> list[tuple[str, str]]:
    """What the table does not say."""
    from kvortex.sizes import format_bytes

    talks = made.conversations
    vram = f"VRAM of {format_bytes(made.vram_bytes)} holds {made.fit_vram:,} of the median length"
    prefill = "not known for this model: give --prefill-speed"
    if replayed.prefill is not None:
        prefill = f"{replayed.prefill.source}; of the tokens found in RAM, without the time to load them"
    return [
        *_recommendations(made),
        (
            "conversations",
            f"{talks.number:,}, {talks.mean_turns:.1f} turns each, {talks.median_tokens:,} tokens at their end "
            f"(median; 95 % below {talks.p95_tokens:,}), at most {talks.at_once:,} at once; "
            + (vram if made.vram_bytes else "no VRAM is counted: give --vram"),
        ),
        (
            "working set",
            f"{format_bytes(made.working_set_bytes)}: all distinct blocks, {replayed.model.token_bytes:,} bytes a "
            "token",
        ),
        ("prefill", prefill),
    ]


def _recommendations(made: Plan) -> list[tuple[str, str]]:
    """In words. Where nothing pays at all, nothing pays here either."""
    from kvortex.sizes import format_bytes

    lines = [("recommended", _in_words(made.recommended))]
    if made.recommended.ram_bytes is not None or made.recommended_here.ram_bytes is not None:
        lines.append((f"of the {format_bytes(made.machine_bytes)} usable here", _in_words(made.recommended_here)))
    instead = made.lru_instead
    if instead is not None:
        found = f"{instead.lru.hit_rate:.1%}, where the default policy finds {instead.default.hit_rate:.1%}"
        lines.append(("with lru", f"{format_bytes(instead.ram_bytes)} finds {found}: kv_cache.eviction_policy"))
    return lines


def _in_words(recommendation: Recommendation) -> str:
    from kvortex.sizes import format_bytes

    size = "none" if recommendation.ram_bytes is None else format_bytes(recommendation.ram_bytes)
    return f"{size}: {recommendation.reason}"


def _print_text(replayed: Replayed, made: Plan) -> None:
    from rich.table import Table

    from kvortex_cli.console import stdout

    table = Table(title=_title(replayed), title_justify="left")
    for column in _columns(made):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for cells in _cells(made):
        table.add_row(*cells)
    stdout().print(table)
    for name, text in _facts(replayed, made):
        print(f"{name}: {text}")


def _print_json(replayed: Replayed, made: Plan) -> None:
    import json
    from dataclasses import asdict

    from kvortex import __version__
    from kvortex.bench.conditions import read_hardware

    document: dict[str, Any] = {
        "kind": "kvortex plan",
        "kvortex": __version__,
        "trace": str(replayed.trace),
        "requests": len(replayed.requests),
        "block_tokens": replayed.block_tokens,
        "model": replayed.model.name,
        "token_bytes": replayed.model.token_bytes,
        "warm_up": replayed.warm_up,
        "prefill": replayed.prefill.source if replayed.prefill is not None else None,
        "vram_hit_rate": made.vram_hit_rate,
        "hardware": asdict(read_hardware()),
        **asdict(made),
        "lru_instead": None if made.lru_instead is None else made.lru_instead.ram_bytes,
    }
    print(json.dumps(document, indent=2))


def _write_page(html: Path, replayed: Replayed, made: Plan) -> None:
    from kvortex.bench.replay_page import replay_page
    from kvortex_cli.console import report
    from kvortex_cli.replay_options import conditions

    results: list[ReplayResult] = [result for size in made.sizes for result in (size.default, size.lru, size.bound)]
    facts = [*_facts(replayed, made), *conditions(replayed)]
    html.write_text(replay_page(_title(replayed), _columns(made), _cells(made), results, facts), encoding="utf-8")
    report("plan", f"wrote {html}")
