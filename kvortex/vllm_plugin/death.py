"""Why the engine died, in one message: from what its processes logged, how they ended, and the kernel's counters."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvortex.vllm_plugin.last_words import FORCED, LastWord

_ENDED_ON_REQUEST: Final = frozenset({0, -signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGINT})
# An error this long before the last one was another story.
_WINDOW_S: Final = 60.0
_DIED: Final = re.compile(r"Worker ?[Pp]roc (?:rank=)?(\S+) died unexpectedly(?:.*exit code: (-?\d+))?")
_UNKNOWN: Final = -256
"""Exit code of a process that is known to have died, and not how."""
_FAILED_PROCESS: Final = re.compile(r"'([^']+)': (-?\d+)")
_FATAL: Final = re.compile(
    r"EngineCore (failed to start|encountered a fatal error)|Worker ?Proc (failed|hit an exception)|died unexpectedly"
)
# What says only that another process failed.
_ECHO: Final = re.compile(
    r"[Rr]oot cause|EngineDeadError|[Ee]xecutor failed|Worker failed with error|initialization failed due to an exc"
)
_LESS_RAM: Final = "lower kv_cache.ram_cache_size, or raise the container's memory limit; `kvortex doctor` shows both"
_CUDA_HINT: Final = "`dmesg` may show an Xid line; CUDA_LAUNCH_BLOCKING=1 makes the trace name the kernel that failed"
_LESS_VRAM: Final = (
    "lower --gpu-memory-utilization or --max-num-seqs, or use more GPUs; `nvidia-smi` shows who else uses this one"
)

_KINDS: Final[tuple[tuple[re.Pattern[str], str, str], ...]] = (
    (
        re.compile(r"CUDA out of memory|CUDA_ERROR_OUT_OF_MEMORY|CUDA error: out of memory|OutOfMemoryError"),
        "the GPU is out of memory",
        _LESS_VRAM,
    ),
    (
        re.compile(r"Free memory on device"),
        "others use the GPU's memory",
        "end them (`nvidia-smi`), or lower --gpu-memory-utilization",
    ),
    (
        re.compile(r"No available memory for the cache blocks|KV cache is needed"),
        "the GPU has no room for the KV cache of one request",
        "raise --gpu-memory-utilization or lower --max-model-len; `kvortex doctor --model M` shows what fits",
    ),
    (re.compile(r"CUDA error|CUDA_ERROR_|AcceleratorError|NCCL error"), "a CUDA error", _CUDA_HINT),
    (
        re.compile(r"^MemoryError|Cannot allocate memory|can't allocate memory|std::bad_alloc"),
        "the host is out of memory",
        _LESS_RAM,
    ),
    (
        re.compile(r"No space left on device|Insufficient space in /dev/shm"),
        "a disk or /dev/shm is full",
        "free some; in a container docker --shm-size=8g or, in Kubernetes, an emptyDir of medium Memory",
    ),
)


@dataclass(frozen=True, slots=True)
class Death:
    """What to tell the user."""

    message: str
    hint: str


def explain(
    words: Sequence[LastWord], exits: Mapping[str, int], error: BaseException | None, *, oom_killed: bool
) -> Death | None:
    """Why the server ended; None when nothing went wrong.

    Args:
        words: errors that its processes logged.
        exits: exit code of each process by name, negative for a signal, as far as known.
        error: what ended the server's own process, if anything did.
        oom_killed: the kernel ended a process for lack of memory while the server ran.
    """
    words, exits = _before_the_end(words, exits)
    killed = _killed(words, exits, error)
    thrown = _first_cause(words)
    if killed is not None and (thrown is None or killed[1] not in (-signal.SIGABRT, _UNKNOWN)):
        return _of_signal(*killed, oom_killed=oom_killed)
    if thrown is not None:
        return _of_error(f"{_in_words(thrown.process)} failed", thrown.error_type, thrown.error)
    failed = [name for name, code in exits.items() if code not in _ENDED_ON_REQUEST]
    if error is not None and not _ECHO.search(str(error)):
        return _of_error("the server failed", type(error).__name__, str(error))
    if failed or error is not None:
        ended = f"exit code {exits[failed[0]]}" if failed else str(error)
        who = _in_words(failed[0]) if failed else "the engine"
        return Death(f"{who} ended: {ended}", "the lines above are all it said; VLLM_LOGGING_LEVEL=DEBUG shows more")
    return None


def _before_the_end(words: Sequence[LastWord], exits: Mapping[str, int]) -> tuple[list[LastWord], dict[str, int]]:
    """Without those whom vLLM, asked to end, killed itself when the time for it was over, and what was said of that."""
    forced = [(word.at, int(found[1])) for word in words if (found := FORCED.search(word.message))]
    if not forced:
        return list(words), dict(exits)
    begin = min(at for at, _ in forced)
    killed = [name for name, code in exits.items() if code == -signal.SIGKILL]
    if len(killed) > sum(count for _, count in forced):  # somebody else did it, too
        killed = []
    return [word for word in words if word.at < begin], {n: code for n, code in exits.items() if n not in killed}


def _killed(words: Sequence[LastWord], exits: Mapping[str, int], error: BaseException | None) -> tuple[str, int] | None:
    """The process that a signal ended, a worker first: its engine follows it."""
    known = {found[1]: _worker_s_code(word, found) for word in words if (found := _DIED.search(word.message))}
    known |= {name: int(code) for name, code in _FAILED_PROCESS.findall(str(error or ""))}
    known |= exits
    signalled = [(name, code) for name, code in known.items() if code < 0 and code not in _ENDED_ON_REQUEST]
    return signalled[0] if signalled else None


def _worker_s_code(word: LastWord, found: re.Match[str]) -> int:
    if word.exit_code is not None:
        return word.exit_code
    return int(found[2]) if found[2] else _UNKNOWN


def _of_signal(process: str, code: int, *, oom_killed: bool) -> Death:
    who = _in_words(process)
    if code in (-signal.SIGKILL, _UNKNOWN) and oom_killed:
        return Death(f"{who} was ended by the kernel: the host, or this container, is out of memory", _LESS_RAM)
    if code == -signal.SIGKILL:
        return Death(f"{who} was killed (SIGKILL)", "somebody ended it, or the kernel for lack of memory: see `dmesg`")
    if code == _UNKNOWN:
        return Death(f"{who} died without a word", "somebody ended it, or it crashed: see `dmesg` and the lines above")
    name = signal.Signals(-code).name
    if code == -signal.SIGBUS:
        hint = "most often /dev/shm is full: docker --shm-size=8g, in Kubernetes an emptyDir of medium Memory"
        return Death(f"{who} crashed ({name})", hint)
    return Death(f"{who} crashed ({name})", "a fault in native code; the lines above may name it")


def _first_cause(words: Sequence[LastWord]) -> LastWord | None:
    """The first error of those that ended the engine; None when none of them was fatal."""
    fatal = [word for word in words if _FATAL.search(word.message)]
    if not fatal:
        return None
    near = [word for word in words if word.error_type and fatal[0].at - _WINDOW_S <= word.at <= fatal[-1].at]
    causes = [word for word in near if not _ECHO.search(f"{word.error_type}: {word.error}")]
    return next(iter(causes), None)


def _of_error(what: str, error_type: str, text: str) -> Death:
    said, _, own_hint = text.partition("\nhint: ")
    if own_hint:  # KVortex's own refusal
        return Death(f"{what}: {said}", own_hint)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else "without a message"
    for pattern, kind, hint in _KINDS:
        if pattern.search(f"{error_type}: {text}"):
            return Death(f"{what}: {kind}: {first}", hint)
    if error_type == "ValidationError" and len(lines) > 1:
        first = _of_pydantic(lines)
    return Death(f"{what}: {error_type}: {first}", "the trace above has the details")


def _of_pydantic(lines: list[str]) -> str:
    """The first error: its key, where it has one, and what is wrong. Line 0 counts them."""
    told = [re.sub(r" \[type=.*", "", line) for line in lines[1:3] if not line.startswith("For further information")]
    return ": ".join(told)


def _in_words(process: str) -> str:
    if process.startswith("EngineCore"):
        return f"the engine ({process})"
    if "Worker" in process:
        return f"a worker ({process})"
    return "the server" if process == "MainProcess" else f"process {process}"
