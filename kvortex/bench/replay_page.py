"""Replays of a trace as one HTML page: the numbers, the hit rate over the RAM size, the conditions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvortex.bench.page import definitions, document, line_plot, section, table
from kvortex.replay.simulator import ReplayResult
from kvortex.sizes import format_bytes


def replay_page(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    results: Sequence[ReplayResult],
    conditions: Iterable[tuple[str, str]],
) -> str:
    """
    Args:
        columns, rows: the table, as text.
        results: of any policies and sizes; a line of the plot for each policy.
    """
    sizes = sorted({result.ram_bytes for result in results})
    rate_of = {(result.policy, result.ram_bytes): result.hit_rate for result in results}
    series = [
        (policy, [rate_of.get((policy, size)) for size in sizes])
        for policy in dict.fromkeys(result.policy for result in results)
    ]
    plot = line_plot(series, [format_bytes(size) for size in sizes], lambda share: f"{share:.1%}")
    return document(
        title,
        [
            table(columns, rows),
            section("Share of prompt tokens found, over the RAM size", plot),
            section("Conditions", definitions(conditions)),
        ],
    )
