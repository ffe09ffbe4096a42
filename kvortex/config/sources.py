"""Where a value comes from, and what one source says: a layer.

command line  >  KVORTEX_* environment  >  YAML file  >  what the hardware suggests  >  default
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from kvortex.config.names import nearest
from kvortex.config.settings import KV_CACHE_KEYS, did_you_mean
from kvortex.config.vllm_options import VllmOption, vllm_options
from kvortex.errors import ConfigError, Place
from kvortex.sizes import BadValueError

SECTION: Final = "kv_cache"
_NOT_FOR_KVORTEX: Final = {
    "config": "KVortex reads one file, named by --config; put what the other file says into it",
    "model_tag": 'write "model"',
}


class SourceKind(Enum):
    """Highest first."""

    COMMAND_LINE = "command line"
    ENVIRONMENT = "environment"
    FILE = "file"
    HARDWARE = "hardware"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Source:
    """Where one value stands; as text `kvortex.yaml:8`, `--port`, `KVORTEX_NUM_STREAMS`, `default`."""

    kind: SourceKind
    place: Place

    def __str__(self) -> str:
        return str(self.place)


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and its source.

    Attributes:
        written: as it is spelled there, where that is known: YAML reads `yes` as true.
    """

    value: Any
    source: Source
    written: str | None = None


@dataclass(slots=True)
class Layer:
    """What one source says: `kv_cache` values as written, vLLM's as its options read them."""

    kind: SourceKind
    kv_cache: dict[str, Setting] = field(default_factory=dict)
    vllm: dict[str, Setting] = field(default_factory=dict)

    def put_kv_cache(self, key: str, value: Any, place: Place, written: str | None = None) -> None:
        self._put(self.kv_cache, key, value, place, written)

    def put_vllm(self, option: VllmOption, read: Callable[[], Any], place: Place) -> None:
        """Puts what `read` returns; its BadValueError becomes a ConfigError at the place."""
        if option.name in _NOT_FOR_KVORTEX:
            raise ConfigError(place, f'"{option.name}" is not for here', hint=_NOT_FOR_KVORTEX[option.name])
        try:
            self._put(self.vllm, option.name, read(), place)
        except BadValueError as bad:
            raise ConfigError(place, f"{option.name} {bad.message}", hint=bad.hint) from None

    def _put(self, into: dict[str, Setting], name: str, value: Any, place: Place, written: str | None = None) -> None:
        if name in into:
            first = into[name].source.place
            where = "" if first == place else f", first at {first}"
            raise ConfigError(place, f'"{name}" is there twice{where}', hint="keep one of the two")
        into[name] = Setting(value, Source(self.kind, place), written)


def find_top_level(key: str, place: Place, *, children: tuple[str, ...] = ()) -> VllmOption:
    """The vLLM option of a top-level key.

    Args:
        children: the keys below it, if it is a section.

    Raises:
        ConfigError: the key belongs under `kv_cache`, or nowhere.
    """
    options = vllm_options()
    if key in KV_CACHE_KEYS:
        raise ConfigError(place, f'"{key}" belongs under {SECTION}', hint=f"move it under `{SECTION}:`")
    option = options.find(key)
    if option is not None:
        return option
    negated = options.find_negation(key)
    if negated is not None:
        raise ConfigError(place, f'unknown key "{key}"', hint=f"write {negated.name}: false")
    close = nearest(key, (SECTION, *options.by_name, *KV_CACHE_KEYS))
    misplaced = [child for child in children if child in KV_CACHE_KEYS]
    if misplaced and close != SECTION:
        hint = f'"{misplaced[0]}" belongs under {SECTION}'
    elif close in KV_CACHE_KEYS:
        hint = f'did you mean "{close}", under {SECTION}?'
    else:
        hint = f'did you mean "{close}"?' if close else f"the keys are {SECTION}, model and vllm serve's options"
    raise ConfigError(place, f'unknown key "{key}"', hint=hint)


def find_kv_cache(key: str, place: Place) -> str:
    """Checks a key under `kv_cache`; raises ConfigError if it belongs at the top level, or nowhere."""
    if key in KV_CACHE_KEYS:
        return key
    option = vllm_options().find(key)
    close = nearest(key, KV_CACHE_KEYS)
    if option is not None and option.name not in KV_CACHE_KEYS:
        raise ConfigError(
            place,
            f'"{key}" belongs at the top level, not under {SECTION}',
            hint=f"move it out of `{SECTION}:`",
        )
    hint = did_you_mean(close, KV_CACHE_KEYS)
    raise ConfigError(place, f'unknown key "{key}" under {SECTION}', hint=hint)
