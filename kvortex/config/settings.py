"""The settings under `kv_cache`: their names, defaults and ranges, in base units (bytes, seconds, tokens).

The one place where a default stands. Immutable once read; unknown keys are fatal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo, model_validator

from kvortex.config.names import nearest
from kvortex.errors import ConfigError, Place
from kvortex.sizes import BadValueError, describe, format_bytes, parse_duration, parse_size

EVICTION_POLICIES: Final = ("adaptive", "lru", "priority")
VERIFICATIONS: Final = ("off", "sample", "all")
MAX_STREAMS: Final = 64
BLOCK_SIZE_STEP: Final = 16
_MAX_DEFAULT_RAM_BYTES: Final = 256 * 10**9
_AVAILABLE_RAM: Final = "available_ram_bytes"
_MIN_REQUEST_LOG_BYTES: Final = 10**6


def default_ram_cache_size(available_ram_bytes: int) -> int:
    """The RAM cache of a server that was told no size, in bytes.

    Half of the RAM this process may use, so that loading the model and the rest of the machine have the other
    half; at most 256 GB, since touching and pinning more takes tens of seconds: ask for it. Whole GB.
    """
    size = min(available_ram_bytes // 2, _MAX_DEFAULT_RAM_BYTES)
    return size // 10**9 * 10**9 if size >= 10**9 else size


def _share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        hint = "a share is a number from 0 to 1 without quotes, such as 0.85"
        raise BadValueError(f"takes a number from 0 to 1, not {describe(value)}", hint=hint)
    return float(value)


def _whole_number(low: int, high: float, step: int = 1) -> Callable[[Any], int]:
    wanted = f"a whole number from {low} to {high}" if math.isfinite(high) else f"a positive multiple of {step}"

    def read(value: Any) -> int:
        right = isinstance(value, int) and not isinstance(value, bool)
        if not right or not low <= value <= high or value % step != 0:
            raise BadValueError(f"takes {wanted}, not {describe(value)}")
        return int(value)

    return read


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadValueError(f"takes true or false, not {describe(value)}")
    return value


def _one_of(*choices: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            wanted = " or ".join(f'"{choice}"' for choice in choices)
            close = nearest(value, choices) if isinstance(value, str) else None
            hint = f'did you mean "{close}"?' if close else None
            raise BadValueError(f"takes {wanted}, not {describe(value)}", hint=hint)
        return value

    return read


def _verification(value: Any) -> str:
    # YAML reads a bare `off` as false, and `on` as true.
    return "off" if value is False else _one_of(*VERIFICATIONS)(value)


def _size(value: Any, info: ValidationInfo) -> int:
    return parse_size(value, of=(info.context or {}).get(_AVAILABLE_RAM))


def _path_or_null(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise BadValueError(f"takes a file, or null for none, not {describe(value)}")
    try:
        return str(Path(value).expanduser())
    except RuntimeError:
        raise BadValueError(f"takes a file, and {value!r} names a user that is not there") from None


def _log_size(value: Any) -> int:
    num_bytes = parse_size(value)
    if num_bytes < _MIN_REQUEST_LOG_BYTES:
        raise BadValueError(f"{value} is less than a log of requests is of use with", hint="give 1MB or more")
    return num_bytes


def _some_seconds(value: Any) -> float:
    seconds = parse_duration(value)
    if seconds == 0:
        raise BadValueError(f"takes a duration of more than 0 seconds, not {value}", hint="such as 30s")
    return seconds


class KVCacheSettings(BaseModel):
    """What `kv_cache` says, in base units.

    Attributes:
        backend: "kvortex", or "none" for plain vLLM.
        offload_threshold: stores begin when this share of VRAM KV is resident; 0 is write-through.
        offload_target: stores go on until this share is resident; read `effective_offload_target`.
        offload_batch: bytes that one step may store.
        idle_after: seconds after which an unused block is a first candidate.
        ram_cache_size: bytes of host RAM for blocks, the whole server, split over its GPUs.
        prefetch_enabled: loads may begin before the request that needs them.
        num_streams: copy threads without a GPU; on a GPU, 1 has both directions share a stream, more have one each.
            Where blocks are verified, also the threads for checksums.
        block_size: tokens a block; vLLM's `--block-size`.
        eviction_policy: one of EVICTION_POLICIES.
        transfer_timeout: seconds after which one copy order is given up and counted as failed.
        request_log: file that gets a line for each request, block hashes only; None for none.
        request_log_size: bytes that it and the file before it may take together.
        verify: one of VERIFICATIONS: which blocks get a checksum when stored, which is compared before each load.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)

    backend: Annotated[Literal["kvortex", "none"], BeforeValidator(_one_of("kvortex", "none"))] = "kvortex"
    offload_threshold: Annotated[float, BeforeValidator(_share)] = 0.85
    offload_target: Annotated[float, BeforeValidator(_share)] = 0.75
    offload_batch: Annotated[int, BeforeValidator(_size)] = 256 * 10**6
    idle_after: Annotated[float, BeforeValidator(parse_duration)] = 30.0
    ram_cache_size: Annotated[int, BeforeValidator(_size)]
    prefetch_enabled: Annotated[bool, BeforeValidator(_switch)] = False
    num_streams: Annotated[int, BeforeValidator(_whole_number(1, MAX_STREAMS))] = 4
    block_size: Annotated[int, BeforeValidator(_whole_number(1, math.inf, BLOCK_SIZE_STEP))] = 128
    eviction_policy: Annotated[str, BeforeValidator(_one_of(*EVICTION_POLICIES))] = "adaptive"
    transfer_timeout: Annotated[float, BeforeValidator(_some_seconds)] = 30.0
    request_log: Annotated[str | None, BeforeValidator(_path_or_null)] = None
    request_log_size: Annotated[int, BeforeValidator(_log_size)] = 256 * 10**6
    verify: Annotated[str, BeforeValidator(_verification)] = "off"

    @property
    def effective_offload_target(self) -> float:
        """The target, or the threshold where that is lower than the target's default."""
        return min(self.offload_target, self.offload_threshold)

    @model_validator(mode="after")
    def _target_is_not_above_threshold(self) -> KVCacheSettings:
        if "offload_target" in self.model_fields_set and self.offload_target > self.offload_threshold:
            raise BadValueError(
                f"{self.offload_target} is above offload_threshold, {self.offload_threshold}: "
                "storing would end before it begins",
                hint=f"set offload_target to {self.offload_threshold} or less",
            )
        return self

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any], *, available_ram_bytes: int) -> KVCacheSettings:
        """The settings of `vllm serve --kv-transfer-config '{... "kv_connector_extra_config": {...}}'`.

        Same keys and rules as `kv_cache` in the file; without `ram_cache_size`, what the hardware suggests.

        Args:
            extra_config: vLLM's `kv_connector_extra_config`.
            available_ram_bytes: RAM this process may use; what `%` is of.

        Raises:
            ConfigError: an unknown key, a bad value, or backend "none", which needs no connector.
        """
        place = Place("kv_connector_extra_config")
        for key in extra_config:
            if key not in KV_CACHE_KEYS:
                close = nearest(key, KV_CACHE_KEYS)
                raise ConfigError(place, f'unknown key "{key}"', hint=did_you_mean(close, KV_CACHE_KEYS))
        values = {"ram_cache_size": default_ram_cache_size(available_ram_bytes), **extra_config}
        settings = read_settings(values, place_of=lambda _: place, available_ram_bytes=available_ram_bytes)
        if settings.backend == "none":
            hint = 'leave "backend" out, or serve without --kv-transfer-config'
            raise ConfigError(place, 'backend "none" leaves nothing for the connector to do', hint=hint)
        return settings


