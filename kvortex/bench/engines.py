"""The servers to compare: one configuration, and for each engine what it changes and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from kvortex.bench.bound import PoolSize, pool_for
from kvortex.bench.server_facts import check_length
from kvortex.bench.workload import Workload
from kvortex.config.arguments import VllmArgument
from kvortex.config.checks import find_model, problems
from kvortex.config.command_line import vllm_command
from kvortex.config.machine import MachineFacts
from kvortex.config.names import nearest
from kvortex.config.redaction import SECRET_OPTIONS
from kvortex.config.resolve import CommandLine, ResolvedConfig, resolve
from kvortex.config.sources import SECTION
from kvortex.config.vllm_install import VllmInstall
from kvortex.config.vllm_options import vllm_options
from kvortex.errors import ConfigError, UnfitError, UsageError

_BACKEND: Final = f"{SECTION}.backend"
_CONNECTOR_OPTIONS: Final = ("kv_transfer_config", "kv_offloading_size", "kv_offloading_backend")
# Where a file says how to listen, that is meant for its own server, not for those of a comparison.
_LISTENING: Final = ("host", "port", "uds", "headless", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "root_path")


class Engine(StrEnum):
    """One way to serve."""

    NONE = "none"
    """vLLM without offload."""
    OFFLOADING = "offloading"
    """vLLM's OffloadingConnector."""
    SIMPLE = "simple"
    """vLLM's SimpleCPUOffloadConnector."""
    KVORTEX = "kvortex"
    BOUND = "bound"
    """vLLM without offload and with room in VRAM for every conversation: what no offload can beat."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How to start one engine.

    Attributes:
        arguments: what follows `vllm serve`; without host and port.
        environment: variables to set beside those that are there; may hold secrets.
        shown: the plain `vllm serve` line, with *** for secrets.
        api_key: that the server asks for.
        ram_bytes: host RAM for KV; 0 for an engine without.
    """

    engine: Engine
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    shown: str
    api_key: str | None
    ram_bytes: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """An engine that cannot be started here, and why."""

    engine: Engine
    reason: str


def parse_engines(text: str) -> tuple[Engine, ...]:
    """`none,kvortex`; raises UsageError for an unknown or repeated name."""
    engines: list[Engine] = []
    for name in (part.strip() for part in text.split(",")):
        if name not in list(Engine):
            close = nearest(name, Engine)
            hint = f'did you mean "{close}"?' if close else f"the engines are {', '.join(Engine)}"
            raise UsageError(f"--engines: there is no engine {name!r}", hint=hint)
        if name in engines:
            raise UsageError(f"--engines: {name} is there twice", hint="keep one of the two")
        engines.append(Engine(name))
    return tuple(engines)


def make_plans(
    engines: Sequence[Engine],
    command_line: CommandLine,
    environment: Mapping[str, str],
    machine: MachineFacts,
    install: VllmInstall,
    workload: Workload,
) -> list[Plan | Skipped]:
    """One for each engine, in their order. Asks the Hub for a model that is not on this disk.

    Raises:
        UsageError: the configuration is wrong, sets what a comparison sets, or this machine cannot serve it.
        UnfitError: the same for the machine; or there is no access to the model.
    """
    _check_not_set(command_line)
    plans: list[Plan | Skipped] = []
    configured: list[ResolvedConfig] = []
    for engine in engines:
        resolved = resolve(_command_line_of(engine, command_line), environment, machine)
        for name in _CONNECTOR_OPTIONS:
            if resolved.vllm_value(name, None) is not None:
                hint = "leave it out; --engines names the connectors to compare"
                raise ConfigError(resolved.place_of(name), f"{name} is what a comparison sets", hint=hint)
        for problem in problems(resolved, machine, install):
            raise problem
        longest = resolved.vllm_value("max_model_len", None)
        check_length(workload, longest if isinstance(longest, int) else None)
        configured.append(resolved)
        plans.append(_plan(engine, resolved, command_line, environment, machine, install, workload))
    # Last, as `kvortex serve` does: it may ask the Hub.
    files = find_model(configured[0], environment)
    for resolved in configured:
        for problem in problems(resolved, machine, install, files):
            raise problem
    return plans


def _plan(
    engine: Engine,
    resolved: ResolvedConfig,
    command_line: CommandLine,
    environment: Mapping[str, str],
    machine: MachineFacts,
    install: VllmInstall,
    workload: Workload,
) -> Plan | Skipped:
    changes: dict[str, Any] = {}
    if engine is Engine.BOUND:
        try:
            pool = pool_for(resolved, workload, machine, is_cpu_build=install.is_cpu_build)
        except UnfitError as unfit:
            return Skipped(engine, unfit.message)
        changes = _of_pool(pool)
    elif engine in (Engine.OFFLOADING, Engine.SIMPLE):
        changes = {"kv_transfer_config": _connector(engine, resolved.kv_cache.ram_cache_size)}
    if changes:
        changed = _command_line_of(engine, command_line, changes)
        resolved = resolve(changed, environment, machine)
    command = vllm_command(resolved, environment)
    has_ram = engine in (Engine.OFFLOADING, Engine.SIMPLE, Engine.KVORTEX)
    return Plan(
        engine=engine,
        arguments=command.server_arguments,
        environment=command.env,
        shown=vllm_command(resolved, environment, show_secrets=False).as_line(),
        api_key={**environment, **command.env}.get(SECRET_OPTIONS["api_key"]) or None,
        ram_bytes=resolved.kv_cache.ram_cache_size if has_ram else 0,
    )


def _connector(engine: Engine, ram_bytes: int) -> dict[str, Any]:
    extra: dict[str, Any] = {"cpu_bytes_to_use": ram_bytes}
    if engine is Engine.OFFLOADING:
        # Its default leaves answers out of RAM, and would have it compute them again at each turn.
        extra["offload_prompt_only"] = False
    names = {Engine.OFFLOADING: "OffloadingConnector", Engine.SIMPLE: "SimpleCPUOffloadConnector"}
    return {"kv_connector": names[engine], "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _of_pool(pool: PoolSize) -> dict[str, Any]:
    # A smaller number of blocks, made for the other engines, must not stand.
    return {"kv_cache_memory_bytes": pool.bytes_per_rank, "num_gpu_blocks_override": None}


def _check_not_set(command_line: CommandLine) -> None:
    for assignment in command_line.sets:
        if assignment.partition("=")[0] == _BACKEND:
            raise UsageError(f"--set {_BACKEND}: a comparison sets it", hint="name the engines with --engines")
    for argument in command_line.vllm:
        if argument.option.name in _LISTENING:
            hint = "leave it out: each server gets a free port of this machine's loopback"
            raise ConfigError(argument.place, "is not for a comparison", hint=hint)


def _command_line_of(
    engine: Engine, command_line: CommandLine, changes: Mapping[str, Any] | None = None
) -> CommandLine:
    """The command line with what this engine changes; None is vLLM's own default."""
    by_name = vllm_options().by_name
    changes = dict.fromkeys(_LISTENING) | dict(changes or {})
    kept = [argument for argument in command_line.vllm if argument.option.name not in changes]
    added = [VllmArgument(by_name[name], f"engine {engine}", value) for name, value in changes.items()]
    backend = "kvortex" if engine is Engine.KVORTEX else "none"
    return replace(command_line, sets=(*command_line.sets, f"{_BACKEND}={backend}"), vllm=(*kept, *added))
