"""The keys under kv_cache: defaults, ranges, and what a bad value's message says."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from kvortex.config.settings import (
    KV_CACHE_KEYS,
    KVCacheSettings,
    check_value,
    default_ram_cache_size,
    read_settings,
)
from kvortex.errors import ConfigError, Place

PLACE = Place("kvortex.yaml", 7)
RAM = 64 * 10**9


def read(**values: Any) -> KVCacheSettings:
    return read_settings(
        {"ram_cache_size": "1GB", **values},
        place_of=Place,
        available_ram_bytes=RAM,
        prefix="kv_cache.",
    )


def refusal(**values: Any) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        read(**values)
    return refused.value


def test_the_defaults_are_the_documented_ones_in_base_units() -> None:
    assert read().model_dump() == {
        "backend": "kvortex",
        "offload_threshold": 0.85,
        "offload_target": 0.75,
        "offload_batch": 256_000_000,
        "idle_after": 30.0,
        "ram_cache_size": 10**9,
        "prefetch_enabled": False,
        "num_streams": 4,
        "block_size": 128,
        "eviction_policy": "adaptive",
        "transfer_timeout": 30.0,
        "request_log": None,
        "request_log_size": 256_000_000,
        "verify": "off",
    }


def test_what_is_read_once_is_read_the_same_again() -> None:
    once = read(offload_batch="64MiB", idle_after="2m", ram_cache_size="50%", offload_threshold=1)
    assert read(**once.model_dump()) == once
    assert once.ram_cache_size == RAM // 2


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        read().num_streams = 5  # type: ignore[misc]


def test_a_threshold_of_zero_is_write_through_and_the_default_target_follows() -> None:
    assert read(offload_threshold=0).effective_offload_target == 0
    assert read(offload_threshold=0.5).effective_offload_target == 0.5
    assert read(offload_threshold=0.9).effective_offload_target == 0.75


def test_a_target_that_was_asked_for_and_is_above_the_threshold_is_refused() -> None:
    refused = refusal(offload_threshold=0.5, offload_target=0.6)
    assert str(refused.place) == "offload_target"
    assert "offload_target: 0.6 is above offload_threshold, 0.5" in refused.message
    assert refused.hint is not None
    assert "0.5 or less" in refused.hint
    assert read(offload_threshold=0.5, offload_target=0.5).offload_target == 0.5


WRONG = {
    "backend": ["lmcache", None, True, 1],
    "offload_threshold": [85, -0.1, 1.01, math.nan, math.inf, "0.85", True, None, [0.85], {}],
    "offload_target": [75, "0.75", False, None],
    "offload_batch": ["0", 0, -1, "256M", True, None, 1.5],
    "idle_after": ["30 seconds", -1, True, None, math.nan, []],
    "ram_cache_size": ["128 gigs", "128G", 0, True, None, [1], 9e30, "101%"],
    "prefetch_enabled": ["true", 1, 0, None, "yes"],
    "num_streams": [0, -1, 65, 1000, 4.0, "4", True, None],
    "block_size": [0, -16, 100, 128.0, "128", True, None],
    "eviction_policy": ["LRU", "fifo", None, 1],
    "transfer_timeout": [0, "0s", -1, None, True],
    "request_log": ["", "  ", 1, True, [], "a\0b", "~nobody-of-this-name/log"],
    "request_log_size": [0, "999999", "1kB", None, True, "256M"],
    "verify": ["ALL", "on", True, None, 0, 1, ""],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_a_bad_value_is_refused_by_key_at_its_place(key: str, value: object) -> None:
    refused = refusal(**{key: value})
    assert str(refused.place) == key
    assert refused.message.startswith(f"{key}: ")
    assert not refused.message.startswith(f"{key}: kv_cache.{key}"), "a key that its place names is not said twice"
    with pytest.raises(ConfigError, match=f"7: kv_cache.{key}"):
        check_value(key, value, place=PLACE, available_ram_bytes=RAM, prefix="kv_cache.")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("offload_threshold", 0),
        ("offload_threshold", 1),
        ("offload_target", 0.9),
        ("idle_after", 0),
        ("num_streams", 1),
        ("num_streams", 64),
        ("block_size", 16),
        ("prefetch_enabled", False),
        ("request_log", None),
        ("request_log_size", 10**6),
        ("verify", "all"),
    ],
)
def test_a_value_at_the_edge_of_its_range_is_fine_by_itself(key: str, value: object) -> None:
    check_value(key, value, place=PLACE, available_ram_bytes=RAM)


def test_off_is_off_however_yaml_reads_it() -> None:
    assert read(verify=False).verify == read(verify="off").verify == "off"


def test_every_key_has_a_bad_value_in_this_test() -> None:
    assert set(WRONG) == set(KV_CACHE_KEYS)


def test_a_range_is_named_in_the_message() -> None:
    assert "a whole number from 1 to 64, not 0" in refusal(num_streams=0).message
    assert "a positive multiple of 16, not 100" in refusal(block_size=100).message
    assert 'did you mean "kvortex"?' in str(refusal(backend="kvortx"))


@pytest.mark.parametrize(
    ("available", "size"),
    [(64 * 10**9, 32 * 10**9), (65_999_999_999, 32 * 10**9), (4 * 10**12, 256 * 10**9), (10**9, 5 * 10**8)],
)
def test_the_suggested_ram_cache_is_half_of_what_is_usable_and_at_most_256_gb(available: int, size: int) -> None:
    assert default_ram_cache_size(available) == size


def test_a_home_is_named_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert read(request_log="~/log").request_log == "/home/someone/log"


class TestExtraConfig:
    """A plain `vllm serve --kv-transfer-config` gives the same keys by the same rules."""

    def test_same_keys_and_units(self) -> None:
        settings = KVCacheSettings.from_extra_config(
            {"ram_cache_size": "2GiB", "idle_after": "1m"}, available_ram_bytes=RAM
        )
        assert (settings.ram_cache_size, settings.idle_after) == (2**31, 60.0)

    def test_without_a_size_the_hardware_suggests_one(self) -> None:
        assert KVCacheSettings.from_extra_config({}, available_ram_bytes=RAM).ram_cache_size == RAM // 2

    def test_an_unknown_key_names_the_nearest_one(self) -> None:
        with pytest.raises(ConfigError, match='unknown key "ram_cach_size"') as refused:
            KVCacheSettings.from_extra_config({"ram_cach_size": "1GB"}, available_ram_bytes=RAM)
        assert refused.value.hint == 'did you mean "ram_cache_size"?'

    def test_null_is_a_value_and_not_absent(self) -> None:
        with pytest.raises(ConfigError, match="ram_cache_size: null is not a size"):
            KVCacheSettings.from_extra_config({"ram_cache_size": None}, available_ram_bytes=RAM)

    def test_backend_none_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="nothing for the connector to do"):
            KVCacheSettings.from_extra_config({"backend": "none"}, available_ram_bytes=RAM)