KV_CACHE_KEYS: Final = tuple(KVCacheSettings.model_fields)


def did_you_mean(close: str | None, all_of: tuple[str, ...]) -> str:
    """The hint after an unknown key: its nearest right name, else all of them."""
    return f'did you mean "{close}"?' if close else f"the keys are {', '.join(all_of)}"


def read_settings(
    values: Mapping[str, Any], *, place_of: Callable[[str], Place], available_ram_bytes: int, prefix: str = ""
) -> KVCacheSettings:
    """The settings of values as written; every key is a known one and `ram_cache_size` is among them.

    Args:
        place_of: where a key's value stands, for the message.
        available_ram_bytes: what `%` is of.
        prefix: what a message puts before a key: `kv_cache.`.

    Raises:
        ConfigError: at the place of the first bad value.
    """
    try:
        return KVCacheSettings.model_validate(values, context={_AVAILABLE_RAM: available_ram_bytes})
    except ValidationError as invalid:
        key, error = next(_faults(invalid))
        raise _config_error(prefix + key, place_of(key), error) from None


def check_value(
    key: str, value: Any, *, place: Place, available_ram_bytes: int, prefix: str = "", written: str | None = None
) -> None:
    """Checks one value by itself, not how it goes with the others; raises ConfigError at its place.

    Args:
        written: how the value is spelled there; None where that is not known.
    """
    alone = {"ram_cache_size": 1, "offload_threshold": 1.0, "offload_target": 0.0, key: value}
    try:
        KVCacheSettings.model_validate(alone, context={_AVAILABLE_RAM: available_ram_bytes})
    except ValidationError as invalid:
        for faulty, error in _faults(invalid):
            if faulty == key:
                raise _config_error(prefix + key, place, _as_written(error, value, written)) from None


def _faults(invalid: ValidationError) -> Iterator[tuple[str, BadValueError]]:
    """Each bad key and what is wrong. A fault of the whole, which has no location, is the target's."""
    for fault in invalid.errors(include_url=False):
        key = str(fault["loc"][0]) if fault["loc"] else "offload_target"
        error = fault.get("ctx", {}).get("error")
        assert isinstance(error, BadValueError), fault
        yield key, error


def _as_written(error: BadValueError, value: Any, written: str | None) -> BadValueError:
    """YAML reads `yes` and `off` as true and false; whoever wrote them looks for these words."""
    if not isinstance(value, bool) or written is None or written.lower() == describe(value):
        return error
    return BadValueError(written.join(error.message.rsplit(describe(value), 1)), hint=error.hint)


def _config_error(key: str, place: Place, error: BadValueError) -> ConfigError:
    separator = " " if error.message.startswith("takes ") else ": "
    return ConfigError(place, f"{key}{separator}{error.message}", hint=error.hint)


def shown(key: str, value: Any) -> str:
    """A setting to read: `128 GB` for bytes, `30 s` for seconds."""
    if value is None:
        return "null (none)"
    if key in ("ram_cache_size", "offload_batch", "request_log_size"):
        return format_bytes(value)
    if key in ("idle_after", "transfer_timeout"):
        return f"{value:g} s"
    return str(value).lower() if isinstance(value, bool) else str(value)
