"""`kvortex bench compare MODEL`: the same load on servers started in turn, without offload and with each kind."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from kvortex_cli.bench_load import (
    LOAD,
    MAX_FAILURES,
    REQUEST_TIMEOUT,
    Add,
    AsJson,
    Concurrency,
    Conversations,
    First,
    Gen,
    Html,
    MaxFailures,
    Timeout,
    Turns,
    Vocab,
)
from kvortex_cli.completion import TakesVllmOptions, complete_setting

if TYPE_CHECKING:
    from kvortex.bench.compare import EngineResult, Limits
    from kvortex.bench.documents import CompareResult
    from kvortex.bench.engines import Plan, Skipped
    from kvortex.bench.workload import Workload
    from kvortex.config.resolve import CommandLine

_ARGUMENTS: Final = "kvortex.bench.compare.arguments"
_EXIT_INTERRUPTED: Final = 130
# These are read where `serve` reads them, with its checks.
_OF_SERVE: Final = frozenset({"--config", "-c", "--set", "--help", "-h"})


class CompareCommand(TakesVllmOptions):
    """Takes its own options out first, and vLLM's out of the rest: some have the same name, such as --seed."""

    def own_arguments(self, ctx: Any, args: list[str]) -> list[str]:
        before = args[: args.index("--")] if "--" in args else args
        if "--help" in before or "-h" in before:
            return ["--help"]
        from kvortex.config.arguments import option_names, split_arguments
        from kvortex.config.names import nearest
        from kvortex.errors import ConfigError

        flags = {name: bool(getattr(p, "is_flag", False)) for p in self.params for name in p.opts if name[0] == "-"}
        flags = {name: is_flag for name, is_flag in flags.items() if name not in _OF_SERVE}
        own, rest = take_options(args, flags)
        try:
            arguments = split_arguments(rest)
        except ConfigError as error:
            close = nearest(str(error.place), [*flags, *option_names()])
            if close not in flags or "no such option" not in error.message:
                raise
            raise ConfigError(error.place, "there is no such option", hint=f"did you mean {close}?") from None
        ctx.meta[_ARGUMENTS] = arguments
        return own + arguments.own


def take_options(arguments: Sequence[str], flags: dict[str, bool]) -> tuple[list[str], list[str]]:
    """The named options with their values, and what is left.

    Args:
        flags: by name, whether it stands without a value.
    """
    taken: list[str] = []
    left: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            left += [argument, *rest]
            break
        name, equals, text = argument.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if name not in flags:
            left.append(argument)
            continue
        taken.append(name + equals + text)
        if not flags[name] and not equals and rest:
            taken.append(rest.pop(0))
    return taken, left


