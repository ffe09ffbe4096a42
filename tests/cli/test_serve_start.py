"""`kvortex serve` up to the moment when the process becomes vLLM's server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvortex_cli import serve as serve_module

SECRET = "sk-TESTSECRET"


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(serve_module.os, "execve", lambda *call: calls.append(call))
    return calls


def test_it_becomes_vllms_server_with_the_resolved_options(kvortex: Any, became: list[Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    arguments = ["--set", "kv_cache.ram_cache_size=1MB", "--port", str(port), "--api-key", SECRET]
    result = kvortex("serve", "M", *arguments)
    assert result.code == 0, result.err
    ((path, argv, environment),) = became
    assert path == sys.executable
    assert argv[:6] == [sys.executable, "-m", "kvortex.vllm_plugin.server", "M", "--port", str(port)]
    assert SECRET not in " ".join(argv) + result.out + result.err
    assert environment["VLLM_API_KEY"] == SECRET
    assert environment["PATH"] == os.environ["PATH"]


def test_a_taken_port_is_refused_before_anything_is_loaded(kvortex: Any, became: list[Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = kvortex("serve", "M", "--set", "kv_cache.ram_cache_size=1MB", "--port", str(port))
    assert result.code == 2
    assert result.err.startswith(f"error: port {port} is taken by process {os.getpid()}")
    assert became == []


def test_a_unix_socket_needs_no_port(kvortex: Any, became: list[Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        arguments = ["--set", "kv_cache.ram_cache_size=1MB", "--port", port, "--uds", "s.sock"]
        assert kvortex("serve", "M", *arguments).code == 0
    assert len(became) == 1


@pytest.mark.usefixtures("clean_environment")
def test_the_server_has_the_process_id_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "fake_server.py").write_text("import os, sys\nprint(os.getpid(), *sys.argv[1:4])\nsys.exit(7)\n")
    start = (
        "from kvortex_cli import serve; serve._SERVER_MODULE = 'fake_server'; from kvortex_cli.main import main; main()"
    )
    arguments = ["serve", "M", "--uds", "s", "--set", "kv_cache.ram_cache_size=1MB"]
    with subprocess.Popen(
        [sys.executable, "-c", start, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    ) as process:
        out, _ = process.communicate(timeout=60)
    assert out.split() == [str(process.pid), "M", "--uds", "s"]
    assert process.returncode == 7
