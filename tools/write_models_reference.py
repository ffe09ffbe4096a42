"""Writes the tables of docs/models.md from the rows that the tests run.

    python tools/write_models_reference.py

The test suite fails while the page and the rows differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.e2e.model_table import FEATURES, MODELS, REFUSED, Feature, Model, Refused

PAGE: Final = Path(__file__).parent.parent / "docs" / "models.md"
BEGIN: Final = "<!-- written by tools/write_models_reference.py -->\n"
END: Final = "<!-- end -->\n"
IN_LONG_RUN: Final = "in the long run"


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _served(row: Model) -> str:
    notes = [row.note, IN_LONG_RUN if row.long else ""]
    return _cells(row.name, row.attention, "; ".join(["equal", *filter(None, notes)]))


def _refused(row: Refused) -> str:
    by = "vLLM refuses" if row.by_vllm else "refused"
    return _cells(row.name, row.attention, "; ".join(filter(None, [f"{by}: `{row.message}`", row.note])))


def _feature(row: Feature) -> str:
    path, _, _ = row.test.partition("::")
    served = f"{row.served}; {IN_LONG_RUN}" if row.long else row.served
    return _cells(row.name, served, f"[{Path(path).name}](../{path})")


def tables() -> str:
    """Models served, models refused, features: a table each, in the order of the rows."""
    models = [_cells("model", "its layers' attention", "outcome"), _cells(*["---"] * 3)]
    models += [_served(row) for row in MODELS] + [_refused(row) for row in REFUSED]
    features = [_cells("feature", "outcome", "test"), _cells(*["---"] * 3), *map(_feature, FEATURES)]
    return "\n".join([*models, "", *features]) + "\n"


def page(current: str) -> str:
    """The page with its tables as the rows are now."""
    before, _, rest = current.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{tables()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
