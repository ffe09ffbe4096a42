"""A real attempt to pin host memory and copy it, from a child process: this one gets no CUDA context."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_FIRST_BYTES = 64 << 20
_LARGEST_BYTES = 1 << 30
_LARGEST_BYTES_WSL2 = 16 << 30
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class PinAttempt:
    """One size tried; `error` is "" when it was pinned."""

    num_bytes: int
    seconds: float
    error: str


@dataclass(frozen=True, slots=True)
class CopySpeed:
    """One GPU's copies of pinned memory, in bytes a second; `error` is "" when they were measured.

    Attributes:
        ordinal: CUDA's number of the GPU, after CUDA_VISIBLE_DEVICES.
    """

    ordinal: int
    to_gpu: float
    from_gpu: float
    error: str


@dataclass(frozen=True, slots=True)
class PinReport:
    """
    Attributes:
        cuda_error: why the driver could not be started; "" when it was.
        cuda_code: CUDA's number of that error; 0 without one.
        library: the libcuda that was loaded; "" when none was.
        attempts: in growing size, up to the first that failed.
        copies: one a GPU; empty when nothing was pinned.
        ended: how the child ended when it did not end by itself; "" when it did.
    """

    cuda_error: str
    cuda_code: int
    library: str
    attempts: tuple[PinAttempt, ...]
    copies: tuple[CopySpeed, ...]
    ended: str

    @property
    def pinned_bytes(self) -> int:
        """The largest size that was pinned."""
        return max((attempt.num_bytes for attempt in self.attempts if not attempt.error), default=0)


def sizes_to_try(usable_ram_bytes: int, *, is_wsl2: bool) -> tuple[int, ...]:
    """64 MiB, then fourfold up to 1 GiB, or 16 GiB on WSL2, whose limit is worth finding.

    None but the first is over a quarter of the usable RAM.
    """
    largest = min(_LARGEST_BYTES_WSL2 if is_wsl2 else _LARGEST_BYTES, usable_ram_bytes // 4)
    sizes = [_FIRST_BYTES]
    while sizes[-1] * 4 <= largest:
        sizes.append(sizes[-1] * 4)
    return tuple(sizes)


def try_pinning(
    sizes: Sequence[int],
    num_gpus: int,
    *,
    command: Sequence[str] = (sys.executable, "-m", "kvortex.hardware.pin_child"),
    timeout_s: float = _TIMEOUT_S,
) -> PinReport:
    """Pins each size in turn and measures each GPU's copies; ends in `timeout_s`, whatever the driver does.

    Args:
        sizes: bytes, growing.
        num_gpus: GPUs that CUDA shows to this process.
        command: what to run; the child's own module unless a test has another.
    """
    wanted = json.dumps({"sizes": list(sizes), "gpus": num_gpus})
    try:
        child = subprocess.run([*command, wanted], capture_output=True, text=True, timeout=timeout_s, check=False)
        output, ended = child.stdout, _how_it_ended(child.returncode, child.stderr)
    except subprocess.TimeoutExpired as expired:
        partial = expired.stdout or b""
        output = partial.decode(errors="replace") if isinstance(partial, bytes) else partial
        ended = f"gave no answer for {timeout_s:g} s and was stopped"
    facts = list(_facts(output))
    unknown: dict[str, Any] = {"error": "", "code": 0, "library": ""}
    init = next((fact for fact in facts if fact["event"] == "init"), unknown)
    return PinReport(
        cuda_error=init["error"],
        cuda_code=init["code"],
        library=init["library"],
        attempts=tuple(
            PinAttempt(fact["bytes"], fact["seconds"], fact["error"]) for fact in facts if fact["event"] == "pin"
        ),
        copies=tuple(
            CopySpeed(fact["gpu"], fact["to_gpu"], fact["from_gpu"], fact["error"])
            for fact in facts
            if fact["event"] == "copy"
        ),
        ended=ended,
    )


def _how_it_ended(returncode: int, stderr: str) -> str:
    if returncode == 0:
        return ""
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    last = stderr.strip().splitlines()[-1:] or ["without a message"]
    return f"ended with exit status {returncode}: {last[0]}"


def _facts(output: str) -> Iterator[dict[str, Any]]:
    """The complete lines; a child that is stopped may leave half of one."""
    for line in output.splitlines(keepends=True):
        if line.startswith("{") and line.endswith("}\n"):
            yield json.loads(line)
