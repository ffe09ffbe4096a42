"""Reads each source of the configuration into a layer: the command line, the environment, the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from kvortex.config.arguments import VllmArgument
from kvortex.config.names import nearest
from kvortex.config.option_values import from_entry, from_text
from kvortex.config.settings import KV_CACHE_KEYS
from kvortex.config.sources import SECTION, Layer, SourceKind, find_kv_cache, find_top_level
from kvortex.config.vllm_options import Kind, ValueType, VllmOption, vllm_options
from kvortex.config.yaml_file import load_yaml_file, parse_yaml_value
from kvortex.errors import ConfigError, Place, UsageError
from kvortex.sizes import describe

ENVIRONMENT_PREFIX: Final = "KVORTEX_"
CONFIG_VARIABLE: Final = "KVORTEX_CONFIG"


def file_layer(path: str) -> Layer:
    """What the YAML file says. Raises ConfigError with file and line."""
    layer = Layer(SourceKind.FILE)
    for key, entry in load_yaml_file(path).items():
        place = Place(path, entry.line)
        if key == SECTION:
            if entry.children is None:
                message = f"{SECTION} takes keys and values, not {describe(entry.value)}"
                raise ConfigError(place, message, hint=f"leave {SECTION} out for its defaults")
            for name, child in entry.children.items():
                below = Place(path, child.line)
                layer.put_kv_cache(find_kv_cache(name, below), child.value, below, child.text)
            continue
        option = find_top_level(key, place, children=tuple(entry.children or ()))
        layer.put_vllm(option, partial(from_entry, option, entry), place)
    return layer


def command_line_layer(model: str | None, sets: Sequence[str], vllm: Sequence[VllmArgument]) -> Layer:
    """What the command line says: MODEL, each `--set`, vLLM's options. `--block-size` is `kv_cache`'s."""
    layer = Layer(SourceKind.COMMAND_LINE)
    if model is not None:
        layer.put_vllm(vllm_options().by_name["model"], lambda: model, Place("MODEL"))
    for assignment in sets:
        key, equals, text = assignment.partition("=")
        place = Place(f"--set {key}")
        if not equals:
            raise UsageError(f"--set {key}: no value", hint=f"write --set {key}=VALUE")
        _put_text(layer, key, text, place)
    for argument in vllm:
        if argument.option.name in KV_CACHE_KEYS:
            layer.put_kv_cache(argument.option.name, argument.value, argument.place)
        else:
            layer.put_vllm(argument.option, partial(_given, argument.value), argument.place)
    return layer


def _given(value: Any) -> Any:
    return value


def environment_layer(environment: Mapping[str, str]) -> Layer:
    """What `KVORTEX_*` says: `KVORTEX_NUM_STREAMS` is `kv_cache.num_streams`, `KVORTEX_DTYPE` is `dtype`."""
    layer = Layer(SourceKind.ENVIRONMENT)
    for variable in sorted(environment):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        key = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if key not in KV_CACHE_KEYS and vllm_options().find(key) is None:
            close = nearest(key, ("config", *KV_CACHE_KEYS, *vllm_options().by_name))
            hint = f"did you mean {ENVIRONMENT_PREFIX}{close.upper()}?" if close else f"unset {variable}"
            raise ConfigError(Place(variable), "there is no such setting", hint=hint)
        path = f"{SECTION}.{key}" if key in KV_CACHE_KEYS else key
        _put_text(layer, path, environment[variable], Place(variable))
    return layer


def _put_text(layer: Layer, path: str, text: str, place: Place) -> None:
    section, dot, key = path.partition(".")
    if dot and section == SECTION:
        layer.put_kv_cache(find_kv_cache(key, place), parse_yaml_value(text, place).value, place, text.strip())
        return
    if dot:
        hint = f'did you mean "{SECTION}.{key}"?' if nearest(section, [SECTION]) else None
        raise ConfigError(place, f'unknown section "{section}"', hint=hint)
    option = find_top_level(path, place)
    layer.put_vllm(option, partial(_value_of_text, option, text, place), place)


def _value_of_text(option: VllmOption, text: str, place: Place) -> Any:
    """A vLLM option's value in one text. Plain text stays as it is: a chat template is not YAML."""
    if text in ("null", "~"):
        return None
    if option.kind in (Kind.FLAG, Kind.SWITCH, Kind.LIST, Kind.APPEND):
        return from_entry(option, parse_yaml_value(text, place))
    if option.type is ValueType.JSON and text.lstrip()[:1] in ("{", "["):
        return from_entry(option, parse_yaml_value(text, place))
    if option.kind is Kind.OPTIONAL and text in ("true", "false"):
        return text == "true"
    return from_text(option, text)
