"""The `vllm serve` command that does what a resolved configuration says."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import Any, Final

from kvortex.config.option_values import Dotted, to_argv
from kvortex.config.redaction import HIDDEN, SECRET_OPTIONS, redact
from kvortex.config.resolve import ResolvedConfig
from kvortex.config.vllm_options import vllm_options
from kvortex.errors import ConfigError, Place

CONNECTOR: Final = "KVortexConnector"
OWN_PLUGINS: Final = ("kvortex", "kvortex_routes")
PLUGINS_VARIABLE: Final = "VLLM_PLUGINS"
# The groups from which vLLM loads everything while VLLM_PLUGINS is unset.
_PLUGIN_GROUPS: Final = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)
# Fetches LoRA adapters from the Hub once VLLM_PLUGINS names it, and only then: that is the user's to decide.
_ONLY_BY_THE_USER: Final = frozenset({"lora_hf_hub_resolver"})


@dataclass(frozen=True, slots=True)
class VllmCommand:
    """A command to run.

    Attributes:
        argv: from "vllm", "serve", MODEL on.
        env: variables to set beside those that are there.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]

    @property
    def server_arguments(self) -> tuple[str, ...]:
        """What follows `vllm serve`."""
        return self.argv[2:]

    def as_line(self) -> str:
        """One line for a shell."""
        assignments = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*assignments, shlex.join(self.argv)])


def vllm_command(resolved: ResolvedConfig, environment: Mapping[str, str], *, show_secrets: bool = True) -> VllmCommand:
    """The command that serves as resolved.

    Args:
        environment: where the user's own VLLM_PLUGINS is looked for.
        show_secrets: False puts *** for each secret: for printing.

    Raises:
        ConfigError: several API keys, which vLLM takes on its command line only.
    """
    assert resolved.model is not None
    argv = ["vllm", "serve", _shown("model", resolved.model.value, show_secrets)]
    env: dict[str, str] = {}
    if resolved.uses_kvortex:
        env[PLUGINS_VARIABLE] = _plugins(environment.get(PLUGINS_VARIABLE))
    for name, setting in resolved.vllm.items():
        if name in SECRET_OPTIONS and not isinstance(setting.value, bool | None):
            secret = _one_secret(name, setting.value, setting.source.place)
            env[SECRET_OPTIONS[name]] = secret if show_secrets else HIDDEN
        else:
            argv += to_argv(vllm_options().by_name[name], _shown(name, setting.value, show_secrets))
    argv += ["--block-size", str(resolved.kv_cache.block_size)]
    if resolved.uses_kvortex:
        argv += ["--kv-transfer-config", json.dumps(_kv_transfer_config(resolved))]
    return VllmCommand((*argv, *resolved.untouched), MappingProxyType(env))


def _shown(name: str, value: Any, show_secrets: bool) -> Any:
    if show_secrets:
        return value
    if isinstance(value, Dotted):
        return Dotted(tuple((key, redact(key, text)) for key, text in value.parts))
    return redact(name, value)


def _one_secret(name: str, value: Any, place: Place) -> str:
    if isinstance(value, tuple) and len(value) > 1:
        raise ConfigError(
            place,
            f"{name} takes one value: vLLM takes several on its command line only, which every user can read",
            hint="give one key, or put a proxy that checks several in front",
        )
    return str(value[0] if isinstance(value, tuple) else value)


def _kv_transfer_config(resolved: ResolvedConfig) -> dict[str, Any]:
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        # vLLM's default is to fail the request whose load failed.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": resolved.kv_cache_values,
    }


def _plugins(of_the_user: str | None) -> str:
    """The value of VLLM_PLUGINS. It shuts out what it does not name: what was loaded before is named too."""
    if of_the_user is None:
        before: Iterable[str] = (
            entry.name
            for group in _PLUGIN_GROUPS
            for entry in metadata.entry_points(group=group)
            if entry.name not in _ONLY_BY_THE_USER
        )
    else:
        before = (name for name in of_the_user.split(",") if name)
    return ",".join(dict.fromkeys([*before, *OWN_PLUGINS]))
