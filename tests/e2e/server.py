"""A real server in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

KEY = "sk-TESTSECRET"
"""The API key of the servers that ask for one."""

# Hangs end by these; a machine that is many times slower than usual must not.
READY_WITHIN_S = 600.0
ENDED_WITHIN_S = 300.0
_TAKEN = re.compile(r"port \d+ is taken|address already in use", re.IGNORECASE)
"""KVortex's words for a port that another has, and the kernel's, which vLLM and torch repeat."""
_ACCEPTS = 0x10000
"""The kernel's __SO_ACCEPTCON: somebody listens on this socket."""

OPTIONS = (
    ("--max-model-len", "1152"),
    ("--num-gpu-blocks-override", "40"),
    ("--kv-cache-memory-bytes", "100000000"),
    ("--enforce-eager",),
    ("--host", "127.0.0.1"),
    ("--set", "kv_cache.block_size=32"),
    ("--set", "kv_cache.offload_threshold=0"),
)
"""Of a server that is not given others in their place."""


def with_defaults(defaults: Iterable[Sequence[str]], given: Sequence[str]) -> list[str]:
    """The given options, and those defaults that none of them replaces."""
    named = {_name(given[i : i + 2]) for i, word in enumerate(given) if word.startswith("--")}
    return [*(word for default in defaults if _name(default) not in named for word in default), *given]


def _name(option: Sequence[str]) -> str:
    """What it sets: for --set the key, for `--no-this` what `--this` does."""
    name = option[0].partition("=")[0].replace("_", "-").replace("--no-", "--", 1)
    return f"{name} {option[1].partition('=')[0]}" if name == "--set" else name


def inherited_environment(**more: str) -> dict[str, str]:
    """For a command or a server that a test starts: this process's environment and `more`, without the tests' own
    variables, which the product would refuse as settings that it does not know, and vLLM's of `conftest.py`."""
    own = ("KVORTEX_", "VLLM_ENABLE_V1_MULTIPROCESSING")
    return {name: value for name, value in os.environ.items() if not name.startswith(own)} | more


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Server:
    """`kvortex serve` (or another command line), ready when the `with` block begins, gone when it ends."""

    def __init__(
        self,
        model: str,
        *,
        port: int | None = None,
        api_key: str | None = None,
        command: Sequence[str] | None = None,
        options: Sequence[str] = (),
        prefetch: bool = False,
        environment: Mapping[str, str] | None = None,
        ram: str = "20MB",
        log: Path,
    ) -> None:
        self.log = log
        # Off unless asked for: it does things of its own accord.
        defaults = (
            *OPTIONS,
            ("--set", f"kv_cache.ram_cache_size={ram}"),
            ("--set", f"kv_cache.prefetch_enabled={str(prefetch).lower()}"),
        )
        serve = [sys.executable, "-c", "from kvortex_cli.main import main; main()", "serve", model]
        kvortex = [*serve, *with_defaults(defaults, options)]
        self._command = command or kvortex
        self._port_is_given = port is not None
        self.port = port or free_port()
        self.env = inherited_environment(VLLM_LOGGING_LEVEL="INFO") | dict(environment or {})
        if api_key is not None:
            self.env["VLLM_API_KEY"] = api_key
        self.client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=ENDED_WITHIN_S,
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def command(self) -> list[str]:
        return [*self._command, "--port", str(self.port)]

    def __enter__(self) -> Server:
        self.start()
        try:
            self.wait_until_ready()
        except AssertionError:
            if self._port_is_given or not _TAKEN.search(self.log.read_text(errors="replace")):
                raise
            # Somebody has bound it since it was found to be free.
            self.port = free_port()
            self.client.base_url = self.url
            self.start()
            self.wait_until_ready()
        return self

    def start(self) -> None:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, env=self.env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server ended:\n{self.tail()}"
            try:
                if self.client.get("/health").status_code == 200 and self.is_listening():
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.25)
        self.kill()
        raise AssertionError(f"the server is not ready:\n{self.tail()}")

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.terminate()
        self.client.close()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def family(self) -> list[psutil.Process]:
        """The server's process and all below it."""
        try:
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def is_listening(self) -> bool:
        """It, and not whoever else has taken its port since it was found to be free."""
        return any(port == self.port for _, port in self.listening()[0])

    def listening(self) -> tuple[set[tuple[str, int]], set[str]]:
        """What the server and all below it listen on: addresses and ports; paths of Unix sockets, `@` before a name
        that is no file."""
        inet: set[tuple[str, int]] = set()
        inodes: set[str] = set()
        for process in self.family():
            try:
                inet |= _listened(process)
                inodes |= _opened(process)
            except (psutil.Error, OSError):
                if is_running(process):
                    raise
        unix = set()
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            fields = line.split(maxsplit=7)
            if int(fields[3], 16) & _ACCEPTS and f"socket:[{fields[6]}]" in inodes:
                unix.add(fields[7] if len(fields) > 7 else "")
        return inet, unix

    def terminate(self, timeout_s: float = ENDED_WITHIN_S) -> int:
        family = self.family()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        finally:
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def kill(self) -> None:
        """SIGKILL to the server and everything below it, all at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(ENDED_WITHIN_S)

    def complete(self, tokens: list[int], max_tokens: int = 4) -> str:
        answer = self.client.post(
            "/v1/completions",
            json={"prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    @contextmanager
    def streamed(self, tokens: list[int], max_tokens: int) -> Iterator[Iterator[dict[str, Any]]]:
        """The answer chunk by chunk, so that a test can act while the request is known to run."""
        body = {"prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        with self.client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            data = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))
            yield (json.loads(chunk) for chunk in data if chunk != "[DONE]")

    def stats(self) -> dict[str, Any]:
        answer = self.client.get("/kvortex/stats")
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    def settled(self) -> dict[str, Any]:
        """The statistics once no copy is in flight; requests end before their last stores do."""
        deadline = time.monotonic() + ENDED_WITHIN_S
        while True:
            stats = self.stats()
            if not stats["store"]["in_flight"] and not stats["load"]["in_flight"]:
                return stats
            assert time.monotonic() < deadline, stats
            time.sleep(0.05)

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics that are KVortex's, by their full name with labels."""
        samples = {}
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith("kvortex_"):
                name, value = line.rsplit(" ", 1)
                assert name not in samples, f"{name} is there twice"
                samples[name] = float(value)
        return samples


