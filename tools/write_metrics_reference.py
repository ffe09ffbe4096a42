"""Writes the table of docs/metrics.md from the code that answers /metrics.

    python tools/write_metrics_reference.py

The test suite fails while the page and the code differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from prometheus_client.metrics_core import Metric

from kvortex.cache.stats import Ledger
from kvortex.vllm_plugin.metrics import families
from kvortex.vllm_plugin.request_log import counts

PAGE: Final = Path(__file__).parent.parent / "docs" / "metrics.md"
BEGIN: Final = "<!-- written by tools/write_metrics_reference.py -->\n"
END: Final = "<!-- end -->\n"

_VRAM: Final = ("capacity_bytes", "capacity_blocks", "resident_blocks", "clean_blocks", "in_use_blocks")
_RAM: Final = ("capacity_bytes", "used_bytes", "capacity_blocks", "used_blocks", "pinned_blocks", "quarantined_blocks")


def empty_families() -> list[Metric]:
    """The families of a server that has done nothing: every name and label, all values 0."""
    document = {
        **Ledger().as_dict(),
        "verify": Ledger().verify_as_dict(),
        "tiers": {"vram": dict.fromkeys(_VRAM, 0), "ram": dict.fromkeys(_RAM, 0)},
        "prefetch": {"issued_blocks": 0, "used_blocks": 0, "wasted_blocks": 0, "late_blocks": 0},
        "sessions": {"known": 0, "active": 0},
        "request_log": counts(),
        "admission": {"waited": 0, "overdue": 0, "seconds": 0.0},
    }
    return list(families(document))


def table() -> str:
    """One row a family, in the order of /metrics."""
    rows = ["| name | type | labels | what |", "| --- | --- | --- | --- |"]
    for family in empty_families():
        (name,) = {sample.name for sample in family.samples}
        labels = {label for sample in family.samples for label in sample.labels}
        values = [
            f"`{label}`: " + ", ".join(f"`{sample.labels[label]}`" for sample in family.samples)
            for label in sorted(labels)
        ]
        rows.append(f"| `{name}` | {family.type} | {'; '.join(values)} | {family.documentation} |")
    return "\n".join(rows) + "\n"


def page(current: str) -> str:
    """The page with its table as the code is now."""
    before, _, rest = current.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
