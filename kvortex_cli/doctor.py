"""`kvortex doctor`: is this machine fit for KVortex, and what is wrong with it?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvortex_cli.checks.finding import Finding

_FORMAT: Final = 1
"""Of --json: grows when a key changes its meaning or goes; docs/doctor.md."""


def doctor(
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="Also say what of this model fits: a Hub name or a directory."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", "-c", metavar="FILE", help="Also check this configuration on this machine."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> int:
    """Check this machine: GPUs, driver, vLLM, the RAM it may really use, and whether that can be pinned.

    Exit status 0: nothing failed; 1: a check failed; 2: the call or the configuration is wrong. Prints no
    tokens or keys: the output can go into an issue as it is.

    vLLM's cpu_offload_gb is something else: it moves weights to host RAM, not KV.

    Example: kvortex doctor --model meta-llama/Llama-3.1-8B-Instruct
    """
    import os

    from kvortex_cli.checks.finding import Status

    examination = examine(model, config, os.environ)
    if as_json:
        _print_json(examination)
    else:
        _print_table(examination.findings)
    return 1 if any(finding.status is Status.FAIL for finding in examination.findings) else 0


@dataclass(frozen=True, slots=True)
class Examination:
    """
    Attributes:
        model: what is known of the model as numbers; None where none is named.
    """

    findings: list[Finding]
    model: dict[str, Any] | None = None


def examine(model: str | None, config: str | None, environ: Mapping[str, str]) -> Examination:
    """All findings, naming nobody; raises ConfigError when the configuration itself is wrong."""
    from kvortex_cli.checks.anonymous import anonymous

    examination = _examine(model, config, environ)
    findings = [
        replace(f, value=anonymous(f.value, environ), fix=anonymous(f.fix, environ)) for f in examination.findings
    ]
    return replace(examination, findings=findings)


def _examine(model: str | None, config: str | None, environ: Mapping[str, str]) -> Examination:
    from kvortex.config.checks import uses_cumem
    from kvortex.config.resolve import CommandLine, resolve
    from kvortex_cli.checks.facts import gather, machine_findings, try_out
    from kvortex_cli.checks.model import check_config, check_model

    facts = gather(environ)
    if model is None and config is None:
        return Examination(machine_findings(try_out(facts), ram_cache_bytes=None, uses_cumem=False))
    # A wrong file is told before anything is tried.
    resolved = resolve(CommandLine(model, config), environ, facts.for_config, require_model=False)
    facts = try_out(facts)
    size = resolved.kv_cache.ram_cache_size if resolved.uses_kvortex else None
    of_model = check_model(resolved, facts.gpus.gpus)
    findings = [
        *machine_findings(facts, ram_cache_bytes=size, uses_cumem=uses_cumem(resolved)),
        *check_config(resolved, facts.for_config, facts.vllm, config),
        *of_model.findings,
    ]
    return Examination(findings, of_model.data)


def _print_json(examination: Examination) -> None:
    import json

    from kvortex import __version__
    from kvortex_cli.checks.finding import Status

    findings = examination.findings
    counts = {status.value: sum(finding.status is status for finding in findings) for status in Status}
    shown = [{"check": f.check, "status": f.status.value, "value": f.value, "fix": f.fix or None} for f in findings]
    document = {
        "format": _FORMAT,
        "findings": shown,
        "model": examination.model,
        "summary": {"kvortex": __version__, **counts},
    }
    print(json.dumps(document, indent=2))


def _print_table(findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    from kvortex_cli.checks.finding import Status
    from kvortex_cli.console import stderr, stdout

    styles = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}
    table = Table(box=None, pad_edge=False)
    for column in ("check", "status", "seen, and what to do"):
        table.add_column(column, no_wrap=column != "seen, and what to do", overflow="fold")
    for finding in findings:
        seen = finding.value if not finding.fix else f"{finding.value}\nfix: {finding.fix}"
        table.add_row(finding.check, Text(finding.status.value, style=styles[finding.status]), seen)
    stdout().print(table)
    counts = [f"{sum(f.status is status for f in findings)} {status.value}" for status in Status]
    stderr().print(", ".join(counts))
