"""A comparison of servers, of which some fail; and its result as JSON, text and page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvortex.bench import compare as compare_module
from kvortex.bench.compare import Comparison, EngineResult, Limits, Outcome
from kvortex.bench.conditions import GpuModel, Hardware, Versions
from kvortex.bench.documents import CompareResult, Conditions, compare_document, to_json
from kvortex.bench.engines import Engine, Plan, Skipped
from kvortex.bench.page import page
from kvortex.bench.report import compare_report
from kvortex.bench.workload import Workload
from kvortex.errors import UsageError

WORKLOAD = Workload(conversations=3, turns=2, first=5, add=2, gen=4, concurrency=2)


@pytest.fixture(autouse=True, scope="module")
def stub_engines() -> Iterator[None]:
    """A comparison starts stubs; the model's name says how they behave."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_module, "SERVER_MODULE", "tests.fakes.stub_server")
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
        yield


def plan(engine: Engine, behaviour: str) -> Plan:
    return Plan(engine, (behaviour,), {}, f"vllm serve {behaviour} <&>", None, 1000)


def compare(
    plans: Sequence[Plan | Skipped], tmp_path: Path, *, runs: int = 1, workload: Workload = WORKLOAD
) -> tuple[list[EngineResult], list[str]]:
    """The results, and what was said."""
    said: list[str] = []
    seen: list[int] = []
    comparison = Comparison(
        plans,
        workload,
        Limits(request_s=20, start_s=30),
        logs=tmp_path,
        say=said.append,
    )
    results = comparison.run(runs, lambda so_far: seen.append(sum(len(engine.runs) for engine in so_far)))
    assert seen == list(range(1, len(seen) + 1))
    return results, said


def document_of(results: Sequence[EngineResult], *, max_failures: float = 0.05) -> CompareResult:
    gpus = (GpuModel("NVIDIA H200", 2, 150_000_000_000, "Gen5 x16"),)
    conditions = Conditions(
        datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
        Hardware("Some CPU", 8, 64_000_000_000, gpus, "6.1", ""),
        Versions("0.1.0", "0.26.0", "2.9", "3.11.2", "570.86", "12.8"),
        WORKLOAD,
        Limits(request_s=20, start_s=30),
        max_failures,
    )
    return CompareResult(conditions, "the/model", tuple(results), "/logs")


@pytest.mark.parametrize("dies", ["die", "die_slowly"])
def test_a_server_that_fails_is_a_result_and_the_others_are_measured(tmp_path: Path, dies: str) -> None:
    plans = [
        plan(Engine.NONE, "good"),
        plan(Engine.OFFLOADING, "dies_at_start"),
        plan(Engine.SIMPLE, f"good,good,{dies}"),
        plan(Engine.KVORTEX, "good"),
        Skipped(Engine.BOUND, "it does not fit"),
    ]
    results, _ = compare(plans, tmp_path)
    none, offloading, simple, kvortex, bound = (engine.runs[0] for engine in results)
    assert none.outcome is kvortex.outcome is Outcome.MEASURED
    assert none.ratios == {Engine.NONE: 1.0}
    assert kvortex.measured is not None
    assert kvortex.measured.requests.ok == 6
    assert offloading.outcome is Outcome.FAILED
    assert "NotImplementedError: offloading needs a GPU" in offloading.reason
    assert offloading.log_tail
    assert offloading.start_s is None
    assert simple.outcome is Outcome.FAILED
    assert "exit 3" in simple.reason
    assert "of 6 requests answered" in simple.reason
    assert results[2].median.output_tokens_per_s is None
    assert (bound.outcome, bound.reason) == (Outcome.SKIPPED, "it does not fit")
    (problem,) = document_of(results).problems()
    # How many get through before the server dies depends on how they meet it.
    assert re.fullmatch(r"simple: [4-6] of 6 requests failed", problem)


def test_engines_alternate_and_ratios_are_within_a_run(tmp_path: Path) -> None:
    plans = [plan(Engine.NONE, "good"), plan(Engine.KVORTEX, "good"), plan(Engine.OFFLOADING, "dies_at_start")]
    results, said = compare(plans, tmp_path, runs=2)
    started = [line.split(": starting")[0] for line in said if "starting" in line]
    # One that did not start is not tried again.
    assert started == ["none, run 1", "kvortex, run 1", "offloading, run 1", "none, run 2", "kvortex, run 2"]
    none, kvortex, _ = results
    rates = [[run.measured.figures.output_tokens_per_s for run in e.runs if run.measured] for e in (none, kvortex)]
    ratios = [mine / others for others, mine in zip(*rates, strict=True) if mine and others]
    assert [run.ratios[Engine.NONE] for run in kvortex.runs] == pytest.approx(ratios)
    assert kvortex.ratios[Engine.NONE] == pytest.approx(sum(ratios) / 2)
    assert kvortex.median.output_tokens_per_s == pytest.approx(sum(r for r in rates[1] if r) / 2)
    assert Engine.BOUND not in kvortex.ratios