def bench_compare(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="Model to serve: a Hub name or a directory. Optional if the file names it.")
    ] = None,
    config: Annotated[str | None, typer.Option("--config", "-c", metavar="FILE", help="YAML file to read.")] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            autocompletion=complete_setting,
            help="One setting, such as kv_cache.ram_cache_size=64GB.",
        ),
    ] = None,
    engines: Annotated[
        str, typer.Option("--engines", metavar="LIST", help="What to compare, in this order.")
    ] = "none,offloading,simple,kvortex,bound",
    runs: Annotated[int, typer.Option("--runs", min=1, help="Of each engine; they alternate.")] = 1,
    conversations: Conversations = LOAD.conversations,
    turns: Turns = LOAD.turns,
    first: First = LOAD.first,
    add: Add = LOAD.add,
    gen: Gen = LOAD.gen,
    concurrency: Concurrency = LOAD.concurrency,
    seed: Annotated[
        int, typer.Option("--seed", help="Of all token ids. vLLM's own option of this name is --set seed=N.")
    ] = LOAD.seed,
    vocab: Vocab = None,
    timeout: Timeout = REQUEST_TIMEOUT,
    start_timeout: Annotated[
        str, typer.Option("--start-timeout", metavar="DURATION", help="For a server to become ready.")
    ] = "15m",
    max_failures: MaxFailures = MAX_FAILURES,
    logs: Annotated[
        Path | None, typer.Option("--logs", metavar="DIR", help="Where the servers' output goes. [default: a new one]")
    ] = None,
    as_json: AsJson = False,
    html: Html = None,
) -> None:
    """Play the same conversations on servers started one after another, and put their figures side by side.

    none is vLLM without offload; offloading and simple are vLLM's own connectors, with as many bytes of RAM;
    kvortex is KVortex; bound is vLLM with all conversations in VRAM, where they fit. All are started with the
    same options: every option of `vllm serve` is accepted, as by `kvortex serve`. A server that does not start
    is a result; kvortex must, and no server may fail more than --max-failures of its requests, for exit 0.

    Example: kvortex bench compare MODEL --set kv_cache.ram_cache_size=64GB --kv-cache-memory-bytes 24000000000
    """
    from kvortex.bench.compare import Limits
    from kvortex.bench.documents import compare_document
    from kvortex.bench.report import compare_report
    from kvortex.bench.vocabulary import vocabulary_of_model
    from kvortex.bench.workload import Workload
    from kvortex.config.resolve import CommandLine
    from kvortex_cli.bench_load import asked_vocabulary, check_writable, seconds, show
    from kvortex_cli.console import report

    arguments = ctx.meta[_ARGUMENTS]
    vocabulary = asked_vocabulary(vocab)
    limits = Limits(seconds("--timeout", timeout), seconds("--start-timeout", start_timeout))
    check_writable(html)
    command_line = CommandLine(model, config, tuple(sets or ()), tuple(arguments.vllm), arguments.untouched)
    workload = Workload(conversations, turns, first, add, gen, concurrency, seed)
    plans = _plans(engines, command_line, workload)
    served = _model_of(plans)
    workload = replace(workload, vocabulary=vocabulary or vocabulary_of_model(served))
    directory = _directory(logs)
    try:
        with _interrupted_by_any_signal():
            result = _compare(plans, workload, limits, runs, max_failures, served, directory)
    except KeyboardInterrupt:
        report("error", "interrupted", f"what was measured before, and the servers' output: {directory}")
        raise typer.Exit(_EXIT_INTERRUPTED) from None
    show(compare_report(result), compare_document(result), as_json=as_json, html=html)
    problems = result.problems()
    for problem in problems:
        report("error", problem)
    if problems:
        raise typer.Exit(1)


def _plans(engines: str, command_line: CommandLine, workload: Workload) -> list[Plan | Skipped]:
    from kvortex.bench.engines import make_plans, parse_engines
    from kvortex.config.machine import this_machine
    from kvortex.config.vllm_install import required_vllm

    chosen = parse_engines(engines)
    install = required_vllm()
    machine = this_machine(with_gpus=not install.is_cpu_build)
    return make_plans(chosen, command_line, os.environ, machine, install, workload)


def _model_of(plans: Sequence[Plan | Skipped]) -> str:
    from kvortex.bench.engines import Plan
    from kvortex.errors import UnfitError

    for plan in plans:
        if isinstance(plan, Plan):
            return plan.arguments[0]
    reasons = "; ".join(f"{plan.engine}: {plan.reason}" for plan in plans if not isinstance(plan, Plan))
    raise UnfitError(f"no engine can be started: {reasons}")


def _compare(
    plans: Sequence[Plan | Skipped],
    workload: Workload,
    limits: Limits,
    runs: int,
    max_failures: float,
    model: str,
    logs: Path,
) -> CompareResult:
    from kvortex.bench.compare import Comparison
    from kvortex.bench.documents import CompareResult, compare_document, conditions_now, to_json
    from kvortex_cli.bench_load import say

    conditions = conditions_now(workload, limits, max_failures)

    def result_of(engines: Sequence[EngineResult]) -> CompareResult:
        return CompareResult(conditions, model, tuple(engines), str(logs))

    def keep(engines: Sequence[EngineResult]) -> None:
        # A comparison takes long: what is interrupted has at least what was measured before.
        (logs / "result.json").write_text(to_json(compare_document(result_of(engines))), encoding="utf-8")

    say(f"logs, and the result so far: {logs}")
    return result_of(Comparison(plans, workload, limits, logs=logs, say=say).run(runs, keep))


def _directory(logs: Path | None) -> Path:
    from kvortex.errors import UsageError

    if logs is None:
        return Path(tempfile.mkdtemp(prefix="kvortex-bench-"))
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--logs {logs} cannot be made: {error.strerror}") from None
    return logs


@contextmanager
def _interrupted_by_any_signal() -> Iterator[None]:
    """SIGTERM and a closed terminal end the servers as Ctrl-C does; `nohup` keeps its meaning."""

    def interrupt(number: int, _: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
