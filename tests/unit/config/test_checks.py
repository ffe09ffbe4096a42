"""What would fail late is found early: RAM, GPUs, blocks, vLLM's version, the port."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest

from kvortex.config import verify
from kvortex.config.arguments import split_arguments
from kvortex.config.checks import problems
from kvortex.config.listen import check_port_is_free
from kvortex.config.machine import MachineFacts
from kvortex.config.resolve import CommandLine, resolve
from kvortex.config.vllm_install import VllmInstall
from kvortex.errors import UsageError
from tests.environment import skip_without_address

RAM = 64 * 10**9
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "torch_dtype": "bfloat16",
}
LLAMA_BLOCK_BYTES = 2 * 2 * 2 * 64 * 2 * 128
"""Layers, keys and values, KV heads, head size, bytes, tokens."""


def found(
    *arguments: str, sets: tuple[str, ...] = (), model: str = "M", gpus: int | None = 8, vllm: str = "0.32.0"
) -> list[str]:
    machine = MachineFacts(RAM, gpus)
    resolved = resolve(CommandLine(model, None, sets, split_arguments(arguments).vllm), {}, machine)
    return [str(problem) for problem in problems(resolved, machine, VllmInstall("vllm", vllm))]


def test_a_configuration_that_fits_has_no_problem() -> None:
    assert found("-tp", "8", sets=("kv_cache.ram_cache_size=64GB",)) == []


def test_a_ram_cache_over_what_is_usable_names_both_sizes_and_the_rule() -> None:
    (problem,) = found(sets=("kv_cache.ram_cache_size=65GB",))
    assert problem.startswith("--set kv_cache.ram_cache_size: ")
    assert "65 GB" in problem
    assert "64 GB" in problem
    assert "the whole server's, not a GPU's" in problem


def test_plain_vllm_needs_no_ram_for_a_cache() -> None:
    assert found(sets=("kv_cache.ram_cache_size=65GB", "kv_cache.backend=none")) == []


@pytest.mark.parametrize("arguments", [["-tp", "3"], ["-tp", "2", "-dp", "2"]])
def test_more_ranks_than_visible_gpus_are_named(arguments: list[str]) -> None:
    (problem,) = found(*arguments, gpus=2)
    assert "this process has 2 visible GPUs" in problem
    assert problem.startswith("-tp: ")
    assert found(*arguments, gpus=None) == []


def test_ranks_on_other_hosts_are_not_counted_here() -> None:
    assert found("-tp", "16", "--nnodes", "2", gpus=8) == []


def test_an_option_the_installed_vllm_does_not_have_is_named_with_its_version() -> None:
    (problem,) = found("--max-num-queued-tokens", "5", vllm="0.26.0")
    assert "vLLM 0.26.0 has no option --max-num-queued-tokens" in problem
    assert "0.29 is the first with it" in problem


def test_pipeline_parallelism_is_refused_with_kvortex_only() -> None:
    (problem,) = found("-pp", "2")
    assert "does not support pipeline_parallel_size above 1" in problem
    assert found("-pp", "2", sets=("kv_cache.backend=none",)) == []


@pytest.mark.parametrize("tp", [1, 2])
def test_a_ram_cache_below_one_block_names_the_least_size(tmp_path: Path, tp: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    def for_size(num_bytes: int) -> list[str]:
        return found("-tp", str(tp), sets=(f"kv_cache.ram_cache_size={num_bytes}",), model=str(tmp_path))

    assert for_size(LLAMA_BLOCK_BYTES) == []
    (problem,) = for_size(LLAMA_BLOCK_BYTES - 1)
    assert "less than one block" in problem
    assert f"a block of 128 tokens takes {LLAMA_BLOCK_BYTES} bytes" in problem


def test_a_model_that_is_not_understood_is_left_to_the_connector(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert found(sets=("kv_cache.ram_cache_size=1",), model=str(tmp_path)) == []


@pytest.mark.parametrize(
    ("installed", "says"),
    [("4.0.0", None), ("10.2", None), ("3.8.2", "xxhash 3.8.2 is installed"), (None, "is not installed")],
)
def test_what_verifies_blocks_is_looked_for_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, says: str | None
) -> None:
    def version(name: str) -> str:
        assert name == "xxhash"
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(verify.metadata, "version", version)
    for mode in ("sample", "all"):
        problem = "".join(found(sets=(f"kv_cache.verify={mode}",)))
        assert problem.startswith("--set kv_cache.verify: ") == bool(says)
        assert (says or "") in problem
        assert ("pip install 'xxhash>=4'" in problem) == bool(says)
    assert found(sets=("kv_cache.verify=off",)) == []
    assert found(sets=("kv_cache.verify=all", "kv_cache.backend=none")) == []


def for_log(path: Path) -> list[str]:
    return found(sets=(f"kv_cache.request_log={path}",))


def test_a_request_log_may_be_new_empty_or_another_servers(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    assert for_log(log) == []
    log.write_text("")
    assert for_log(log) == []
    log.write_text('{"timestamp": 1}\n')
    assert for_log(log) == []
    assert log.read_text() == '{"timestamp": 1}\n'


def test_a_request_log_that_would_fail_late_is_found_early(tmp_path: Path) -> None:
    notes, link, rotated = tmp_path / "notes", tmp_path / "link", tmp_path / "new.1"
    notes.write_text("not to be moved")
    rotated.write_text("not to be overwritten")
    link.symlink_to(notes)
    for path, says in {
        tmp_path / "none" / "log": f"there is no folder {tmp_path / 'none'}",
        tmp_path: f"{tmp_path} is a folder",
        link: f"{link} is no plain file",
        notes: f"{notes} is there and is no request log",
        tmp_path / "new": f"{rotated} is there and is no request log",
        Path("/proc/log"): "the folder /proc cannot be written" if os.getuid() else "",
    }.items():
        if says:
            (problem,) = for_log(path)
            assert problem.startswith(f"--set kv_cache.request_log: {says}"), problem
    assert found(sets=(f"kv_cache.request_log={notes}", "kv_cache.backend=none")) == []


@contextmanager
def listener(host: str) -> Iterator[int]:
    skip_without_address(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as server:
        server.bind((host, 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "::1"])
def test_a_taken_port_is_refused_with_its_number_and_owner(host: str) -> None:
    with listener(host) as port:
        with pytest.raises(UsageError, match=f"port {port} is taken by process {os.getpid()}"):
            check_port_is_free(None, port)
        with pytest.raises(UsageError, match="is taken"):
            check_port_is_free(host, port)
    check_port_is_free(None, port)


def test_a_port_in_time_wait_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        connection, _ = server.accept()
        connection.close()  # the side that closes first keeps TIME_WAIT on its port
        assert client.recv(1) == b""
        client.close()
    with socket.socket() as probe, pytest.raises(OSError, match="in use"):
        probe.bind(("127.0.0.1", port))  # without SO_REUSEADDR: the port is in TIME_WAIT
    check_port_is_free("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UsageError, match=r"192\.0\.2\.1:8000 cannot be listened on"):
        check_port_is_free("192.0.2.1", 8000)


def test_a_host_that_is_no_name_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be listened on"):
        check_port_is_free("no-such-host.invalid", 8000)
