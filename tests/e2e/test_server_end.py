"""How a real server starts and ends: what it says when it is ready, who died, and that nobody is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from kvortex.sizes import format_bytes
from tests.e2e.engine import prompt
from tests.e2e.server import (
    ENDED_WITHIN_S,
    KEY,
    READY_WITHIN_S,
    Server,
    assert_all_gone,
    assert_ends_after_its_request,
    assert_no_traceback_of_ours,
    command_line,
)

TOKEN = "hf_TESTSECRET"


def last_lines(log: Path) -> list[str]:
    """The end of what the server itself said; the interpreter's helper process may complain after it."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if "resource_tracker" not in line]
    return [line for line in lines if not line.startswith("  warnings.warn")][-2:]


def told(server: Server, *words: str) -> str:
    """The log, once it has these; a moment after the server answers."""
    deadline = time.monotonic() + ENDED_WITHIN_S
    while time.monotonic() < deadline:
        text = server.log.read_text(errors="replace")
        if all(word in text for word in words):
            return text
        time.sleep(0.1)
    raise AssertionError(server.tail())


def session_of(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None


def engine_of(server: Server) -> psutil.Process:
    return next(p for p in server.family() if "EngineCore" in command_line(p))


def worker_of(server: Server) -> psutil.Process:
    """Its only one; what else an engine starts only keeps count of shared memory."""
    (worker,) = [p for p in engine_of(server).children() if "resource_tracker" not in command_line(p)]
    return worker


@pytest.mark.parametrize(("victim", "named"), [(engine_of, "the engine (EngineCore)"), (worker_of, "a worker (Vllm")])
def test_a_ready_server_says_what_it_holds_and_a_killed_process_is_named(
    tiny_llama: str, tmp_path: Path, victim: Callable[[Server], psutil.Process], named: str
) -> None:
    with Server(tiny_llama, api_key=KEY, log=tmp_path / "log") as server:
        tiers = server.stats()["tiers"]
        text = told(server, f"KVortex is ready: {tiny_llama} on {server.url}", f"{server.url}/kvortex/stats")
        for tier in ("vram", "ram"):
            held = tiers[tier]
            assert f"{format_bytes(held['capacity_bytes'])}, {held['capacity_blocks']:,} blocks of 32 tokens" in text
        family = server.family()
        victim(server).kill()
        assert server.process.wait(ENDED_WITHIN_S) == 1
        error, hint = last_lines(server.log)
        assert error.startswith(f"error: {named}")
        assert error.endswith("was killed (SIGKILL)")
        assert "dmesg" in hint
        assert_all_gone(family)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_lets_running_requests_end_and_leaves_nobody(
    tiny_llama: str, tmp_path: Path, number: signal.Signals
) -> None:
    """Field trial B20; SIGTERM in test_restart.py."""
    with Server(tiny_llama, log=tmp_path / "log") as server:
        server.complete(prompt(1, 40))
        assert_ends_after_its_request(server, number)
        assert "error: " not in "\n".join(last_lines(server.log))


def test_who_is_not_answered_when_the_time_to_end_is_over_is_cut_off(tiny_llama: str, tmp_path: Path) -> None:
    """By itself vLLM waits for an answer that its engine, which it has killed, cannot give."""
    long = ("--shutdown-timeout", "1", "--max-model-len", "4096", "--num-gpu-blocks-override", "200")
    with Server(tiny_llama, options=long, log=tmp_path / "log") as server:
        family = server.family()
        with server.streamed(prompt(1, 40), max_tokens=4000) as chunks:
            next(chunks)
            server.process.terminate()
            # Its engine may just have time to say that it gives the request up.
            with suppress(httpx.RemoteProtocolError):
                *_, last = chunks
                assert last["choices"][0]["finish_reason"] == "abort"
        assert server.process.wait(ENDED_WITHIN_S) == 0, server.tail()
        assert "error: " not in "\n".join(last_lines(server.log))
        assert_all_gone(family)


def test_a_server_that_starts_ends_on_request_too(tiny_llama: str, tmp_path: Path) -> None:
    """By itself vLLM drops a SIGTERM that comes while its engine starts, and may never be ready either."""
    server = Server(tiny_llama, log=tmp_path / "log")
    server.start()
    told(server, "Initializing a V1 LLM engine")
    family = server.family()
    server.process.terminate()
    code = server.process.wait(ENDED_WITHIN_S)
    said = server.log.read_text(errors="replace")
    was_ready = "[shutdown] API server: shutdown triggered" in said
    assert code == (0 if was_ready else 128 + signal.SIGTERM), server.tail()
    assert ("kvortex: ended before it was ready" in said) != was_ready
    assert_no_traceback_of_ours(server.log)
    assert_all_gone(family)


def test_a_start_that_fails_ends_with_the_reason_and_shows_no_secret(tiny_llama: str, tmp_path: Path) -> None:
    """Field trials B37, B64: exit at once, no child left, the key and the token nowhere."""
    broken = tmp_path / "model"
    shutil.copytree(tiny_llama, broken)
    for weights in broken.glob("*.safetensors"):
        weights.unlink()
    server = Server(str(broken), log=tmp_path / "log")
    config = tmp_path / "k.yaml"
    config.write_text(f"api_key: {KEY}\nhf_token: {TOKEN}\n")
    with server.log.open("wb") as log:
        process = subprocess.Popen(
            [*server.command, "--config", str(config)],
            env={**server.env, "https_proxy": "http://bob:PASSWORD1@127.0.0.1:9"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    assert process.wait(READY_WITHIN_S) == 1
    error, hint = last_lines(server.log)
    assert error.startswith("error: ")
    assert "weights" in error, server.tail()
    assert hint.startswith("hint: ")
    text = server.log.read_text(errors="replace")
    for secret in (KEY, TOKEN, "PASSWORD1"):
        assert secret not in text
    assert_all_gone([p for p in psutil.process_iter() if session_of(p) == process.pid])
