"""Values of vLLM's options: read from a file, from text or from a command line; written to a command line.

    kind          value in Python
    VALUE         int, float, str, list or dict by its type; Dotted for `--compilation-config.mode 3`
    OPTIONAL      True, False or text
    LIST, APPEND  tuple of texts
    FLAG, SWITCH  bool

None is "vLLM's own default, whatever a lower source says".
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Final

from kvortex.config.vllm_options import Kind, ValueType, VllmOption
from kvortex.config.yaml_file import Entry
from kvortex.sizes import BadValueError, describe

_MOST_DIGITS = 40
_WITH_LETTER: Final = re.compile(r"([0-9]+)(\.[0-9]+)?([kKmMgGtT])")
_WANTED = {
    ValueType.INT: "a whole number",
    ValueType.FLOAT: "a number",
    ValueType.COUNT: "a whole number, or one such as 32k",
    ValueType.COUNT_OR_AUTO: "a whole number, one such as 32k, or auto",
    ValueType.STR: "text",
    ValueType.ANY: "text",
    ValueType.JSON: "a mapping",
}


@dataclass(frozen=True, slots=True)
class Dotted:
    """Parts of a JSON option, as vLLM takes them: `--compilation-config.mode 3` is `(("mode", "3"),)`."""

    parts: tuple[tuple[str, str], ...]


def from_entry(option: VllmOption, entry: Entry) -> Any:
    """A value from a YAML file. Raises BadValueError, which does not repeat the value: it may be a secret."""
    value = entry.value
    if value is None:
        return None
    if option.kind in (Kind.FLAG, Kind.SWITCH):
        if not isinstance(value, bool):
            raise BadValueError(f"takes true or false, not {_named(entry)}")
        return value
    if option.kind is Kind.OPTIONAL and isinstance(value, bool):
        return value
    if option.kind in (Kind.LIST, Kind.APPEND):
        return _texts(option, entry)
    return _single(option, entry)


def _texts(option: VllmOption, entry: Entry) -> tuple[str, ...]:
    items, values = (entry.items, entry.value) if isinstance(entry.value, list) else ((entry.text,), [entry.value])
    texts = tuple(text for text in items or () if text is not None)
    if not texts or any(isinstance(value, bool) or value is None for value in values):
        raise BadValueError(f"takes a list of texts, not {_named(entry)}", hint="write [a, b]; null leaves it out")
    if option.type is ValueType.INT:
        for text in texts:
            _number(text, int, option)
    if any(text.startswith("-") for text in texts):
        raise BadValueError("takes no text that begins with a dash: vLLM would read it as an option")
    return texts


def _single(option: VllmOption, entry: Entry) -> Any:
    value = entry.value
    if option.type is ValueType.JSON:
        return value
    if isinstance(value, list | dict) and option.type is ValueType.ANY:
        return value
    if isinstance(value, bool | list | dict):
        hint = "put it in quotes" if isinstance(value, bool) and option.type is ValueType.STR else None
        raise BadValueError(f"takes {_WANTED[option.type]}, not {_named(entry)}", hint=hint)
    assert entry.text is not None, option
    return from_text(option, entry.text)


def _named(entry: Entry) -> str:
    if isinstance(entry.value, bool) and entry.text is not None and entry.text.lower() != describe(entry.value):
        return f"{entry.text}, which YAML reads as {describe(entry.value)}"
    return "text" if isinstance(entry.value, str) else describe(entry.value)


def from_text(option: VllmOption, text: str) -> Any:
    """A single value from a command line or the environment; raises BadValueError."""
    if option.type is ValueType.INT:
        return _number(text, int, option)
    if option.type is ValueType.FLOAT:
        return _number(text, float, option)
    if option.type in (ValueType.COUNT, ValueType.COUNT_OR_AUTO):
        return _count(text.strip(), option)
    if option.type is ValueType.JSON and text.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(text)
        except RecursionError:
            raise BadValueError("is nested too deep") from None
        except ValueError as error:
            raise BadValueError(f"is not JSON: {error}") from None
    return text


def _number(text: str, kind: type[int] | type[float], option: VllmOption) -> float:
    try:
        number = kind(text)
        is_finite = math.isfinite(number)
    except (ValueError, OverflowError):
        number, is_finite = math.nan, False
    if not is_finite or "_" in text:
        raise BadValueError(f"takes {_WANTED[option.type]}, not {describe(text)}")
    return number


def _count(text: str, option: VllmOption) -> int | str:
    """As vLLM's `human_readable_int` reads it; what is not plain digits stays text, which vLLM says itself."""
    if len(text) <= _MOST_DIGITS:
        if re.fullmatch(r"[0-9]+", text):
            return int(text)
        if re.fullmatch(r"[+-][0-9]+", text) or (option.type is ValueType.COUNT_OR_AUTO and text.lower() == "auto"):
            return text
        match = _WITH_LETTER.fullmatch(text)
        if match is not None:
            number, fraction, letter = match.groups()
            if fraction is None or letter.islower():
                return text
            hint = f"{letter} counts in 1024s; {number}{fraction}{letter.lower()} counts in 1000s"
            raise BadValueError(f"takes no fraction before {letter}, as in {text!r}", hint=hint)
    hint = "k, m, g and t count in 1000s, K, M, G and T in 1024s"
    raise BadValueError(f"takes {_WANTED[option.type]}, not {describe(text)}", hint=hint)


def to_argv(option: VllmOption, value: Any) -> list[str]:
    """The arguments that give vLLM this value; none for its own default."""
    match value:
        case None:
            return []
        case bool() if option.kind is Kind.SWITCH:
            return [option.flag if value else option.no_flag]
        case bool() if option.kind in (Kind.FLAG, Kind.OPTIONAL):
            return [option.flag] if value else []
        case tuple() if option.kind is Kind.LIST:
            return [option.flag, *value]
        case tuple():
            return [argument for text in value for argument in _with_value(option.flag, text)]
        case Dotted():
            return [argument for key, text in value.parts for argument in _with_value(f"{option.flag}.{key}", text)]
        case str():
            return _with_value(option.flag, value)
        case _:
            return _with_value(option.flag, json.dumps(value))


def _with_value(flag: str, text: str) -> list[str]:
    # After a blank, argparse takes text that begins with a dash for an option.
    return [f"{flag}={text}"] if text.startswith("-") else [flag, text]


def as_data(value: Any) -> Any:
    """The value for JSON output."""
    if isinstance(value, Dotted):
        return {f".{key}": text for key, text in value.parts}
    return list(value) if isinstance(value, tuple) else value
