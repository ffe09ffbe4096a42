"""The document of /kvortex/stats as one screen of 80 columns and 24 lines, or of what there is."""

from __future__ import annotations

from typing import Any, Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvortex.cache.misses import Miss
from kvortex.cache.verdict import WORDS
from kvortex.sizes import counted, format_bytes
from kvortex_cli.blocks_view import duration
from kvortex_cli.stats_view import Stats
from kvortex_cli.watch import Watched

_BAR_CELLS: Final = 20
_LINES_WITHOUT_REASONS: Final = 18
_MOST_REASONS: Final = 6


def stats_screen(watched: Watched, lines: int) -> list[RenderableType]:
    """Whether it helps, where tokens come from, what is held, what moves."""
    if not watched.looks:
        return [Text("no answer yet")]
    (then_s, then), (now_s, now) = watched.looks[0], watched.looks[-1]
    rates = _Rates(now, then, now_s - then_s)
    title = f"{now['model']}: KVortex {now['kvortex']}, vLLM {now['vllm']}, up {duration(now['uptime_s'])}"
    parts: list[RenderableType] = [
        Text(title, style="bold", no_wrap=True, overflow="ellipsis"),
        Text(now["verdict"]["text"]),
        _alarm(now),
        _tokens(now, rates),
    ]
    reasons = _reasons(now, min(_MOST_REASONS, lines - _LINES_WITHOUT_REASONS))
    parts += [reasons] if reasons else []
    return [*parts, Text(""), _tiers(now), Text(""), _moves(now, rates)]


def _alarm(now: Stats) -> Text:
    """One line, empty while RAM keeps what is stored in it."""
    corrupt = now["verify"]["corrupt_blocks"]
    said = f"RAM does not keep what is stored in it: {counted(corrupt, 'block')} had changed" if corrupt else ""
    return Text(said, style="bold red", no_wrap=True, overflow="ellipsis")


class _Rates:
    """A second's worth of counters, over the looks that are kept."""

    def __init__(self, now: Stats, then: Stats, seconds: float) -> None:
        self._now, self._then, self._seconds = now, then, seconds

    def of(self, *path: str) -> float | None:
        """None before the second look."""
        if self._seconds <= 0:
            return None
        return float(_at(self._now, path) - _at(self._then, path)) / self._seconds


def _at(document: Stats, path: tuple[str, ...]) -> Any:
    value: Any = document
    for name in path:
        value = value[name]
    return value


def _grid(*aligned: str) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for column, justify in enumerate(aligned):
        least = 4 if column == 0 else None  # the name stays when there is no room
        grid.add_column(
            justify="right" if justify == ">" else "left", no_wrap=True, overflow="ellipsis", min_width=least
        )
    return grid


def _tokens(now: Stats, rates: _Rates) -> Table:
    grid = _grid("<", ">", ">", ">")
    grid.add_row("prompt tokens", "a second now", "since start", "share", style="dim")
    tokens = now["tokens"]
    for name, source in (("from VRAM", "vram_hit"), ("from RAM", "ram_hit"), ("computed", "computed")):
        share = f"{tokens[source] / tokens['queried']:.1%}" if tokens["queried"] else "-"
        grid.add_row(name, _number(rates.of("tokens", source)), f"{tokens[source]:,}", share)
    return grid


def _reasons(now: Stats, most: int) -> Table | None:
    missed = sorted(((now["missed"][miss.value], miss) for miss in Miss), key=lambda pair: -pair[0])
    shown = [(count, miss) for count, miss in missed if count][: max(0, most)]
    if not shown:
        return None
    grid = _grid("<", ">", ">")
    for count, miss in shown:
        grid.add_row(f"  {WORDS[miss]}", f"{count:,}", f"{count / now['tokens']['computed']:.1%} of computed")
    return grid


def _tiers(now: Stats) -> Table:
    grid = _grid("<", "<", ">", "<")
    vram, ram = now["tiers"]["vram"], now["tiers"]["ram"]
    complete = vram["resident_blocks"] + vram["clean_blocks"]
    detail = f"{vram['resident_blocks']:,} resident, {vram['clean_blocks']:,} clean, {vram['in_use_blocks']:,} in use"
    grid.add_row("VRAM", *_filled(complete, vram["capacity_blocks"]), detail)
    detail = f"{format_bytes(ram['used_bytes'])} of {format_bytes(ram['capacity_bytes'])}"
    grid.add_row("RAM", *_filled(ram["used_blocks"], ram["capacity_blocks"]), detail)
    return grid


def _filled(blocks: int, capacity: int) -> tuple[str, str]:
    cells = round(_BAR_CELLS * blocks / capacity)
    return "█" * cells + "░" * (_BAR_CELLS - cells), f"{blocks / capacity:.0%}"


def _moves(now: Stats, rates: _Rates) -> Table:
    grid = _grid("<", ">", ">", ">", ">")
    grid.add_row("", "a second now", "since start", "in flight", "failed", style="dim")
    for name, way in (("to RAM (store)", "store"), ("to VRAM (load)", "load")):
        speed = rates.of(way, "bytes")
        grid.add_row(
            name,
            "-" if speed is None else format_bytes(int(speed)),
            format_bytes(now[way]["bytes"]),
            counted(now[way]["in_flight"], "block"),
            f"{now['failures'][way]:,}",
        )
    for name, kind in (("RAM evicted", "ram_blocks"), ("VRAM lost", "vram_uncopied_blocks")):
        grid.add_row(name, _number(rates.of("evicted", kind)), counted(now["evicted"][kind], "block"))
    return grid


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"