def test_a_server_that_refuses_every_request_is_a_failure_with_what_it_said(tmp_path: Path) -> None:
    results, _ = compare([plan(Engine.KVORTEX, "status_500")], tmp_path)
    assert results[0].runs[0].outcome is Outcome.FAILED
    assert "the engine is busy" in results[0].runs[0].reason
    assert document_of(results).problems() == ["no engine was measured", "kvortex was not measured"]


def test_failed_requests_over_the_allowed_share_fail_the_comparison(tmp_path: Path) -> None:
    results, _ = compare([plan(Engine.NONE, "good,good,good,status_500")], tmp_path)
    assert results[0].is_measured
    assert document_of(results, max_failures=0.5).problems() == []
    (problem,) = document_of(results, max_failures=0.01).problems()
    assert problem.startswith("none: ")
    assert problem.endswith("of 6 requests failed")


def test_conversations_that_are_too_long_end_it_and_leave_no_server(tmp_path: Path) -> None:
    too_long = Workload(conversations=1, turns=1, first=100_000, add=1, gen=1, concurrency=1)
    with pytest.raises(UsageError, match="grows to 100001 tokens, and the server takes 100000"):
        compare([plan(Engine.NONE, "good")], tmp_path, workload=too_long)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> CompareResult:
    plans = [plan(Engine.NONE, "good"), plan(Engine.OFFLOADING, "dies_at_start"), plan(Engine.KVORTEX, "good")]
    return document_of(compare(plans, tmp_path_factory.mktemp("logs"))[0])


def test_the_document_names_all_that_a_reader_needs(result: CompareResult) -> None:
    document = json.loads(to_json(compare_document(result)))
    assert document["kind"] == "kvortex bench compare"
    assert document["hardware"]["gpus"][0]["name"] == "NVIDIA H200"
    assert document["versions"]["vllm"] == "0.26.0"
    assert document["workload"] == {
        "conversations": 3,
        "turns": 2,
        "first": 5,
        "add": 2,
        "gen": 4,
        "concurrency": 2,
        "seed": 0,
        "vocabulary": {"low": 1000, "high": 30000},
        "measured_from_turn": 2,
        "longest": 15,
    }
    (failure,) = document["failures"]
    assert (failure["engine"], failure["run"], failure["outcome"]) == ("offloading", 1, "failed")
    kvortex = document["engines"][2]
    assert kvortex["command"] == "vllm serve good <&>"
    assert kvortex["runs"][0]["measured"]["requests"]["ok"] == 6
    assert kvortex["ratios"]["none"] == kvortex["runs"][0]["ratios"]["none"] > 0


class Resources(HTMLParser):
    """What a page loads, and whether its tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [f"{name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag in ("script", "link", "iframe", "img", "object"):
            self.loaded.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_has_the_numbers_first_and_loads_nothing(result: CompareResult) -> None:
    report = compare_report(result)
    text = page(report)
    parser = Resources()
    parser.feed(text)
    assert parser.loaded == []
    assert parser.open == []
    assert not re.search(r"https?://|url\(|@import", text)
    for row in report.rows:
        for cell in row.cells:
            assert f"<td>{cell}</td>" in text
    assert text.index("<table>") < text.index("<svg") < text.index("Conditions")
    for condition in ("NVIDIA H200", "Some CPU", "vLLM 0.26.0", "seed 0", "3 conversations of 2 turns", "the/model"):
        assert condition in text
    assert "vllm serve good &lt;&amp;&gt;" in text
    assert "offloading needs a GPU" in text
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text


def test_the_page_begins_with_the_outcome_in_a_sentence_gain_or_loss(result: CompareResult) -> None:
    report = compare_report(result)
    rows = {row.name: row.cells for row in report.rows}
    assert report.headline == (
        f"KVortex: {rows['kvortex'][1]} output tokens/s, {rows['kvortex'][2].rstrip('x')} times those of vLLM without "
        f"offload. Time to the first token, median / 99th percentile, in ms: KVortex {rows['kvortex'][4]}; "
        f"vLLM without offload {rows['none'][4]}."
    )
    text = page(report)
    assert text.index("<h1>") < text.index(report.headline) < text.index("<table>")


def test_a_comparison_without_kvortex_has_no_headline(tmp_path: Path) -> None:
    plans = [plan(Engine.NONE, "good"), plan(Engine.KVORTEX, "dies_at_start")]
    assert compare_report(document_of(compare(plans, tmp_path)[0])).headline == ""


def test_the_rows_have_the_losing_ones_too(result: CompareResult) -> None:
    rows = {row.name: row for row in compare_report(result).rows}
    assert list(rows) == ["none", "offloading", "kvortex"]
    assert rows["offloading"].cells[1:3] == ("failed", "-")
    assert rows["kvortex"].cells[-1] == "6 / 0"
    assert rows["none"].cells[2] == "1.00x"
