"""The document of /kvortex/blocks for people. Imported late: rich is not needed for `--help`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from kvortex.sizes import format_bytes

Holdings = Mapping[str, Any]


def blocks_tables(document: Holdings) -> list[Table]:
    """RAM's blocks by age and use, the first of them, and the first of VRAM's that wait to be copied."""
    engines: Sequence[Holdings] = document["engines"]
    return [table for engine in engines for table in _of_engine(engine, document["by"])]


def _of_engine(engine: Holdings, by: str) -> list[Table]:
    ram, vram = engine["ram"], engine["vram"]
    tables = [_by_age_and_use(ram)]
    if ram["first"]:
        tables.append(_first_in_ram(ram["first"], by))
    if vram["first_waiting"]:
        tables.append(_first_waiting(vram))
    return tables


def _by_age_and_use(ram: Holdings) -> Table:
    title = (
        f"RAM: {ram['blocks']:,} of {ram['capacity_blocks']:,} blocks, {format_bytes(ram['block_bytes'])} each; "
        f"{ram['examined_slots']:,} slots looked at"
    )
    table = Table("unused for", "blocks", "asked for", "blocks", title=title, title_justify="left")
    idle, uses = ram["by_idle"], ram["by_uses"]
    for i in range(max(len(idle), len(uses))):
        table.add_row(*_idle_row(idle, i), *_uses_row(uses, i))
    return table


def _idle_row(entries: Sequence[Holdings], i: int) -> tuple[str, str]:
    if i >= len(entries):
        return "", ""
    under_s = entries[i]["under_s"]
    label = f"under {duration(under_s)}" if under_s is not None else "longer"
    return label, f"{entries[i]['blocks']:,}"


def _uses_row(entries: Sequence[Holdings], i: int) -> tuple[str, str]:
    if i >= len(entries):
        return "", ""
    low = entries[i]["from_uses"]
    last = i + 1 == len(entries)
    high = None if last else entries[i + 1]["from_uses"] - 1
    label = f"{low} times or more" if high is None else f"{low} times" if low == high else f"{low} to {high} times"
    return {"0 times": "never again", "1 times": "once"}.get(label, label), f"{entries[i]['blocks']:,}"


def _first_in_ram(blocks: Sequence[Holdings], by: str) -> Table:
    table = Table("block", "group", "slot", "stored", "last used", "uses", "pins", title=_TITLES[by])
    table.title_justify = "left"
    for block in blocks:
        table.add_row(
            block["key"],
            str(block["group"]),
            str(block["slot"]),
            f"{duration(block['age_s'])} ago",
            f"{duration(block['idle_s'])} ago",
            f"{block['uses']:,}",
            str(block["pins"]),
        )
    return table


_TITLES = {
    "idle": "RAM blocks unused longest",
    "age": "RAM blocks stored longest ago",
    "uses": "RAM blocks asked for most",
}


def _first_waiting(vram: Holdings) -> Table:
    title = f"VRAM blocks that wait for a copy, unused longest, of {vram['waiting_blocks']:,}"
    table = Table("block", "group", "GPU block", "last used", "in use", title=title, title_justify="left")
    for block in vram["first_waiting"]:
        idle, used = f"{duration(block['idle_s'])} ago", "yes" if block["in_use"] else "no"
        table.add_row(block["key"], str(block["group"]), str(block["block_id"]), idle, used)
    return table


def duration(seconds: float) -> str:
    """`seconds` in the unit that people would use."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"
