"""The server's own log of requests, a trace that `kvortex bench replay` and `kvortex plan` read. EngineCore process.

    {"timestamp": 1764472869123, "input_length": 900, "output_length": 64, "block_size": 128,
     "hash_ids": [5093..., ...], "output_hash_ids": [...]}

One line a request, written when it ends; `timestamp` is when it was admitted, in ms since 1970. Block hashes only: no
token, no text. Each number is a keyed hash of a block's key, cut to 53 bits; its key is drawn at start and kept in this
process's memory alone, so whoever guesses a prompt cannot find it in the log.

`add` never waits: a thread writes, behind a bounded queue. What does not fit is dropped and counted.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import queue
import re
import secrets
import threading
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvortex.config.request_log import check_request_log, older
from kvortex.errors import UsageError
from kvortex.keys import BlockKey

if TYPE_CHECKING:
    from kvortex.vllm_plugin.setup import EngineFacts

logger = logging.getLogger(__name__)

MAX_QUEUED: Final = 1024
CLOSE_TIMEOUT_S: Final = 5.0
# Every reader of JSON holds a whole number of this many bits exactly.
_ID_BITS: Final = 53
_HASH_BYTES: Final = 8


class Dropped(Enum):
    """Why a request is not in the log."""

    QUEUE_FULL = "queue_full"
    TOO_LONG = "too_long"
    NOT_WRITTEN = "not_written"


class EndedRequest(NamedTuple):
    """What the log says of one request.

    Attributes:
        admitted_s: seconds since 1970.
        keys: of the complete blocks of its prompt and, behind them, of its answer.
    """

    admitted_s: float
    input_tokens: int
    output_tokens: int
    keys: Sequence[BlockKey]


def open_request_log(facts: EngineFacts, block_size: int) -> RequestLog | None:
    """The log that the settings ask for; an engine of a data parallel server has one of its own, `NAME.dp1.jsonl`.

    Args:
        block_size: tokens of the blocks that are logged.

    Raises:
        UsageError: it cannot be opened.
    """
    settings = facts.settings
    if settings.request_log is None:
        return None
    path = Path(settings.request_log)
    rank = re.search(r"_dp(\d+)$", facts.engine_id)
    if rank is not None:
        path = path.with_name(f"{path.stem}.dp{rank[1]}{path.suffix}")
    return RequestLog(path, settings.request_log_size, block_size)


class RequestLog:
    """Takes ended requests from the scheduler's thread and writes them from its own.

    A file that is there moves to `PATH.1`, at start and whenever it is full; the one that was there goes.
    """

    def __init__(self, path: Path, max_bytes: int, block_size: int, *, max_queued: int = MAX_QUEUED) -> None:
        """
        Args:
            max_bytes: of both files together.
            block_size: tokens a block.

        Raises:
            UsageError: the file cannot be made, or another server writes it.
        """
        self._path = path
        self._max_file_bytes = max_bytes // 2
        self._block_size = block_size
        self._secret = secrets.token_bytes(blake2b.MAX_KEY_SIZE)
        self._written = 0
        self._dropped: Counter[Dropped] = Counter()
        self._queue: queue.Queue[EndedRequest | None] = queue.Queue(max_queued)
        self._file_bytes = 0
        self._file = self._first_file()
        self._thread = threading.Thread(target=self._run, name="kvortex-request-log", daemon=True)
        self._thread.start()

    def add(self, request: EndedRequest) -> None:
        """A request is over. Never waits and never fails; the scheduler's thread alone calls it."""
        try:
            self._queue.put_nowait(request)
        except queue.Full:
            self._drop(Dropped.QUEUE_FULL, f"{self._queue.maxsize} requests wait for the disk")

    def close(self) -> None:
        """Writes what waits, for a bounded time. Idempotent."""
        if not self._thread.is_alive():
            return
        try:
            self._queue.put(None, timeout=CLOSE_TIMEOUT_S)
        except queue.Full:
            logger.warning("the request log %s: the disk does not answer, its last lines are lost", self._path)
            return
        self._thread.join(CLOSE_TIMEOUT_S)

    # ---- the thread's

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            line = self._line(request)
            if len(line) > self._max_file_bytes:
                self._drop(Dropped.TOO_LONG, f"a line of {len(line)} bytes, of {self._max_file_bytes} a file may have")
                continue
            try:
                self._write(line)
                self._written += 1
            except OSError as error:
                self._drop(Dropped.NOT_WRITTEN, error.strerror or str(error))
        os.close(self._file)

    def _line(self, request: EndedRequest) -> bytes:
        ids = [self._id_of(key) for key in request.keys]
        of_prompt = request.input_tokens // self._block_size
        line = {
            "timestamp": int(request.admitted_s * 1000),
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "block_size": self._block_size,
            "hash_ids": ids[:of_prompt],
            "output_hash_ids": ids[of_prompt:],
        }
        return json.dumps(line).encode() + b"\n"

    def _id_of(self, key: BlockKey) -> int:
        digest = blake2b(key, digest_size=_HASH_BYTES, key=self._secret).digest()
        return int.from_bytes(digest, "big") >> (8 * _HASH_BYTES - _ID_BITS)

    def _write(self, line: bytes) -> None:
        if self._file_bytes + len(line) > self._max_file_bytes:
            self._begin_new_file()
        written = os.write(self._file, line)
        if written < len(line):
            os.ftruncate(self._file, self._file_bytes)
            raise OSError(f"{written} of {len(line)} bytes were written")
        self._file_bytes += written

    def _begin_new_file(self) -> None:
        if self._path.exists():
            self._path.replace(older(self._path))
        file = self._made()
        os.close(self._file)
        self._file, self._file_bytes = file, 0

    # ---- files

    def _first_file(self) -> int:
        check_request_log(self._path)
        try:
            if self._path.exists():
                self._check_nobody_writes_it()
                self._path.replace(older(self._path))
            return self._made()
        except OSError as error:
            raise UsageError(f"the request log {self._path} cannot be made: {error.strerror}") from error

    def _made(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(self._path, flags, 0o600)
        self._lock(file)
        return file

    def _check_nobody_writes_it(self) -> None:
        with self._path.open("rb") as file:
            if not self._lock(file.fileno()):
                hint = "give each server a kv_cache.request_log of its own"
                raise UsageError(f"another server writes the request log {self._path}", hint=hint)

    @staticmethod
    def _lock(file: int) -> bool:
        """Whether nobody else holds the file's lock; it ends with the process."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            logger.debug("the request log cannot be locked on this file system: %s", error)
        return True

    # ---- either thread

    def _drop(self, reason: Dropped, detail: str) -> None:
        self._dropped[reason] += 1
        if self._dropped[reason] == 1:
            logger.warning("the request log %s lacks requests from now on (%s): %s", self._path, reason.value, detail)

    def counts(self) -> dict[str, Any]:
        """Requests written, and dropped by reason. Any thread."""
        return counts(self._written, self._dropped)


def counts(written: int = 0, dropped: Counter[Dropped] | None = None) -> dict[str, Any]:
    """`request_log` in `/kvortex/stats`; zeros without a log."""
    dropped = Counter() if dropped is None else dropped
    return {"written": written, "dropped": {reason.value: dropped[reason] for reason in Dropped}}
