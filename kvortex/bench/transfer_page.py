"""Copies measured on this machine as one HTML page: the numbers, plots over the fragment's size, the conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from kvortex.bench.page import definitions, document, line_plot, section, table

if TYPE_CHECKING:
    from kvortex.transfer.transfer_bench import CopyResult, TransferReport

_READING = (
    ("fragment", "contiguous bytes on the GPU: a block of one layer, most often"),
    ("GB/s, of peak", "while nothing else runs; the peak is one large copy on this machine, in that direction"),
    ("beside", "the same while a model's steps run"),
    ("step, worst", "how many times as long a step takes with copies beside it, on average and at worst"),
    ("*", "what this GPU's tuning takes"),
)


def transfer_page(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    report: TransferReport,
    shown_fragment: Callable[[int], str],
    conditions: Iterable[tuple[str, str]],
) -> str:
    """
    Args:
        columns, rows: the table, as text.
        shown_fragment: a fragment's bytes, as text.
    """
    fragments = sorted({result.fragment_bytes for result in report.results if result.fragment_bytes})
    places = [shown_fragment(num_bytes) for num_bytes in fragments]

    def plot(value_of: Callable[[CopyResult], float | None], shown: Callable[[float], str]) -> str:
        return line_plot(_series(report, fragments, value_of), places, shown)

    return document(
        f"Copies between host RAM and VRAM: {report.setting.gpu}",
        [
            table(columns, rows),
            section("Bandwidth, nothing else running", plot(lambda r: r.bandwidth, _gigabytes)),
            section("Bandwidth beside a model", plot(lambda r: r.beside.bandwidth if r.beside else None, _gigabytes)),
            section("Time that copies add to a model's step", plot(_added, lambda share: f"{share:.1%}")),
            section("How to read it", definitions(_READING)),
            section("Conditions", definitions(conditions)),
        ],
    )


def _series(
    report: TransferReport, fragments: Sequence[int], value_of: Callable[[CopyResult], float | None]
) -> list[tuple[str, list[float | None]]]:
    """A line for each direction and method; lines without a value are left out."""
    values = {(r.direction, r.method, r.fragment_bytes): value_of(r) for r in report.results if r.fragment_bytes}
    lines = dict.fromkeys((direction, method) for direction, method, _ in values)
    series = [(f"{line[0]}, {line[1]}", [values.get((*line, size)) for size in fragments]) for line in lines]
    return [(name, found) for name, found in series if any(value is not None for value in found)]


def _added(result: CopyResult) -> float | None:
    """Share of a step; less than nothing is noise."""
    return max(result.beside.mean_step - 1, 0.0) if result.beside is not None else None


def _gigabytes(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.0f} GB/s"
