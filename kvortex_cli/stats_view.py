"""The document of /kvortex/stats for people. Imported late: rich is not needed for `--help`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from kvortex.cache.misses import Miss
from kvortex.cache.verdict import WORDS
from kvortex.sizes import format_bytes

Stats = Mapping[str, Any]


def stats_tables(stats: Stats) -> list[Table]:
    """The document of /kvortex/stats as tables: tokens first, since that is what one looks for."""
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
        ", ".join(
            [f"{ram['pinned_blocks']:,} pinned, {stats['evicted']['ram_blocks']:,} evicted so far", *_verified(stats)]
        ),
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
    return [hits, missed_table(stats), tiers, copies, _prefetch_table(stats)]


def _verified(stats: Stats) -> list[str]:
    """What verification has found; nothing where it is off."""
    verify = stats["verify"]
    if verify["mode"] == "off":
        return []
    out_of_use = stats["tiers"]["ram"]["quarantined_blocks"]
    return [
        f"{verify['intact_blocks']:,} verified",
        *([f"{verify['corrupt_blocks']:,} found changed", f"{out_of_use:,} out of use"] if out_of_use else []),
    ]


def alarm(stats: Stats) -> list[str]:
    """A paragraph where blocks in RAM were found changed, which no healthy machine does."""
    corrupt = stats["verify"]["corrupt_blocks"]
    if corrupt == 0:
        return []
    changed = "1 block was" if corrupt == 1 else f"{corrupt:,} blocks were"
    out_of_use = stats["tiers"]["ram"]["quarantined_blocks"]
    return [
        f"RAM does not keep what is stored in it: {changed} found changed before a load. What was lost is computed "
        f"again, so no answer is wrong for it; {out_of_use:,} of RAM's blocks are out of use until the server ends. "
        "Check this machine's memory: docs/verification.md says how."
    ]


def _prefetch_table(stats: Stats) -> Table:
    outcomes = ("issued", "used", "wasted", "late")
    table = Table(*(f"prefetched: {outcome}" for outcome in outcomes))
    table.add_row(*(f"{stats['prefetch'][f'{outcome}_blocks']:,}" for outcome in outcomes))
    return table


def missed_table(stats: Stats) -> Table:
    """Every computed prompt token under its reason, the largest first; reasons without tokens are left out."""
    table = Table("computed because", "tokens", "share")
    computed = stats["tokens"]["computed"]
    for miss in sorted(Miss, key=lambda miss: -stats["missed"][miss.value]):
        count = stats["missed"][miss.value]
        if count:
            table.add_row(WORDS[miss], f"{count:,}", f"{count / computed:.1%}")
    return table


def advice(stats: Stats) -> list[str]:
    """What the server says of its cache: a sentence, then a line for each reason that matters."""
    verdict = stats["verdict"]
    reasons = verdict["reasons"]
    return [verdict["text"], *(f"  {reason['tokens']:,} computed tokens {reason['text']}." for reason in reasons)]
