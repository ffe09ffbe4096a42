"""Plays one workload on servers started one after another, and puts what came of it side by side."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from kvortex.bench.engines import Engine, Plan, Skipped
from kvortex.bench.figures import Figures, Measured, measure, median_figures, median_ratio
from kvortex.bench.load import WarmUpError, play
from kvortex.bench.request import Endpoint
from kvortex.bench.server_facts import ServerUnavailableError, check_length, read_server_facts
from kvortex.bench.server_process import ServerFailedError, ServerProcess
from kvortex.bench.workload import Workload
from kvortex.sizes import counted

# What `kvortex serve` becomes.
SERVER_MODULE = "kvortex.vllm_plugin.server"
_DYING_S: Final = 5.0
"""A server that failed requests may be about to end, after they failed."""
REFERENCES: Final = (Engine.NONE, Engine.BOUND)


class Outcome(StrEnum):
    """What became of one engine in one run."""

    MEASURED = "measured"
    FAILED = "failed"
    """The server did not start, died, or answered no request."""
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One engine in one run.

    Attributes:
        run: from 1.
        reason: why it was not measured; "" when it was.
        log_tail: the end of the server's output, where it failed.
        start_s: from starting the server until it was ready; None when it never was.
        measured: None where there was no load. With FAILED, what there was of it before and after the failure.
        ratios: of output tokens/s to those of the reference engines in this very run.
    """

    run: int
    outcome: Outcome
    reason: str = ""
    log: str = ""
    log_tail: tuple[str, ...] = ()
    start_s: float | None = None
    measured: Measured | None = None
    ratios: Mapping[Engine, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineResult:
    """One engine over all runs.

    Attributes:
        command: the plain `vllm serve` line; "" for one that was never to start.
        median: of each figure over the measured runs.
        ratios: the medians over the runs of the ratios within each.
    """

    engine: Engine
    command: str
    ram_bytes: int
    runs: tuple[EngineRun, ...]
    median: Figures
    ratios: Mapping[Engine, float]

    @property
    def is_measured(self) -> bool:
        return any(run.outcome is Outcome.MEASURED for run in self.runs)

    @property
    def reason(self) -> str:
        """Why a run was not measured; "" when all were."""
        return next((run.reason for run in self.runs if run.reason), "")


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines in seconds.

    Attributes:
        request_s: for a request.
        start_s: for a server to become ready; None where none is started.
    """

    request_s: float
    start_s: float | None = None


class Comparison:
    """Runs the plans, each engine once a run: run 1 all engines, run 2 all engines, ...

    Args:
        logs: directory for the servers' output.
        say: told what is going on.
    """

    def __init__(
        self,
        plans: Sequence[Plan | Skipped],
        workload: Workload,
        limits: Limits,
        *,
        logs: Path,
        say: Callable[[str], None],
    ) -> None:
        self._plans = plans
        self._workload = workload
        self._limits = limits
        self._logs = logs
        self._say = say
        self._runs: dict[Engine, list[EngineRun]] = {plan.engine: [] for plan in plans}

    def run(self, runs: int, after_each: Callable[[Sequence[EngineResult]], None]) -> list[EngineResult]:
        """All of it; a server that fails is a result. An engine that never started is not tried in later runs.

        Args:
            after_each: given all results so far, whenever there is one more.

        Raises:
            UsageError: the server cannot take conversations that long.
        """
        for number in range(1, runs + 1):
            for plan in self._plans:
                if any(run.start_s is None for run in self._runs[plan.engine]):
                    continue
                self._runs[plan.engine].append(self._run_one(plan, number))
                after_each(self.results())
        return self.results()

    def results(self) -> list[EngineResult]:
        """What there is so far, in the order of the plans."""
        return [self._result(plan) for plan in self._plans if self._runs[plan.engine]]

    def _run_one(self, plan: Plan | Skipped, number: int) -> EngineRun:
        if isinstance(plan, Skipped):
            self._say(f"{plan.engine}: skipped: {plan.reason}")
            return EngineRun(number, Outcome.SKIPPED, plan.reason)
        log = self._logs / f"{plan.engine}-{number}.log"
        self._say(f"{plan.engine}, run {number}: starting the server (log: {log})")
        server = ServerProcess(
            [sys.executable, "-m", SERVER_MODULE, *plan.arguments],
            {**os.environ, **plan.environment},
            log=log,
            ready_within_s=math.inf if self._limits.start_s is None else self._limits.start_s,
            say=self._say,
        )
        start_s: float | None = None
        try:
            with server:
                start_s = server.start_s
                self._say(f"{plan.engine}, run {number}: ready after {start_s:.0f} s")
                return self._play(plan, number, server)
        except ServerFailedError as failed:
            reason, tail = failed.message, failed.log_tail
        except (WarmUpError, ServerUnavailableError) as failed:
            reason, tail = failed.message, server.log_tail()
        self._say(f"{plan.engine}, run {number}: failed: {reason}")
        return EngineRun(number, Outcome.FAILED, reason, str(log), tail, start_s)

    def _play(self, plan: Plan, number: int, server: ServerProcess) -> EngineRun:
        facts = read_server_facts(server.url, plan.api_key)
        check_length(self._workload, facts.max_model_len)
        endpoint = Endpoint(server.url, facts.model, plan.api_key)

        def say(text: str) -> None:
            self._say(f"{plan.engine}, run {number}: {text}")

        try:
            played = asyncio.run(play(endpoint, self._workload, timeout_s=self._limits.request_s, say=say))
        except WarmUpError:
            server.check_alive(_DYING_S)  # a server that died explains it better
            raise
        measured = measure(played)
        reason, tail = "", tuple[str, ...]()
        try:
            server.check_alive(_DYING_S if measured.requests.failed else 0.0)
        except ServerFailedError as died:
            answered = f"{measured.requests.ok:,} of {counted(measured.requests.sent, 'request')} answered"
            reason, tail = f"{died.message}; {answered}", died.log_tail
        if not reason and measured.requests.ok == 0:
            reason, tail = f"all requests failed: {measured.requests.examples[0]}", server.log_tail()
        if reason:
            self._say(f"{plan.engine}, run {number}: failed: {reason}")
        outcome = Outcome.FAILED if reason else Outcome.MEASURED
        return EngineRun(number, outcome, reason, str(server.log), tail, server.start_s, measured)

    def _result(self, plan: Plan | Skipped) -> EngineResult:
        runs = self._runs[plan.engine]
        good = [run.measured.figures for run in runs if run.outcome is Outcome.MEASURED and run.measured is not None]
        return EngineResult(
            engine=plan.engine,
            command="" if isinstance(plan, Skipped) else plan.shown,
            ram_bytes=0 if isinstance(plan, Skipped) else plan.ram_bytes,
            runs=tuple(replace(run, ratios=self._ratios([run])) for run in runs),
            median=median_figures(good),
            ratios=self._ratios(runs),
        )

    def _ratios(self, runs: Sequence[EngineRun]) -> dict[Engine, float]:
        """Of output tokens/s to the reference engines', each within one run."""
        ratios: dict[Engine, float] = {}
        for reference in REFERENCES:
            of_reference = {run.run: _rate(run) for run in self._runs.get(reference, [])}
            ratio = median_ratio((_rate(run), of_reference.get(run.run)) for run in runs)
            if ratio is not None:
                ratios[reference] = ratio
        return ratios


def _rate(run: EngineRun) -> float | None:
    if run.outcome is not Outcome.MEASURED or run.measured is None:
        return None
    return run.measured.figures.output_tokens_per_s
