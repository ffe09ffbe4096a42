"""Percentiles, medians and ratios."""

from __future__ import annotations

import pytest

from kvortex.bench.figures import Figures, Requests, measure, median_figures, median_ratio, percentile
from kvortex.bench.load import Played, Turn
from kvortex.bench.request import Failed, FailureKind, Good
from kvortex.bench.workload import Workload


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([7.0], 0.5, 7.0),
        ([7.0], 0.99, 7.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([float(n) for n in range(1, 101)], 0.5, 50.5),
        ([float(n) for n in range(100, 0, -1)], 0.99, 99.01),
        ([float(n) for n in range(1, 102)], 0.99, 100.0),
    ],
)
def test_percentiles_are_linear_between_neighbours(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == pytest.approx(expected)


def test_the_percentile_of_nothing_is_nothing() -> None:
    assert percentile([], 0.5) is None


def figures(rate: float | None, ttft: float | None = None) -> Figures:
    return Figures(rate, ttft, ttft, None, None, None, None)


def test_the_median_is_over_the_runs_that_have_a_figure() -> None:
    median = median_figures([figures(100.0, 1.0), figures(None), figures(300.0), figures(110.0, 3.0)])
    assert median.output_tokens_per_s == 110.0
    assert median.ttft_p50_s == 2.0
    assert median.tpot_p50_s is None


def test_ratios_are_taken_within_each_run() -> None:
    """The machine was twice as fast in run 2: ratios of medians would say something else."""
    assert median_ratio([(300.0, 100.0), (400.0, 200.0), (900.0, 300.0)]) == 3.0
    assert median_ratio([(300.0, None), (None, 100.0), (1.0, 0.0)]) is None


@pytest.mark.parametrize(
    ("ok", "failed", "share", "too_many"),
    [(95, 5, 0.05, False), (94, 6, 0.05, True), (0, 1, 1.0, True), (0, 0, 0.0, False), (1, 99, 1.0, False)],
)
def test_how_many_may_fail(ok: int, failed: int, share: float, too_many: bool) -> None:
    assert Requests(ok + failed, ok, failed, {}, (), 0).too_many_failed(share) is too_many


def good(ttft_s: float, tokens: int = 10, tpot_s: float | None = 0.1) -> Good:
    return Good(ttft_s, tpot_s, 9.0, tokens, None)


FAILED = Failed(FailureKind.HTTP_STATUS, "busy", 99.0, 500)


def played(*turns: Turn, client_cpu_share: float = 0.1) -> Played:
    return Played(Workload(conversations=2, turns=len(turns), gen=10), turns, (), 0, client_cpu_share)


def test_turns_from_the_second_on_are_measured_and_only_what_really_came() -> None:
    result = measure(
        played(
            Turn(100.0, (good(50.0), good(50.0))),
            Turn(2.0, (good(1.0), FAILED)),
            Turn(3.0, (good(3.0), good(2.0, tokens=1, tpot_s=None))),
        )
    )
    figures = result.figures
    assert figures.output_tokens_per_s == 21 / 5.0
    assert figures.ttft_p50_s == 2.0
    assert figures.ttft_p99_s == pytest.approx(2.98)
    assert figures.tpot_p50_s == 0.1
    assert (result.requests.sent, result.requests.ok, result.requests.failed) == (6, 5, 1)
    assert [turn.wall_s for turn in result.turns] == [100.0, 2.0, 3.0]
    assert [turn.ttft_p50_s for turn in result.turns] == [50.0, 1.0, 2.5]


def test_one_turn_alone_is_measured_itself() -> None:
    assert measure(played(Turn(4.0, (good(1.0), good(3.0))))).figures.output_tokens_per_s == 5.0


def test_a_client_that_was_the_bottleneck_says_so() -> None:
    turns = Turn(4.0, (good(1.0), good(3.0)))
    assert measure(played(turns)).notes == ()
    (note,) = measure(played(turns, client_cpu_share=0.95)).notes
    assert "this client was busy for 95%" in note
