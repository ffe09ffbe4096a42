"""Sizes and durations: one rule, and what others read in two ways is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvortex.sizes import BadValueError, counted, format_bytes, format_seconds, parse_duration, parse_size

SIZES = {
    "128GB": 128 * 10**9,
    "128gb": 128 * 10**9,
    "128 GB": 128 * 10**9,
    "128GiB": 128 * 2**30,
    "128gib": 128 * 2**30,
    "1.5TiB": 3 * 2**39,
    "0.1GB": 10**8,
    "1KB": 1000,
    "1kB": 1000,
    "1KiB": 1024,
    "3PB": 3 * 10**15,
    "1PiB": 2**50,
    "512B": 512,
    "137438953472": 137438953472,
    137438953472: 137438953472,
    1: 1,
}


@pytest.mark.parametrize(("written", "num_bytes"), SIZES.items())
def test_gb_is_ten_to_the_ninth_and_gib_two_to_the_thirtieth(written: str | int, num_bytes: int) -> None:
    assert parse_size(written) == num_bytes


REFUSED_SIZES = [
    ("128G", "1000s by some and as 1024s by others", "128GB (powers of 1000) or 128GiB"),
    ("128Gi", "1000s by some", "128GB"),
    ("128g", "1000s by some", "128GB"),
    ("128Gb", "bits", "128GB"),
    ("128Gib", "bits", "128GiB"),
    ("128GBB", "no unit 'GBB'", "128GB"),
    ("128 gigs", "no unit 'gigs'", "128GB"),
    ("128gB", "no unit", "128GB"),
    ("12,8GB", "not a size", "12.8GB"),
    ("1e3MB", "not a size", "128GB"),
    ("1_000MB", "not a size", "128GB"),
    ("128  GB", "not a size", "128GB"),
    ("+1GB", "not a size", "128GB"),
    ("-1GB", "not a size", "128GB"),
    ("٣GB", "not a size", "128GB"),
    ("nan", "not a size", "128GB"),
    ("inf", "not a size", "128GB"),
    ("", "not a size", "128GB"),
    ("GB", "not a size", "128GB"),
    ("1.5", "no fraction", "128GB"),
    ("0", "not more than zero", "128GB"),
    ("0GB", "not more than zero", "128GB"),
    (0, "not more than zero", "128GB"),
    (-1, "not more than zero", "128GB"),
    ("0.1B", "not more than zero", "128GB"),
    ("50%", "a share has no meaning here", "128GB"),
    ("10000PB", "more memory than any machine", "128GB"),
    (9e30, "9e+30 is not a size", "128GB"),
    (1.5e9, "is not a size", "128GB"),
    (math.nan, "nan is not a size", "128GB"),
    (True, "true is not a size", "128GB"),
    (None, "null is not a size", "128GB"),
    ([1], "a list is not a size", "128GB"),
    ({"GB": 1}, "a mapping is not a size", "128GB"),
]


@pytest.mark.parametrize(("written", "why", "instead"), REFUSED_SIZES)
def test_a_size_with_two_meanings_or_none_is_refused_and_the_right_one_named(
    written: object, why: str, instead: str
) -> None:
    with pytest.raises(BadValueError) as refusal:
        parse_size(written)
    assert why in refusal.value.message
    assert refusal.value.hint is not None
    assert instead in refusal.value.hint
    assert refusal.value.exit_code == 2


def test_a_share_is_of_the_ram_given() -> None:
    assert parse_size("50%", of=1001) == 500
    assert parse_size("12.5 %", of=800) == 100
    assert parse_size("100%", of=7) == 7


@pytest.mark.parametrize("share", ["101%", "0%", "-1%"])
def test_a_share_outside_zero_to_a_hundred_is_refused(share: str) -> None:
    with pytest.raises(BadValueError):
        parse_size(share, of=10**9)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("30s", 30.0),
        ("500ms", 0.5),
        ("2m", 120.0),
        ("1h", 3600.0),
        ("1.5h", 5400.0),
        (30, 30.0),
        (0.25, 0.25),
        ("30", 30.0),
        ("0s", 0.0),
        (0, 0.0),
        ("30 s", 30.0),
    ],
)
def test_a_duration_is_seconds(written: object, seconds: float) -> None:
    assert parse_duration(written) == seconds


@pytest.mark.parametrize(
    "written",
    [
        "",
        "s",
        "-1s",
        "30S",
        "1m30s",
        "1e3s",
        "30sec",
        "nan",
        math.nan,
        math.inf,
        -1,
        True,
        None,
        [1],
        "9999d",
    ],
)
def test_what_is_no_duration_is_refused(written: object) -> None:
    with pytest.raises(BadValueError) as refusal:
        parse_duration(written)
    assert "30s" in str(refusal.value)


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (128 * 10**9, "128 GB"),
        (2**37, "137.4 GB"),
        (-1500, "-1.5 KB"),
        (999_999, "1 MB"),
        (2 * 10**18, "2000 PB"),
    ],
)
def test_bytes_are_shown_with_four_digits_and_a_unit(num_bytes: int, shown: str) -> None:
    assert format_bytes(num_bytes) == shown


@given(st.integers(min_value=1, max_value=9 * 10**17))
def test_what_is_shown_is_read_back_to_four_digits(num_bytes: int) -> None:
    assert parse_size(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=5e-4)


def test_seconds_are_shown_without_needless_zeros() -> None:
    assert format_seconds(30.0) == "30 s"
    assert format_seconds(0.5) == "0.5 s"


def test_one_of_a_thing_is_no_plural() -> None:
    assert [counted(number, "request") for number in (0, 1, 2, 1024)] == [
        "0 requests",
        "1 request",
        "2 requests",
        "1,024 requests",
    ]
