"""Results as documents: all that a reader needs to believe them or to repeat them, as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from kvortex.bench.compare import EngineResult, Limits
from kvortex.bench.conditions import Hardware, Versions, read_hardware, read_versions
from kvortex.bench.engines import Engine
from kvortex.bench.figures import Measured
from kvortex.bench.request import Endpoint
from kvortex.bench.server_facts import ServerFacts
from kvortex.bench.session_figures import SessionFigures
from kvortex.bench.workload import Workload
from kvortex.config.redaction import redact
from kvortex.sizes import counted

# Raised when a field changes its meaning or goes.
FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Conditions:
    """What is the same for all of a result.

    Attributes:
        began_at: UTC.
        max_failures: share of requests that may fail.
    """

    began_at: datetime
    hardware: Hardware
    versions: Versions
    workload: Workload
    limits: Limits
    max_failures: float


def conditions_now(workload: Workload, limits: Limits, max_failures: float) -> Conditions:
    """This machine's, now."""
    began_at = datetime.now(UTC).replace(microsecond=0)
    return Conditions(began_at, read_hardware(), read_versions(), workload, limits, max_failures)


@dataclass(frozen=True, slots=True)
class ServeResult:
    """One workload on a running server.

    Attributes:
        url: of the server, without `/v1`; may hold a user's name and password.
        sessions: of an open load.
    """

    conditions: Conditions
    url: str
    server: ServerFacts
    measured: Measured
    sessions: SessionFigures | None = None

    @property
    def shown_url(self) -> str:
        """The address with *** for the user in it."""
        return str(redact("url", self.url))

    @property
    def is_local(self) -> bool:
        """Whether the conditions' hardware and versions are the server's, too."""
        return Endpoint(self.url, "").is_local

    @property
    def failed(self) -> bool:
        """Whether more requests failed than was allowed."""
        return self.measured.requests.too_many_failed(self.conditions.max_failures)


@dataclass(frozen=True, slots=True)
class CompareResult:
    """One workload on servers started in turn.

    Attributes:
        model: that they served.
        engines: in the order in which they were started.
        logs: directory of their output.
    """

    conditions: Conditions
    model: str
    engines: tuple[EngineResult, ...]
    logs: str

    @property
    def measured_runs(self) -> list[tuple[EngineResult, Measured]]:
        return [(engine, run.measured) for engine in self.engines for run in engine.runs if run.measured is not None]

    def problems(self) -> list[str]:
        """Why the comparison as a whole failed; empty if it did not.

        vLLM's own connectors may fail to start: that is a result. KVortex may not: there is nothing compared.
        """
        found: list[str] = []
        if not any(engine.is_measured for engine in self.engines):
            found.append("no engine was measured")
        if any(engine.engine is Engine.KVORTEX and not engine.is_measured for engine in self.engines):
            found.append("kvortex was not measured")
        for engine, measured in self.measured_runs:
            requests = measured.requests
            if requests.too_many_failed(self.conditions.max_failures):
                found.append(f"{engine.engine}: {requests.failed:,} of {counted(requests.sent, 'request')} failed")
        return found


def serve_document(result: ServeResult) -> dict[str, Any]:
    """The result as JSON has it."""
    return {
        "kind": "kvortex bench serve",
        **_conditions(result.conditions),
        "server": {"url": result.shown_url, "is_this_machine": result.is_local, **_plain(result.server)},
        **_plain(result.measured),
        **({"sessions": _plain(result.sessions)} if result.sessions is not None else {}),
        "failed": result.failed,
    }


def compare_document(result: CompareResult) -> dict[str, Any]:
    """The result as JSON has it; times in seconds, sizes in bytes."""
    return {
        "kind": "kvortex bench compare",
        **_conditions(result.conditions),
        "model": result.model,
        "engines": [_plain(engine) for engine in result.engines],
        "failures": _failures(result.engines),
        "problems": result.problems(),
        "logs": result.logs,
    }


def _conditions(conditions: Conditions) -> dict[str, Any]:
    workload = conditions.workload
    return {
        "format": FORMAT,
        "began_at": conditions.began_at.isoformat(),
        "hardware": _plain(conditions.hardware),
        "versions": _plain(conditions.versions),
        "workload": {
            **_plain(workload),
            "measured_from_turn": workload.measured_from_turn,
            "longest": workload.longest,
        },
        "limits": {**_plain(conditions.limits), "max_failures": conditions.max_failures},
    }


def _failures(engines: Sequence[EngineResult]) -> list[dict[str, Any]]:
    return [
        {"engine": engine.engine, "run": run.run, "outcome": run.outcome, "reason": run.reason}
        for engine in engines
        for run in engine.runs
        if run.reason
    ]


def _plain(value: Any) -> dict[str, Any]:
    plain: dict[str, Any] = dataclasses.asdict(value)
    return plain


def to_json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, allow_nan=False)
