"""Request traces in Mooncake's format: JSON lines, gzip-compressed or not.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}

`timestamp` in ms; lengths in tokens; `hash_ids` one number for each 512 tokens of the prompt and for the rest: equal
numbers mean equal prompts up to there.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from kvortex.errors import ConfigError, Place

BLOCK_TOKENS: Final = 512
_FORMAT_HINT: Final = (
    'a line is {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [number, ...]}'
)


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request.

    Attributes:
        arrival_s: since the trace's start.
        blocks: one number for each 512 tokens of the prompt, and one for what is left of it.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def load_trace(path: Path) -> list[TracedRequest]:
    """The requests of a file, in its order.

    Raises:
        ConfigError: it cannot be read, or a line is not a request; names the line.
    """
    requests: list[TracedRequest] = []
    for number, line in _lines(path):
        place = Place(str(path), number)
        if not line.strip():
            continue
        request = _request(line, place)
        if requests and request.arrival_s < requests[-1].arrival_s:
            raise ConfigError(place, "is earlier than the request before it", hint="sort the lines by timestamp")
        requests.append(request)
    if not requests:
        raise ConfigError(Place(str(path)), "holds no request", hint=_FORMAT_HINT)
    return requests


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    place = Place(str(path))
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                yield number, line
    except FileNotFoundError:
        raise ConfigError(place, "there is no such file") from None
    except UnicodeDecodeError:
        raise ConfigError(Place(str(path), number + 1), "is not UTF-8 text", hint=_FORMAT_HINT) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(place, f"is no whole gzip file: {error}") from None
    except OSError as error:
        raise ConfigError(place, f"cannot be read: {error.strerror or error}") from None


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _request(line: str, place: Place) -> TracedRequest:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(place, f"is not JSON: {error}", hint=_FORMAT_HINT) from None
    if not isinstance(entry, dict):
        raise ConfigError(place, "is not a JSON object", hint=_FORMAT_HINT)
    arrival_ms, input_tokens, output_tokens = (
        _number(entry, name, place) for name in ("timestamp", "input_length", "output_length")
    )
    blocks = entry.get("hash_ids")
    if not isinstance(blocks, list) or not all(type(block) is int and 0 <= block < 1 << 64 for block in blocks):
        raise ConfigError(place, "hash_ids is not a list of whole numbers below 2^64", hint=_FORMAT_HINT)
    least, most = input_tokens // BLOCK_TOKENS, -(-input_tokens // BLOCK_TOKENS)
    if not least <= len(blocks) <= most:
        raise ConfigError(
            place,
            f"{len(blocks)} hash_ids for {input_tokens} tokens",
            hint=f"one for each {BLOCK_TOKENS} tokens, and one for what is left",
        )
    if len(set(blocks)) < len(blocks):
        raise ConfigError(place, "a number stands twice in hash_ids", hint="a number stands for all tokens up to there")
    return TracedRequest(arrival_ms / 1000, int(input_tokens), int(output_tokens), tuple(blocks))


def _number(entry: dict[str, Any], name: str, place: Place) -> float:
    value = entry.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise ConfigError(place, f"{name} is {json.dumps(value)}, not a number from 0", hint=_FORMAT_HINT)
    if name != "timestamp" and not isinstance(value, int):
        raise ConfigError(place, f"{name} is {value}, not a whole number", hint=_FORMAT_HINT)
    return value
