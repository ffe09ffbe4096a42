"""The options of `vllm serve`, over the supported versions, without importing vLLM.

The table, vllm_options.json, is made from vLLM's own argument parser. It is there for a nearest name and an
early message; the parser of the vLLM that is started has the last word.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import resources
from typing import Any


class Kind(Enum):
    """How an option takes its value on a command line."""

    VALUE = "value"
    """`--port 8000`"""
    OPTIONAL = "optional"
    """`--hf-token`, `--hf-token TOKEN`"""
    LIST = "list"
    """`--served-model-name a b`"""
    APPEND = "append"
    """`--middleware a --middleware b`"""
    FLAG = "flag"
    """`--headless`, no way to say no"""
    SWITCH = "switch"
    """`--enforce-eager`, `--no-enforce-eager`"""


class ValueType(Enum):
    """What vLLM reads the value as."""

    INT = "int"
    FLOAT = "float"
    COUNT = "count"
    """A whole number, or one with a letter: `32k` is 32,000, `32K` is 32,768."""
    COUNT_OR_AUTO = "count_or_auto"
    """And `auto`, which is -1."""
    STR = "str"
    JSON = "json"
    BOOL = "bool"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class VllmOption:
    """One option of `vllm serve`.

    Attributes:
        name: with underscores, as it stands in a configuration file.
        since, until: first and last minor version that has it, where not all of the table's versions do.
        aliases, negations: further names, with underscores; a negation sets a switch to false.
        short: `-tp`.
    """

    name: str
    kind: Kind
    type: ValueType
    since: str | None
    until: str | None
    aliases: tuple[str, ...]
    negations: tuple[str, ...]
    short: tuple[str, ...]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def no_flag(self) -> str:
        assert self.kind is Kind.SWITCH, self
        return "--no-" + self.name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """All options; lookups take dashes and underscores alike, as vLLM does."""

    versions: tuple[str, ...]
    by_name: Mapping[str, VllmOption]
    _keys: Mapping[str, VllmOption]
    _negations: Mapping[str, VllmOption]
    _short: Mapping[str, VllmOption]

    def __iter__(self) -> Iterator[VllmOption]:
        return iter(self.by_name.values())

    def find(self, key: str) -> VllmOption | None:
        """The option of a name or an alias, as a configuration file spells it."""
        return self._keys.get(key.replace("-", "_"))

    def find_negation(self, key: str) -> VllmOption | None:
        """The switch that `no_enforce_eager` or `disable_log_requests` sets to false."""
        return self._negations.get(key.replace("-", "_"))

    def find_short(self, argument: str) -> VllmOption | None:
        """The option of `-tp`."""
        return self._short.get(argument)

    def missing_in(self, version: str, names: Iterable[str]) -> list[VllmOption]:
        """Those of the named options that vLLM `version` ("0.26") lacks; none if it is not listed."""
        if version not in self.versions:
            return []
        at = self.versions.index(version)
        return [
            option
            for option in (self.by_name[name] for name in names)
            if (option.since is not None and at < self.versions.index(option.since))
            or (option.until is not None and at > self.versions.index(option.until))
        ]


@cache
def vllm_options() -> VllmOptions:
    """The table, read once."""
    table = json.loads(resources.files("kvortex.config").joinpath("vllm_options.json").read_text("utf-8"))
    options = [_option(name, entry) for name, entry in table["options"].items()]
    switches = [option for option in options if option.kind is Kind.SWITCH]
    return VllmOptions(
        versions=tuple(table["versions"]),
        by_name={option.name: option for option in options},
        _keys={key: option for option in options for key in (option.name, *option.aliases)},
        _negations={key: option for option in switches for key in (f"no_{option.name}", *option.negations)},
        _short={short: option for option in options for short in option.short},
    )


def _option(name: str, entry: Mapping[str, Any]) -> VllmOption:
    return VllmOption(
        name=name,
        kind=Kind(entry["kind"]),
        type=ValueType(entry["type"]),
        since=entry.get("since"),
        until=entry.get("until"),
        aliases=tuple(entry.get("aliases", ())),
        negations=tuple(entry.get("negations", ())),
        short=tuple(entry.get("short", ())),
    )
