"""`kvortex serve MODEL`: vLLM's OpenAI-compatible server with offload, or what it would be started with."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from kvortex_cli.completion import TakesVllmOptions, complete_setting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvortex.config.machine import MachineFacts
    from kvortex.config.resolve import CommandLine, ResolvedConfig
    from kvortex.config.vllm_install import VllmInstall

_ARGUMENTS: Final = "kvortex.serve.arguments"
_SERVER_MODULE: Final = "kvortex.vllm_plugin.server"
_USUAL_FILE: Final = "kvortex.yaml"
_VLLM_PORT: Final = 8000


class ServeCommand(TakesVllmOptions):
    """Takes vLLM's options out before click sees them: click would split `-tp` and take `-cc` for `-c c`."""

    def own_arguments(self, ctx: Any, args: list[str]) -> list[str]:
        before = args[: args.index("--")] if "--" in args else args
        if "--help" in before or "-h" in before:
            return ["--help"]
        from kvortex.config.arguments import split_arguments

        arguments = split_arguments(args)
        ctx.meta[_ARGUMENTS] = arguments
        return arguments.own


def serve(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="Model to serve: a Hub name or a directory. Optional if the file names it."),
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
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print every value with its source, and the vllm serve line; start nothing."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print that as JSON.")] = False,
) -> None:
    """Serve a model with vLLM, keeping idle conversations' KV cache in host RAM.

    Every option of `vllm serve` is accepted as well, here or as a key of the file; what follows -- goes to
    vLLM as it stands. Values come from the command line, then KVORTEX_* variables, then the file, then this
    machine, then defaults.

    kv_cache.ram_cache_size is for the whole server, split over its GPUs. It is not vLLM's --cpu-offload-gb,
    which moves weights, not KV.

    Example: kvortex serve meta-llama/Llama-3.3-70B-Instruct -tp 2 --set kv_cache.ram_cache_size=128GB
    """
    from kvortex.config.resolve import CommandLine
    from kvortex.errors import UsageError

    if as_json and not dry_run:
        raise UsageError("--json goes with --dry-run", hint="kvortex serve ... --dry-run --json")
    arguments = ctx.meta[_ARGUMENTS]
    command_line = CommandLine(model, config, tuple(sets or ()), tuple(arguments.vllm), arguments.untouched)
    if dry_run:
        _show(command_line, os.environ, as_json=as_json)
    else:
        _start(command_line, os.environ)


def _show(command_line: CommandLine, environment: Mapping[str, str], *, as_json: bool) -> None:
    """Prints what would be served; what this machine lacks for it is a warning, so it works on a laptop."""
    from kvortex.config.checks import allocator_problem, cautions, problems
    from kvortex.config.resolve import resolve
    from kvortex.config.vllm_install import installed_vllm, required_vllm
    from kvortex.errors import UnfitError
    from kvortex.model_files import require_path
    from kvortex_cli.console import report
    from kvortex_cli.resolved_view import print_json, print_table

    install = installed_vllm()
    machine = _machine(install)
    resolved = resolve(command_line, environment, machine)
    assert resolved.model is not None
    require_path(resolved.model.value)
    _note_unused_file(command_line, environment)
    try:
        required_vllm()
    except UnfitError as unfit:
        report("warning", unfit.message, unfit.hint)
    found = (allocator_problem(resolved, environment), *problems(resolved, machine, install), *cautions(resolved))
    for problem in filter(None, found):
        report("warning", problem.message, problem.hint)
    (print_json if as_json else print_table)(resolved, environment)


def _start(command_line: CommandLine, environment: Mapping[str, str]) -> NoReturn:
    """Checks what would fail late, then becomes the server."""
    from kvortex.config.checks import allocator_problem, cautions, find_model, problems, shared_memory_problem
    from kvortex.config.command_line import vllm_command
    from kvortex.config.resolve import resolve
    from kvortex.config.vllm_install import installed_vllm, required_vllm
    from kvortex.hardware.memory import read_shared_memory
    from kvortex.model_files import require_path
    from kvortex_cli.console import report

    machine = _machine(installed_vllm())
    resolved = resolve(command_line, environment, machine)
    assert resolved.model is not None
    require_path(resolved.model.value)
    _note_unused_file(command_line, environment)
    install = required_vllm()
    command = vllm_command(resolved, environment)
    _check_port(resolved)
    _remove_leftovers(environment)
    shm = read_shared_memory()
    early = (
        allocator_problem(resolved, environment),
        shared_memory_problem(resolved, install, shm.free_bytes if shm is not None else None, environment),
        *problems(resolved, machine, install),
    )
    for problem in filter(None, early):
        raise problem
    # Last: it may ask the Hub.
    for problem in problems(resolved, machine, install, find_model(resolved, environment)):
        raise problem
    for caution in cautions(resolved):
        report("warning", caution.message, caution.hint)
    report("kvortex", f"serving {resolved.model.value} {_in_short(resolved, install)}")
    sys.stdout.flush()
    sys.stderr.flush()
    # The same process id: signals reach vLLM itself, and no parent is left that could die alone.
    arguments = [sys.executable, "-m", _SERVER_MODULE, *command.server_arguments]
    os.execve(sys.executable, arguments, {**environment, **command.env})


def _remove_leftovers(environment: Mapping[str, str]) -> None:
    from kvortex.leftovers import remove_leftovers
    from kvortex.sizes import format_bytes
    from kvortex_cli.console import report

    removed = remove_leftovers(environment)
    if removed.shared_bytes:
        held = format_bytes(removed.shared_bytes)
        report("note", f"removed {held} of shared memory that a killed vLLM server had left in /dev/shm")


def _machine(install: VllmInstall | None) -> MachineFacts:
    from kvortex.config.machine import this_machine

    return this_machine(with_gpus=install is None or not install.is_cpu_build)


def _check_port(resolved: ResolvedConfig) -> None:
    from kvortex.config.listen import check_port_is_free

    if resolved.vllm_value("uds", None) is None and not resolved.vllm_value("headless", False):
        check_port_is_free(resolved.vllm_value("host", None), resolved.vllm_value("port", _VLLM_PORT))


def _in_short(resolved: ResolvedConfig, install: VllmInstall) -> str:
    from kvortex_cli.resolved_view import ram_in_words

    cache = f"RAM cache {ram_in_words(resolved)}" if resolved.uses_kvortex else "no offload"
    return f"on vLLM {install.version}, {cache}"


def _note_unused_file(command_line: CommandLine, environment: Mapping[str, str]) -> None:
    from kvortex.config.layers import CONFIG_VARIABLE
    from kvortex_cli.console import report

    named = command_line.config is not None or CONFIG_VARIABLE in environment
    if not named and Path(_USUAL_FILE).is_file():
        report("note", f"{_USUAL_FILE} is here and not used", f"--config {_USUAL_FILE} uses it")
