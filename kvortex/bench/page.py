"""A report as one HTML page: no script, nothing fetched, readable on a phone and in the dark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from kvortex.bench.counters import PromptTokens
from kvortex.bench.report import COLUMNS, Report, Row

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #59636e; --rule: #d1d9e0; --bar: #2f6f9f;
        --a: #2f6f9f; --b: #c2571a; --c: #8a9199; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #14171b; --soft: #9aa4ae; --rule: #363d45;
        --bar: #6cb0e0; --a: #6cb0e0; --b: #f0935a; --c: #7d8590; } }
body { font: 16px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
       max-width: 62rem; padding: 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1rem; } dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; } li { overflow-wrap: anywhere; } p { color: var(--soft); margin: .2rem 0; }
.lead { color: inherit; font-size: 1.1rem; margin: .5rem 0 1rem; }
svg { display: block; width: 100%; } svg text { fill: currentColor; font-size: 13px; }
.plot { max-width: 30rem; } .plot text { font-size: 11px; }
.bar { fill: var(--bar); } .vram { fill: var(--a); } .ram { fill: var(--b); } .computed { fill: var(--c); }
.line { fill: none; stroke: currentColor; stroke-width: 1.5; } .axis { stroke: var(--rule); }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .5rem; } }
"""
# Lines are told apart by their dashes and marks, too.
_DASHES: Final = ("none", "7 3", "2 3", "9 3 2 3", "4 6")
_MARKS: Final = ("●", "■", "▲", "◆", "○")
_SOURCES: Final = {"vram": "VRAM", "ram": "RAM", "computed": "computed"}
_ROW_PX: Final = 42
_BAR_SHARE: Final = 78


def page(report: Report) -> str:
    """The whole page: the numbers first, then plots, notes and the conditions."""
    measured = [row for row in report.rows if row.figures.output_tokens_per_s is not None]
    return document(
        report.title,
        [
            f'<p class="lead">{escape(report.headline)}</p>' if report.headline else "",
            table(COLUMNS, [row.cells for row in report.rows]),
            section("Notes", _list(report.notes)) if report.notes else "",
            section("Output tokens per second", _bars(measured, lambda row: row.figures.output_tokens_per_s, _number)),
            section("Time to first token, median", _bars(measured, lambda row: row.figures.ttft_p50_s, _ms)),
            section("Time to first token, 99th percentile", _bars(measured, lambda row: row.figures.ttft_p99_s, _ms)),
            section("Where prompt tokens came from", _sources(measured)),
            section("Median time to first token, turn by turn", _turns(measured)),
            section("Conditions", definitions(report.conditions)),
        ],
    )


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page of these parts; empty ones are left out."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    )
    body = "\n".join(part for part in [f"<h1>{escape(title)}</h1>", *parts] if part)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def section(title: str, content: str) -> str:
    """A part with a heading; empty where it has no content."""
    return f"<h2>{escape(title)}</h2>\n{content}" if content else ""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in pairs) + "</dl>"


def _bars(rows: Sequence[Row], value_of: Callable[[Row], float | None], shown: Callable[[float], str]) -> str:
    """One bar a row, its name above and its value behind; widths in per cent, so that text never shrinks."""
    values = [(row.name, value) for row in rows if (value := value_of(row)) is not None]
    largest = max((value for _, value in values), default=0.0)
    if largest <= 0:
        return ""
    bars = []
    for index, (name, value) in enumerate(values):
        y, width = index * _ROW_PX, value / largest * _BAR_SHARE
        bars.append(
            f'<text x="0" y="{y + 14}">{escape(name)}</text>'
            f'<rect class="bar" x="0" y="{y + 19}" width="{width:.2f}%" height="14"/>'
            f'<text x="{width + 1:.2f}%" y="{y + 31}">{escape(shown(value))}</text>'
        )
    return f'<svg height="{len(values) * _ROW_PX}" role="img">{"".join(bars)}</svg>'


