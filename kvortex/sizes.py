"""Sizes and durations as people write them, in bytes and seconds.

One rule for every command and file:

    128GB   128 GB   128gb      128 * 10^9 bytes
    128GiB  128 GiB  128gib     128 * 2^30 bytes
    137438953472                bytes
    50%                         of the RAM this process may use
    30s  500ms  2m  1h  30      seconds

What others read in two ways is refused: `128G` (10^9 or 2^30?), `128Gb` (bits), `12,8GB`, `1e3MB`.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Final

from kvortex.errors import UsageError

_DECIMAL: Final = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BINARY: Final = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_USUAL_SPELLINGS: Final = {**_DECIMAL, **_BINARY, "kB": 10**3}
_UNITS: Final = _USUAL_SPELLINGS | {unit.lower(): size for unit, size in _USUAL_SPELLINGS.items()}
_SECONDS: Final = {
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "": Fraction(1),
}
# No quantity has more digits, and some hundred are more than a float takes.
_NUMBER_AND_UNIT: Final = re.compile(r"([0-9]{1,40}(?:\.[0-9]{1,40})?) ?([A-Za-z%]*)")
_MAX_BYTES: Final = 2**63 - 1
MOST_BITS: Final = 64
"""Of a whole number in a configuration; Python refuses to write out one of several thousand digits."""

_MAX_SECONDS: Final = 365 * 24 * 3600
_SIZE_HINT: Final = "a size is a number and a unit, such as 128GB (10^9 bytes) or 128GiB (2^30 bytes)"
_DURATION_HINT: Final = "a duration is a number and a unit, such as 30s, 500ms, 2m or 1h"


class BadValueError(UsageError, ValueError):
    """A value cannot be read as what it should be. A ValueError too, so that pydantic names its key."""


def describe(value: object) -> str:
    """What a value is, in the words of a configuration file: `the text '0.85'`, `true`, `null`, `a list`."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return f"the text {value!r}"
        case list() | tuple():
            return "a list"
        case dict():
            return "a mapping"
        case int() if value.bit_length() > MOST_BITS:
            return f"a number of more than {MOST_BITS} bits"
        case _:
            return f"{value}"


def parse_size(value: object, *, of: int | None = None) -> int:
    """Bytes, more than zero; a fraction of a byte is dropped.

    Args:
        value: a whole number of bytes, or text: a number and B, KB..PB (powers of 1000) or KiB..PiB (powers
            of 1024), in the usual spelling or all lower-case, at most one blank between.
        of: what `%` is of, in bytes; without it `%` is refused.

    Raises:
        BadValueError: for everything else, naming what would be right.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise BadValueError(f"{describe(value)} is not a size", hint=_SIZE_HINT)
    num_bytes = value if isinstance(value, int) else _size_of_text(value.strip(), of)
    if num_bytes.bit_length() > MOST_BITS:
        raise BadValueError(f"{describe(value)} is more memory than any machine has", hint=_SIZE_HINT)
    if num_bytes <= 0:
        raise BadValueError(f"a size of {value} is not more than zero bytes", hint=_SIZE_HINT)
    if num_bytes > _MAX_BYTES:
        raise BadValueError(f"{value} is more memory than any machine has", hint=_SIZE_HINT)
    return num_bytes


def _size_of_text(text: str, of: int | None) -> int:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None:
        raise BadValueError(f"{text!r} is not a size", hint=_size_hint(text))
    number, unit = Fraction(match[1]), match[2]
    if unit == "%":
        if of is None:
            raise BadValueError(f"{text!r}: a share has no meaning here", hint=_SIZE_HINT)
        if number > 100:
            raise BadValueError(f"{text!r} is more than all of the RAM", hint="a share is at most 100%")
        return math.floor(number * of / 100)
    if unit == "":
        if number.denominator != 1:
            raise BadValueError(f"{text!r}: a bare number is bytes, and has no fraction", hint=_SIZE_HINT)
        return int(number)
    if unit not in _UNITS:
        raise BadValueError(f"{text!r} is not a size: {_why_not_a_unit(unit)}", hint=_unit_hint(match[1], unit))
    return math.floor(number * _UNITS[unit])


def _why_not_a_unit(unit: str) -> str:
    if unit.endswith("b") and unit[:-1] + "B" in _USUAL_SPELLINGS:
        return f"{unit} is bits"
    if unit.upper() + "B" in _DECIMAL or unit.lower() + "b" in _UNITS:
        return f"{unit} is read as 1000s by some and as 1024s by others"
    return f"there is no unit {unit!r}"


def _unit_hint(number: str, unit: str) -> str:
    letter = unit[:1].upper()
    if letter + "B" in _DECIMAL and letter != "B":
        return f"write {number}{letter}B (powers of 1000) or {number}{letter}iB (powers of 1024)"
    return _SIZE_HINT


def _size_hint(text: str) -> str:
    if re.fullmatch(r"[0-9]+,[0-9]+ ?[A-Za-z]*", text):
        return f"write {text.replace(',', '.')} for a fraction, and no separator between thousands"
    return _SIZE_HINT


def parse_duration(value: object) -> float:
    """Seconds, zero or more and at most a year.

    Args:
        value: a number of seconds, or text: a number and ms, s, m or h; without a unit it is seconds.

    Raises:
        BadValueError: for everything else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise BadValueError(f"{describe(value)} is not a duration", hint=_DURATION_HINT)
    if isinstance(value, str):
        match = _NUMBER_AND_UNIT.fullmatch(value.strip())
        if match is None or match[2] not in _SECONDS:
            raise BadValueError(f"{value!r} is not a duration", hint=_DURATION_HINT)
        seconds = float(Fraction(match[1]) * _SECONDS[match[2]])
    elif isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise BadValueError(f"{describe(value)} is not a duration between 0 and a year", hint=_DURATION_HINT)
    else:
        seconds = float(value)
    if not 0 <= seconds <= _MAX_SECONDS:
        raise BadValueError(f"{value} is not a duration between 0 and a year", hint=_DURATION_HINT)
    return seconds


def format_bytes(num_bytes: int) -> str:
    """A size to read: four digits and a unit of a power of 1000, such as `128 GB` or `137.4 GB`.

    What it prints, `parse_size` reads back, to those four digits.
    """
    sign = "-" if num_bytes < 0 else ""
    units = list(_DECIMAL.items())
    for index, (unit, size) in enumerate(units):
        shown = f"{abs(num_bytes) / size:.4g}" if size > 1 else str(abs(num_bytes))
        if float(shown) < 1000 or index == len(units) - 1:
            return f"{sign}{shown} {unit}"
    raise AssertionError(num_bytes)


def counted(number: int, noun: str) -> str:
    """`1 request`, `1,024 requests`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_seconds(seconds: float) -> str:
    """A duration to read: `30 s`, `0.5 s`."""
    return f"{seconds:g} s"
