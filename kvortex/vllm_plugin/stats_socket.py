"""How the HTTP server process reads the statistics that live in the EngineCore process.

A Unix socket in Linux's abstract namespace, named after vLLM's engine id: no file, so nothing is left behind by a
SIGKILL, and nobody but the same user is answered, or believed (the kernel tells who is at the other end). One line of
JSON asks, one answers.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any

from kvortex.errors import KVortexError, UsageError

logger = logging.getLogger(__name__)

TIMEOUT = 5.0
"""Seconds that either side waits for the other."""

QUESTION_TIMEOUT = 1.0
"""Seconds that a reader may take to ask: others wait behind it."""

MOST_QUESTION_BYTES = 8 << 20
"""A hint names up to some hundred thousand token ids, of up to ten digits and a comma."""

_MOST_NAME_BYTES = 80
_PEER = struct.Struct("3i")


def socket_name(engine_id: str) -> str:
    """The abstract address of an engine's statistics; one that is too long for an address is known by its digest."""
    encoded = engine_id.encode(errors="surrogatepass")
    name = engine_id if len(encoded) <= _MOST_NAME_BYTES else hashlib.sha256(encoded).hexdigest()
    return f"\0kvortex-{os.getuid()}-{name}"


class StatsUnavailableError(KVortexError):
    """The engine does not answer: it is starting, gone, or runs without KVortex."""


class StatsServer:
    """Answers each connection's one question, on a thread of its own. EngineCore process."""

    def __init__(self, engine_id: str, answers: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
        """
        Args:
            answers: by the name of the question; called with its parameters, each time anew.

        Raises:
            UsageError: another server on this machine has the engine id.
        """
        self._answers = answers
        self._socket = _listening(engine_id)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="kvortex-stats", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with connection:
                try:
                    self._answer(connection)
                except OSError as error:
                    logger.debug("a reader of the statistics went away: %s", error)
                except Exception:
                    # The reader is told by the closed connection; the next one is to have its answer.
                    logger.exception("a question to the statistics could not be answered")

    def _answer(self, connection: socket.socket) -> None:
        if not _is_trusted(connection):
            return
        connection.settimeout(QUESTION_TIMEOUT)
        with connection.makefile("rb") as lines:
            line = lines.readline(MOST_QUESTION_BYTES)
        question = _parsed(line)
        answer = self._answers.get(str(question.pop("ask", "")))
        if answer is None:
            logger.warning("a question that is not known was put to the statistics: %r", line[:80])
            return
        connection.settimeout(TIMEOUT)
        connection.sendall(json.dumps(answer(**question)).encode() + b"\n")

    def close(self) -> None:
        """Stops answering. Idempotent."""
        if self._closing:
            return
        self._closing = True
        # A thread blocked in accept() is not woken by close() alone.
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            logger.debug("the statistics socket was gone already: %s", error)
        self._socket.close()
        self._thread.join(TIMEOUT)


def _listening(engine_id: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(socket_name(engine_id))
        listening.listen(16)
    except OSError as error:
        listening.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise UsageError(
            f"another server, process {_owner(engine_id)}, has the engine id {engine_id!r}",
            hint="leave engine_id out of --kv-transfer-config, or give each server its own",
        ) from error
    return listening


def _owner(engine_id: str) -> int | str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT)
        try:
            connection.connect(socket_name(engine_id))
        except OSError:
            return "unknown"
        return _peer(connection)[0]


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other end: of who asks, or of who began to listen."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def _is_trusted(connection: socket.socket) -> bool:
    return _peer(connection)[1] in (os.getuid(), 0)


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        question = json.loads(line)
    except ValueError:
        return {}
    return question if isinstance(question, dict) else {}


def ask_engine(engine_id: str, question: str, **parameters: Any) -> dict[str, Any]:
    """The answer of an engine on this machine; blocks for at most TIMEOUT seconds a step.

    Raises:
        StatsUnavailableError: nobody answers under this engine id, or another user would.
    """
    asked = json.dumps({"ask": question, **parameters}, separators=(",", ":")).encode() + b"\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT)
        try:
            connection.connect(socket_name(engine_id))
            if not _is_trusted(connection):
                raise StatsUnavailableError("the engine does not answer: another user's process has its address")
            connection.sendall(asked)
            with connection.makefile("rb") as lines:
                line = lines.readline()
        except OSError as error:
            raise StatsUnavailableError(
                f"the engine does not answer: {error}", hint="is it running with KVortexConnector?"
            ) from error
    if not line:
        raise StatsUnavailableError("the engine closed the connection without an answer")
    document = json.loads(line)
    assert isinstance(document, dict), type(document)
    return document