def _sources(rows: Sequence[Row]) -> str:
    known = [(row.name, row.tokens) for row in rows if row.tokens is not None and row.tokens.all > 0]
    if not known:
        return ""
    bars = "".join(_stacked(name, tokens, index * _ROW_PX) for index, (name, tokens) in enumerate(known))
    return f'<svg height="{len(known) * _ROW_PX}" role="img">{bars}</svg>'


def _stacked(name: str, tokens: PromptTokens, y: int) -> str:
    shares = [(kind, count / tokens.all) for kind, count in (("vram", tokens.vram), ("ram", tokens.ram))]
    shares.append(("computed", tokens.computed / tokens.all))
    in_words = ", ".join(f"{_SOURCES[kind]} {share:.0%}" for kind, share in shares)
    parts, x = [f'<text x="0" y="{y + 14}">{escape(name)}: {in_words}</text>'], 0.0
    for kind, share in shares:
        parts.append(f'<rect class="{kind}" x="{x:.2f}%" y="{y + 19}" width="{share * 100:.2f}%" height="14"/>')
        x += share * 100
    return "".join(parts)


@dataclass(frozen=True, slots=True)
class _Plot:
    """A drawing of lines, in the units of its viewBox."""

    width: int = 340
    height: int = 190
    left: int = 46
    right: int = 22
    top: int = 10
    bottom: int = 24

    def x(self, index: int, count: int) -> float:
        return self.left + index * (self.width - self.left - self.right) / max(count - 1, 1)

    def y(self, value: float, largest: float) -> float:
        return self.height - self.bottom - value / largest * (self.height - self.top - self.bottom)


def _turns(rows: Sequence[Row]) -> str:
    series = [(row.name, row.turns) for row in rows if sum(value is not None for value in row.turns) > 1]
    count = max((len(values) for _, values in series), default=0)
    return line_plot(series, [f"turn {index + 1}" for index in range(count)], _ms)


def line_plot(
    series: Sequence[tuple[str, Sequence[float | None]]], places: Sequence[str], shown: Callable[[float], str]
) -> str:
    """Lines from 0 up, told apart by dashes and marks; empty where there is nothing above 0.

    Args:
        series: each line's name and its value at each place.
        places: names under the axis, left to right.
        shown: a value as text, for the axis.
    """
    largest = max((value for _, values in series for value in values if value is not None), default=0.0)
    if largest <= 0:
        return ""
    plot = _Plot()
    ticks = []
    for share in (0.0, 0.5, 1.0):
        y = plot.y(share, 1)
        ticks.append(f'<line class="axis" x1="{plot.left}" x2="{plot.width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        ticks.append(f'<text x="{plot.left - 4}" y="{y + 4:.1f}" text-anchor="end">{shown(share * largest)}</text>')
    for index, place in enumerate(places):
        x = plot.x(index, len(places))
        ticks.append(f'<text x="{x:.1f}" y="{plot.height - 6}" text-anchor="middle">{escape(place)}</text>')
    lines = [_line(plot, values, number, len(places), largest) for number, (_, values) in enumerate(series)]
    legend = ", ".join(f"{_MARKS[number % len(_MARKS)]} {name}" for number, (name, _) in enumerate(series))
    svg = f'<svg viewBox="0 0 {plot.width} {plot.height}" class="plot" role="img">'
    return f"<p>{escape(legend)}</p>{svg}{''.join([*ticks, *lines])}</svg>"


def _line(plot: _Plot, values: Sequence[float | None], number: int, count: int, largest: float) -> str:
    points = [(plot.x(i, count), plot.y(value, largest)) for i, value in enumerate(values) if value is not None]
    dash, mark = _DASHES[number % len(_DASHES)], _MARKS[number % len(_MARKS)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    marks = "".join(f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{mark}</text>' for x, y in points)
    return f'<polyline class="line" stroke-dasharray="{dash}" points="{path}"/>{marks}'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"
