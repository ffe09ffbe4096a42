"""What the pages say is there: files they link to, messages they quote, reasons they explain, figures they repeat."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from kvortex.cache.misses import Miss
from kvortex.cache.stats import Refusal
from kvortex.cache.verdict import WORDS, State

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
ELSEWHERE = ("http://", "https://", "mailto:")


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    """The relative links of a page that lead nowhere."""
    wrong = []
    for target in LINK.findall(page.read_text()):
        path, _, anchor = target.partition("#")
        if target.startswith(ELSEWHERE):
            continue
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page):
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading\n[1](#a-heading) [2](page.md#none) [3](none.md) [4](https://example.com/x) [5](page.md)"
    )
    assert broken(page) == ["page.md#none", "none.md"]


def test_every_page_can_be_reached_from_the_readme():
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        seen.add(page)
        linked = {(page.parent / target.partition("#")[0]).resolve() for target in LINK.findall(page.read_text())}
        waiting += [found for found in linked if found.suffix == ".md" and found.is_file() and found not in seen]
    assert set(PAGES) - seen == set()


# ---- docs/troubleshooting.md ----------------------------------------------------------------------------------------

TROUBLE = (ROOT / "docs" / "troubleshooting.md").read_text()


@cache
def texts() -> str:
    """All texts in the code, as they are put together, with a mark where a value goes."""
    found = []
    for path in [*(ROOT / "kvortex").rglob("*.py"), *(ROOT / "kvortex_cli").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append("".join(str(part) for part in parts))
    return "\n".join(found)


def rows(heading: str) -> list[list[str]]:
    """The cells of the tables whose first line begins so."""
    tables = [block.splitlines()[2:] for block in TROUBLE.split("\n\n") if block.startswith(heading)]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for table in tables for line in table]


def test_quoted_messages_are_the_codes_own():
    """A quotation has a blank in it; what has none is the name of a counter or an option."""
    symptoms = [cells[0] for cells in rows("| what you see ")]
    quoted = [text for symptom in symptoms for text in re.findall(r"`([^`]+)`", symptom) if " " in text]
    assert len(quoted) > 20
    assert [text for text in quoted if text not in texts()] == []


def test_every_reason_of_a_miss_is_explained_by_the_word_that_inspect_shows():
    shown = {cells[0].strip("`"): cells[1] for cells in rows("| reason | in `inspect`")}
    assert shown == {miss.value: WORDS[miss] for miss in Miss}


def test_every_reason_of_a_refusal_is_explained():
    assert [cells[0].strip("`") for cells in rows("| reason | what it means")] == [reason.value for reason in Refusal]


def test_every_verdict_but_the_good_one_has_a_row():
    verdicts = [cells[0].strip("`") for cells in rows("| verdict |")]
    assert len(verdicts) == len(State) - 1
    assert [text for text in verdicts if text not in texts()] == []


# ---- figures --------------------------------------------------------------------------------------------------------

MEASURED = (ROOT / "docs" / "benchmarks.md").read_text()
FIGURE = re.compile(r"(\d[\d,.]*\d|\d)(?= (?:tokens/s|GB/s|ms|%)|(?: to \d+)? %)")


def figures(page: str) -> list[str]:
    """Numbers with a unit of speed or time, and those that stand alone in a table's cell."""
    text = (ROOT / "docs" / page).read_text()
    alone = [n for cell in re.findall(r"\| ([\d /.,]+)(?= \|)", text) for n in re.findall(r"[\d.,]+", cell)]
    return FIGURE.findall(text) + alone


@pytest.mark.parametrize("page", ["comparison.md", "tuning.md"])
def test_figures_are_those_that_were_measured(page):
    found = figures(page)
    assert len(found) >= 4
    measured = set(re.findall(r"\d[\d,.]*\d|\d", MEASURED))
    assert [figure for figure in found if figure not in measured] == []
