"""The resolved configuration: every value with its source, from all sources in order, checked.

command line  >  KVORTEX_* environment  >  YAML file  >  what the hardware suggests  >  default
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from kvortex.config.arguments import VllmArgument
from kvortex.config.layers import CONFIG_VARIABLE, command_line_layer, environment_layer, file_layer
from kvortex.config.machine import MachineFacts
from kvortex.config.settings import (
    KV_CACHE_KEYS,
    KVCacheSettings,
    check_value,
    default_ram_cache_size,
    read_settings,
)
from kvortex.config.sources import SECTION, Layer, Setting, Source, SourceKind
from kvortex.errors import ConfigError, Place, UsageError
from kvortex.sizes import describe, format_bytes

_DEFAULT: Final = Source(SourceKind.DEFAULT, Place("default"))
_PARALLEL_SIZES: Final = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "data_parallel_size",
)
# vLLM's own default cuts running requests off at once; SIGTERM shall let them end.
_DRAIN_SECONDS: Final = 30
# Whatever moves KV in KVortex's place: these and KVortex cannot both have the connector.
_OTHER_CONNECTORS: Final = ("kv_transfer_config", "kv_offloading_size")


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What the command line of `kvortex serve` says.

    Attributes:
        model: MODEL, if given.
        config: the file of `--config`, if given.
        sets: the `key=value` of each `--set`.
        vllm: vLLM's options, read.
        untouched: what goes to vLLM as it stands.
    """

    model: str | None = None
    config: str | None = None
    sets: Sequence[str] = ()
    vllm: Sequence[VllmArgument] = ()
    untouched: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """The one configuration, immutable.

    Attributes:
        model: what to serve; None where none was named and none was required.
        kv_cache: KVortex's settings, in base units.
        sources: of each `kv_cache` key.
        vllm: vLLM's options by canonical name, without the model; None is vLLM's own default, asked for.
        untouched: arguments that go to vLLM as they stand.
    """

    model: Setting | None
    kv_cache: KVCacheSettings
    sources: Mapping[str, Source]
    vllm: Mapping[str, Setting]
    untouched: tuple[str, ...] = ()

    @property
    def kv_cache_values(self) -> dict[str, Any]:
        """The `kv_cache` values that hold, in base units; reading them again changes nothing."""
        return {**self.kv_cache.model_dump(), "offload_target": self.kv_cache.effective_offload_target}

    @property
    def uses_kvortex(self) -> bool:
        return self.kv_cache.backend == "kvortex"

    def vllm_value(self, name: str, default: Any) -> Any:
        """A vLLM option's value, or `default` where vLLM's own holds."""
        setting = self.vllm.get(name)
        return default if setting is None or setting.value is None else setting.value

    @property
    def num_ranks(self) -> int:
        """Worker processes that share `ram_cache_size`: one a GPU."""
        ranks = 1
        for name in _PARALLEL_SIZES:
            ranks *= self.vllm_value(name, 1)
        return ranks

    @property
    def ram_per_rank_bytes(self) -> int:
        return self.kv_cache.ram_cache_size // self.num_ranks

    def place_of(self, name: str) -> Place:
        """Where a value stands, for a message: a `kv_cache` key or a vLLM option."""
        if name in self.sources:
            return self.sources[name].place
        return self.vllm[name].source.place if name in self.vllm else _DEFAULT.place


def resolve(
    command_line: CommandLine,
    environment: Mapping[str, str],
    machine: MachineFacts,
    *,
    require_model: bool = True,
) -> ResolvedConfig:
    """Merges all sources and checks what can be checked without loading anything.

    Every value is checked where it stands, also one that a higher source overrides.

    Raises:
        ConfigError: an unknown, misplaced or repeated key, a bad value, a bad file; at its place.
        UsageError: no model is named anywhere.
    """
    layers = [
        command_line_layer(command_line.model, command_line.sets, command_line.vllm),
        environment_layer(environment),
    ]
    path = _config_path(command_line, environment)
    if path is not None:
        layers.append(file_layer(path))
    for layer in layers:
        _check(layer, machine)
    kv_cache, sources = _merged_kv_cache(layers, machine)
    vllm = _merged(layer.vllm for layer in reversed(layers))
    drains = Source(SourceKind.DEFAULT, Place("default: SIGTERM lets running requests end"))
    vllm.setdefault("shutdown_timeout", Setting(_DRAIN_SECONDS, drains))
    model = vllm.pop("model", None)
    _check_model(model, path, require_model)
    resolved = ResolvedConfig(model, kv_cache, sources, MappingProxyType(vllm), command_line.untouched)
    _check_conflicts(resolved)
    return resolved