def is_running(process: psutil.Process) -> bool:
    """Nobody may have buried it yet: that is not running."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_line(process: psutil.Process) -> str:
    """Empty where it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def _listened(process: psutil.Process) -> set[tuple[str, int]]:
    """Addresses and ports."""
    connections = process.net_connections(kind="inet")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


def _opened(process: psutil.Process) -> set[str]:
    """What its file descriptors are."""
    opened = set()
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            opened.add(str(link.readlink()))
    return opened


def assert_all_gone(family: Sequence[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=ENDED_WITHIN_S)
    assert not alive, alive


def assert_ends_after_its_request(server: Server, number: signal.Signals) -> None:
    """The signal comes while a request runs: it gets its whole answer, and no process is left after it."""
    family = server.family()
    tokens = [3 + place % 500 for place in range(40)]
    # Thirty seconds are what `kvortex serve` gives them: on a slow machine no more than these end by then.
    with server.streamed(tokens, max_tokens=300) as chunks:
        next(chunks)
        if number is signal.SIGHUP:  # comes to every process of the terminal at once
            os.killpg(server.process.pid, number)
        else:
            server.process.send_signal(number)
        *_, last = chunks
    assert last["choices"][0]["finish_reason"] == "length"
    code = server.process.wait(ENDED_WITHIN_S)
    assert code in (0, -number, 128 + number), server.tail()
    assert_all_gone(family)


def assert_no_traceback_of_ours(log: Path) -> None:
    """vLLM's own server sometimes logs that its engine is gone while it ends (seen without KVortex's code on the
    stack, after "[shutdown] MPClient: complete"); that one is not counted. Lines of other processes may come between
    what it says and its traceback."""
    lines = log.read_text(errors="replace").splitlines()

    def is_vllms(before: list[str]) -> bool:
        return any("AsyncLLM output_handler failed" in line for line in before)

    starts = [i for i, line in enumerate(lines) if "Traceback" in line]
    ours = [lines[i : i + 12] for i in starts if not is_vllms(lines[max(0, i - 5) : i])]
    assert not ours, ours


def run_kvortex(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from kvortex_cli.main import main; main()", *args],
        capture_output=True,
        text=True,
        timeout=ENDED_WITHIN_S,
        env=inherited_environment(**env),
        check=False,
    )
