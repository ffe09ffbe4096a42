"""Engines that live at the same time, each in a process of its own, and are told in turn what to do.

What changes on a machine from one minute to the next then meets all of them. A benchmark's file is both sides:

    parent   with Engines(__file__, ["plain", "kvortex"], arguments) as engines: engines.tell("plain", {"do": ...})
    child    asyncio.run(serve(name, handler)), when it was started with --child NAME
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_ANSWER = "ANSWER "
_END_S = 8.0


class EngineFailedError(Exception):
    """An engine's process ended, or did not answer in time; the message has the end of its log."""


class Engine:
    """One child; its log goes to a file."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self._log = log
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            start_new_session=True,  # its own children end with it
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._log.with_suffix(".out").open("w") as rest:
            for line in self._process.stdout:
                if line.startswith(_ANSWER):
                    self._answers.put(line[len(_ANSWER) :])
                else:
                    rest.write(line)
        self._answers.put(None)

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The next answer.

        Raises:
            EngineFailedError: there will be none, or not in time.
        """
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            line, cause = None, f"no answer in {timeout_s:.0f} s"
        else:
            cause = "the process ended"
        if line is None:
            end = "\n".join(self._log.read_text().splitlines()[-25:])
            raise EngineFailedError(f"{self.name}: {cause}\n{end}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def send(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `answer` says so, with the log

    def end(self) -> None:
        """Ends the process and its children: politely, then not."""
        if self._process.poll() is None:
            self.send({"do": "end"})
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                print(f"{self.name} does not end by itself", file=sys.stderr, flush=True)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()


class Engines:
    """Children of one benchmark file, started together."""

    def __init__(self, file: str, names: Sequence[str], arguments: Sequence[str], logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, file, *arguments, "--child"]
        self._engines = {name: Engine(name, [*command, name], logs / f"{name}.log") for name in names}

    def __enter__(self) -> Engines:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        enders = [threading.Thread(target=engine.end) for engine in self._engines.values()]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()

    def started(self, timeout_s: float) -> dict[str, dict[str, Any]]:
        """Each engine's first answer, when all are ready."""
        end = time.monotonic() + timeout_s
        return {name: engine.answer(max(0.1, end - time.monotonic())) for name, engine in self._engines.items()}

    def tell(self, name: str, order: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """One engine does something; its answer."""
        self._engines[name].send(order)
        return self._engines[name].answer(timeout_s)


async def serve(first: dict[str, Any], handle: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]) -> None:
    """The child: says that it is ready, then answers each line of stdin until it is told to end."""
    import asyncio

    _say(first)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        if order["do"] == "end":
            return
        _say(await handle(order))


def _say(answer: dict[str, Any]) -> None:
    print(_ANSWER + json.dumps(answer), flush=True)