def _config_path(command_line: CommandLine, environment: Mapping[str, str]) -> str | None:
    if command_line.config is not None:
        return command_line.config
    path = environment.get(CONFIG_VARIABLE)
    if path == "":
        raise ConfigError(Place(CONFIG_VARIABLE), "names no file", hint=f"unset {CONFIG_VARIABLE}")
    if path is not None and not Path(path).exists():
        # Whoever set it long ago does not know which file is meant.
        raise ConfigError(
            Place(CONFIG_VARIABLE), f"names {path}, and there is no such file", hint="correct or unset it"
        )
    return path


def _check(layer: Layer, machine: MachineFacts) -> None:
    for key, setting in layer.kv_cache.items():
        check_value(
            key,
            setting.value,
            place=setting.source.place,
            written=setting.written,
            available_ram_bytes=machine.usable_ram_bytes,
            prefix=SECTION + ".",
        )
    for name, setting in layer.vllm.items():
        value, place = setting.value, setting.source.place
        if value is None:
            continue
        if name in _PARALLEL_SIZES and value < 1:
            raise ConfigError(place, f"{name} takes a whole number of at least 1, not {value}")
        if name == "port" and not 1 <= value <= 65535:
            raise ConfigError(place, f"port takes a number from 1 to 65535, not {value}")
        if name == "gpu_memory_utilization" and not 0 < value <= 1:
            hint = "it is a share: 0.9 is 90 % of each GPU's memory"
            raise ConfigError(place, f"{name} takes a number above 0 and up to 1, not {value}", hint=hint)


def _merged(layers_from_lowest: Any) -> dict[str, Setting]:
    merged: dict[str, Setting] = {}
    for settings in layers_from_lowest:
        merged.update(settings)
    return merged


def _merged_kv_cache(layers: Sequence[Layer], machine: MachineFacts) -> tuple[KVCacheSettings, Mapping[str, Source]]:
    given = _merged(layer.kv_cache for layer in reversed(layers))
    if "ram_cache_size" not in given:
        suggested = default_ram_cache_size(machine.usable_ram_bytes)
        source = Place(f"this machine: half of {format_bytes(machine.usable_ram_bytes)} usable RAM, at most 256 GB")
        given["ram_cache_size"] = Setting(suggested, Source(SourceKind.HARDWARE, source))
    sources = {key: given[key].source if key in given else _DEFAULT for key in KV_CACHE_KEYS}
    settings = read_settings(
        {key: setting.value for key, setting in given.items()},
        place_of=lambda key: sources[key].place,
        available_ram_bytes=machine.usable_ram_bytes,
        prefix=SECTION + ".",
    )
    if settings.effective_offload_target < settings.offload_target:
        lowered = Place("default, lowered to offload_threshold")
        sources["offload_target"] = Source(SourceKind.DEFAULT, lowered)
    return settings, MappingProxyType(sources)


def _check_model(model: Setting | None, path: str | None, required: bool) -> None:
    if model is not None and (not isinstance(model.value, str) or model.value.strip() == ""):
        raise ConfigError(model.source.place, f"model takes a name or a path, not {describe(model.value)}")
    if model is None and required:
        where = f"`model:` in {path}" if path else "`model:` in the file of --config"
        raise UsageError("no model is named", hint=f"give MODEL, before list options, or {where}")


def _check_conflicts(resolved: ResolvedConfig) -> None:
    if not resolved.uses_kvortex:
        return
    for name in _OTHER_CONNECTORS:
        if resolved.vllm_value(name, None) is not None:
            raise ConfigError(
                resolved.place_of(name),
                f"{name} is KVortex's to set",
                hint=f'leave it out and use {SECTION}; for another connector set {SECTION}.backend to "none"',
            )
    if resolved.vllm_value("enable_prefix_caching", True) is False:
        raise ConfigError(
            resolved.place_of("enable_prefix_caching"),
            "KVortex finds blocks by vLLM's prefix hashes, and this turns prefix caching off",
            hint=f'leave it out, or set {SECTION}.backend to "none"',
        )
