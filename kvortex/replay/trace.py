"""Request traces in Mooncake's format: JSON lines, gzip-compressed or not.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}

`timestamp` in ms; lengths in tokens; `hash_ids` one number for each 512 tokens of the prompt and for the rest: equal
numbers mean equal prompts up to there.

A server's own log (`kv_cache.request_log`) says more, and its lines are in the order in which requests ended:

    {"timestamp": ..., "input_length": ..., "output_length": ..., "block_size": 128, "hash_ids": [...],
     "output_hash_ids": [...]}

`block_size` is in place of the 512; `output_hash_ids` are the blocks that the answer completed.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
        arrival_s: since the trace's start, or since 1970.
        blocks: one number for each `block_tokens` of the prompt, and maybe one for what is left of it.
        output_blocks: the blocks that the answer completed, where the trace tells.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    output_blocks: tuple[int, ...] = ()
    block_tokens: int = BLOCK_TOKENS

    @property
    def all_blocks(self) -> tuple[int, ...]:
        """Of the prompt, then of its answer."""
        return self.blocks + self.output_blocks if self.output_blocks else self.blocks


def load_trace(path: Path) -> list[TracedRequest]:
    """The requests of a file, in order of arrival. All have the same `block_tokens`.

    Raises:
        ConfigError: it cannot be read, or a line is not a request; names the line.
    """
    requests: list[TracedRequest] = []
    is_log = False
    for number, line in _lines(path):
        place = Place(str(path), number)
        if not line.strip() or (is_log and _is_unfinished(line)):
            continue
        entry = _entry(line, place)
        request = _request(entry, place)
        if requests and request.block_tokens != requests[0].block_tokens:
            message = f"blocks of {request.block_tokens} tokens, after blocks of {requests[0].block_tokens}"
            raise ConfigError(place, message, hint="give the logs of one configuration")
        is_log = "block_size" in entry
        if requests and not is_log and request.arrival_s < requests[-1].arrival_s:
            raise ConfigError(place, "is earlier than the request before it", hint="sort the lines by timestamp")
        requests.append(request)
    if not requests:
        raise ConfigError(Place(str(path)), "holds no request", hint=_FORMAT_HINT)
    return sorted(requests, key=lambda request: request.arrival_s) if is_log else requests


def coarser(requests: Sequence[TracedRequest], block_tokens: int) -> list[TracedRequest]:
    """The same requests in larger blocks: a block's number is that of its last part.

    Args:
        block_tokens: a multiple of theirs.
    """
    return [_coarser(request, block_tokens) for request in requests]


def _coarser(request: TracedRequest, block_tokens: int) -> TracedRequest:
    parts = block_tokens // request.block_tokens
    assert parts * request.block_tokens == block_tokens, f"{block_tokens} from {request.block_tokens} tokens"
    numbers = request.all_blocks
    complete = numbers[parts - 1 :: parts]
    prompt = complete[: request.input_tokens // block_tokens]
    if len(request.blocks) * request.block_tokens > request.input_tokens and request.input_tokens % block_tokens:
        prompt = (*prompt, request.blocks[-1])  # a trace that counts a prompt's rest as a block goes on doing so
    output = complete[len(prompt) :] if request.output_blocks else ()
    return replace(request, blocks=prompt, output_blocks=output, block_tokens=block_tokens)


def _is_unfinished(line: str) -> bool:
    """Whether a server has not written all of its last line yet."""
    return not line.endswith(("\n", "}"))


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


def _entry(line: str, place: Place) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(place, f"is not JSON: {error}", hint=_FORMAT_HINT) from None
    if not isinstance(entry, dict):
        raise ConfigError(place, "is not a JSON object", hint=_FORMAT_HINT)
    return entry


def _request(entry: dict[str, Any], place: Place) -> TracedRequest:
    arrival_ms, input_tokens, output_tokens = (
        _number(entry, name, place) for name in ("timestamp", "input_length", "output_length")
    )
    block_tokens = entry.get("block_size", BLOCK_TOKENS)
    if type(block_tokens) is not int or not 0 < block_tokens <= 1 << 20:
        raise ConfigError(place, f"block_size is {json.dumps(block_tokens)}, not a number of tokens from 1")
    blocks, output_blocks = _blocks(entry, "hash_ids", place), _blocks(entry, "output_hash_ids", place)
    least, most = input_tokens // block_tokens, -(-input_tokens // block_tokens)
    if not least <= len(blocks) <= most:
        raise ConfigError(
            place,
            f"{len(blocks)} hash_ids for {input_tokens} tokens",
            hint=f"one for each {block_tokens} tokens, and one for what is left",
        )
    if len({*blocks, *output_blocks}) < len(blocks) + len(output_blocks):
        raise ConfigError(place, "a number stands twice in hash_ids", hint="a number stands for all tokens up to there")
    return TracedRequest(arrival_ms / 1000, int(input_tokens), int(output_tokens), blocks, output_blocks, block_tokens)


def _blocks(entry: dict[str, Any], name: str, place: Place) -> tuple[int, ...]:
    blocks = entry.get(name, [] if name == "output_hash_ids" else None)
    if not isinstance(blocks, list) or not all(type(block) is int and 0 <= block < 1 << 64 for block in blocks):
        raise ConfigError(place, f"{name} is not a list of whole numbers below 2^64", hint=_FORMAT_HINT)
    return tuple(blocks)


def _number(entry: dict[str, Any], name: str, place: Place) -> float:
    value = entry.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise ConfigError(place, f"{name} is {json.dumps(value)}, not a number from 0", hint=_FORMAT_HINT)
    if name != "timestamp" and not isinstance(value, int):
        raise ConfigError(place, f"{name} is {value}, not a whole number", hint=_FORMAT_HINT)
    return value
