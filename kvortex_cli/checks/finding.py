"""One finding of `kvortex doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """FAIL: KVortex will not run like this. WARN: it will, with a loss that the finding names."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """
    Attributes:
        check: what was looked at; the same word in every release.
        value: what was seen.
        fix: what to do about it; "" when the status is OK, and only then.
    """

    check: str
    status: Status
    value: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert (self.fix == "") == (self.status is Status.OK), self


def ok(check: str, value: str) -> Finding:
    return Finding(check, Status.OK, value)


def warn(check: str, value: str, fix: str) -> Finding:
    return Finding(check, Status.WARN, value, fix)


def fail(check: str, value: str, fix: str) -> Finding:
    return Finding(check, Status.FAIL, value, fix)
