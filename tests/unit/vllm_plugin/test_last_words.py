"""Errors of all processes, read by the server after they are gone."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator

import pytest

from kvortex.vllm_plugin import last_words
from kvortex.vllm_plugin.last_words import VARIABLE, LastWords, record_last_words


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    logger = logging.getLogger("vllm")
    handlers = list(logger.handlers)
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    yield
    logger.handlers = handlers


def engine_that_dies(lines: int) -> None:
    record_last_words()
    record_last_words()
    logger = logging.getLogger("vllm.v1.engine.core")
    logger.info("not an error")
    for number in range(lines):
        try:
            raise ValueError(f"number {number}")
        except ValueError:
            logger.exception("EngineCore encountered %s", "a fatal error.")
    os.kill(os.getpid(), signal.SIGKILL)


def killed_engine(lines: int) -> int | None:
    process = multiprocessing.get_context("spawn").Process(target=engine_that_dies, args=(lines,), name="EngineCore")
    process.start()
    process.join(60)
    return process.exitcode


def test_what_a_killed_process_said_is_still_there() -> None:
    words = LastWords()
    assert killed_engine(1) == -signal.SIGKILL
    (said,) = words.read()
    assert (said.process, said.message) == ("EngineCore", "EngineCore encountered a fatal error.")
    assert (said.error_type, said.error) == ("ValueError", "number 0")


def test_many_errors_keep_the_last_and_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    words = LastWords()
    killed_engine(3000)
    said = words.read()
    assert said[-1].error == "number 2999"
    assert len(said) < 3000
    assert os.fstat(words._file).st_size < 2 * last_words._MAX_BYTES


def test_a_line_cut_off_by_a_kill_is_left_out() -> None:
    words = LastWords()
    killed_engine(1)
    os.write(os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND), b'{"at": 1.0, "process": "Eng')
    assert len(words.read()) == 1


def test_without_kvortex_serve_nothing_is_recorded() -> None:
    before = list(logging.getLogger("vllm").handlers)
    record_last_words()
    assert logging.getLogger("vllm").handlers == before


def test_a_child_s_death_is_recorded_with_how_it_ended_and_the_child_is_left_to_its_parent() -> None:
    words = LastWords()
    record_last_words()
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), name="VllmWorker-0")
    child.start()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    logging.getLogger("vllm").error("Worker proc %s died unexpectedly (exit code: %s)", child.name, None)
    (said,) = words.read()
    assert said.exit_code == -signal.SIGKILL
    child.join()
    assert child.exitcode == -signal.SIGKILL
