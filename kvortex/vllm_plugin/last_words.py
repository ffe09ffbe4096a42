"""What vLLM's processes say when something goes wrong, kept where the server can read it after they are gone.

The server makes a file in memory, which has no name and needs no disk: it ends with the server. Its path under /proc is
in the environment that the other processes inherit. Each of them has a log handler that adds a line for every error,
and for vLLM's word that it kills its processes itself.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

VARIABLE: Final = "_KVORTEX_LAST_WORDS"
_MAX_BYTES: Final = 1 << 18
_MAX_TEXT: Final = 4000
_DEATH: Final = "died unexpectedly"
FORCED: Final = re.compile(r"Process manager: force killing remaining processes count=(\d+)")
"""What vLLM warns of when it kills its processes itself: the time that they had to end is over."""

_EXIT_TRIES: Final = 20
_EXIT_PAUSE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class LastWord:
    """One line that a process logged.

    Attributes:
        at: seconds since the epoch.
        process: its name, such as EngineCore or VllmWorker-0.
        message: what was logged.
        error_type: class of the exception logged with it; "" without one.
        error: its text.
        exit_code: of a process whose death was logged, negative for a signal; None where it is not known, or none died.
    """

    at: float
    process: str
    message: str
    error_type: str
    error: str
    exit_code: int | None = None


class LastWords:
    """The file, in the server's process."""

    def __init__(self) -> None:
        # Never closed: it is read at the very end of this process.
        self._file = os.memfd_create("kvortex-last-words")
        os.environ[VARIABLE] = f"/proc/{os.getpid()}/fd/{self._file}"

    def read(self) -> list[LastWord]:
        """All that was said, in order."""
        return list(_words(os.pread(self._file, 2 * _MAX_BYTES, 0).decode(errors="replace")))


def _words(text: str) -> Iterator[LastWord]:
    # A process may be killed in the middle of a line.
    for line in text.splitlines(keepends=True):
        if line.startswith("{") and line.endswith("}\n"):
            yield LastWord(**json.loads(line))


class _Recorder(logging.Handler):
    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.ERROR and not FORCED.search(record.getMessage()):
            return
        error = record.exc_info[1] if record.exc_info else None
        word = LastWord(
            at=time.time(),
            process=multiprocessing.current_process().name,
            message=record.getMessage()[:_MAX_TEXT],
            error_type=type(error).__name__ if error is not None else "",
            error=str(error)[:_MAX_TEXT] if error is not None else "",
            exit_code=_exit_code_of_a_child() if _DEATH in str(record.msg) else None,
        )
        try:
            # The last errors tell why it ended: a server that logs many starts the file anew.
            mode = "ab" if self._path.stat().st_size < _MAX_BYTES else "wb"
            with self._path.open(mode) as file:
                file.write(json.dumps(asdict(word)).encode() + b"\n")
        except OSError:
            self.handleError(record)


def _exit_code_of_a_child() -> int | None:
    """Of a child that has ended and was not waited for yet; it stays for its parent to wait for. vLLM logs the death as
    soon as a pipe closes, which is a little before."""
    for _ in range(_EXIT_TRIES):
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            return None
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        time.sleep(_EXIT_PAUSE_S)
    return None


def record_last_words() -> None:
    """Begins to record this process's errors, once; does nothing in a server that `kvortex serve` did not start."""
    path = os.environ.get(VARIABLE)
    logger = logging.getLogger("vllm")
    if path is not None and not any(isinstance(handler, _Recorder) for handler in logger.handlers):
        logger.addHandler(_Recorder(Path(path)))
