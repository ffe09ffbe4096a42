"""`kvortex --help` is quick and imports nothing heavy."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

HEAVY = (
    *("torch", "vllm", "transformers", "huggingface_hub", "numpy", "httpx", "yaml"),
    *("pynvml", "psutil", "prometheus_client"),
)
COMMANDS = ("doctor", "init", "serve", "inspect", "plan", "bench")
PROBE = """
import json, sys
from kvortex_cli.main import main
try:
    main()
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("arguments", [[], *([command] for command in COMMANDS)])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    done = run(*arguments, "--help")
    assert done.returncode == 0
    assert "Usage: " in done.stdout
    assert set(json.loads(done.stderr)).isdisjoint(HEAVY)


ALL_COMMANDS = [
    *([command] for command in COMMANDS if command != "bench"),
    *(["bench", command] for command in ("transfer", "serve", "compare", "replay")),
]


def test_the_commands_here_are_all_there_are() -> None:
    """So that a new command is held to what the tests below ask of each."""
    from kvortex_cli.bench import bench_app
    from kvortex_cli.main import app

    named = {tuple(command) for command in ALL_COMMANDS}
    assert named == {(str(c.name),) for c in app.registered_commands} | {
        ("bench", str(c.name)) for c in bench_app.registered_commands
    }


@pytest.mark.parametrize("command", ALL_COMMANDS, ids=" ".join)
def test_help_shows_an_example(command: list[str]) -> None:
    assert f"Example: kvortex {' '.join(command)} " in " ".join(run(*command, "--help").stdout.split())


@pytest.mark.parametrize("command", ALL_COMMANDS, ids=" ".join)
def test_a_typo_in_an_option_names_the_right_one(kvortex: Any, command: list[str]) -> None:
    offered = re.findall(r"^\s+(?:-\w, )?(--[a-z-]+)", run(*command, "--help").stdout, re.MULTILINE)
    assert offered
    for option in offered:
        typo = option[:-2] + option[-1] + option[-2]
        if typo == option:
            continue
        result = kvortex(*command, typo)
        assert (result.code, result.out) == (2, "")
        assert option in re.findall(r"--[a-z-]+", result.err.replace(typo, "")), result.err


def test_help_names_every_command() -> None:
    out = run("--help").stdout
    assert all(f"\n  {command} " in out for command in COMMANDS)


def test_serve_help_tells_what_size_is_meant_and_what_is_no_kv_offload() -> None:
    out = " ".join(run("serve", "--help").stdout.split())
    assert "for the whole server, split over its GPUs" in out
    assert "not vLLM's --cpu-offload-gb, which moves weights, not KV" in out


def test_the_version_is_told() -> None:
    from kvortex import __version__

    assert run("--version").stdout == f"kvortex {__version__}\n"


def test_without_a_command_help_goes_to_stderr_and_the_call_was_wrong() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: kvortex" in done.stderr


def test_an_unknown_command_is_one_message() -> None:
    done = run("serv")
    assert done.returncode == 2
    assert done.stderr.startswith("error: No such command 'serv'")
