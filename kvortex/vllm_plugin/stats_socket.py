"""How the HTTP server process reads the statistics that live in the EngineCore process.

A Unix socket in Linux's abstract namespace, named after vLLM's engine id: no file, so nothing is left behind by a
SIGKILL, and nobody but the same user is answered (the kernel tells who asks). One line of JSON asks, one answers.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any

from kvortex.errors import KVortexError

logger = logging.getLogger(__name__)

TIMEOUT = 5.0
"""Seconds that either side waits for the other."""

QUESTION_TIMEOUT = 1.0
"""Seconds that a reader may take to ask: others wait behind it."""

MOST_QUESTION_BYTES = 4 << 20
"""A hint names up to some hundred thousand token ids."""

_PEER = struct.Struct("3i")


def socket_name(engine_id: str) -> str:
    """The abstract address of an engine's statistics."""
    return f"\0kvortex-{os.getuid()}-{engine_id}"


class StatsUnavailableError(KVortexError):
    """The engine does not answer: it is starting, gone, or runs without KVortex."""


class StatsServer:
    """Answers each connection's one question, on a thread of its own. EngineCore process."""

    def __init__(self, engine_id: str, answers: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
        """`answers`: by the name of the question; called with its parameters, each time anew."""
        self._answers = answers
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(socket_name(engine_id))
        self._socket.listen(16)
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
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        _, uid, _ = _PEER.unpack(peer)
        if uid not in (os.getuid(), 0):
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


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        question = json.loads(line)
    except ValueError:
        return {}
    return question if isinstance(question, dict) else {}


def ask_engine(engine_id: str, question: str, **parameters: Any) -> dict[str, Any]:
    """The answer of an engine on this machine; blocks for at most TIMEOUT seconds a step.

    Raises:
        StatsUnavailableError: nobody answers under this engine id.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT)
        try:
            connection.connect(socket_name(engine_id))
            connection.sendall(json.dumps({"ask": question, **parameters}).encode() + b"\n")
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
