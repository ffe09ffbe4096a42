"""Runs the `kvortex` command line as a user would, with nothing of this machine's environment in it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvortex.hardware.memory import SharedMemory
from kvortex.leftovers import Removed
from kvortex_cli.main import main
from tests.environment import drop_variables


@dataclass(frozen=True)
class Run:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in it that changes a command's words or what it is set to."""
    drop_variables(monkeypatch)


@pytest.fixture(autouse=True)
def roomy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A /dev/shm with room, and nothing in it that a killed server left."""
    monkeypatch.setattr("kvortex.hardware.memory.read_shared_memory", lambda: SharedMemory(8 << 30, 8 << 30))
    monkeypatch.setattr("kvortex.leftovers.remove_leftovers", lambda environment: Removed())


@pytest.fixture
def clean_environment(plain_environment: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable that a configuration reads, and an empty current directory."""
    for variable in list(os.environ):
        if variable.startswith(("VLLM_", "HF_TOKEN")):
            monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def kvortex(
    clean_environment: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Run]:
    """Runs the command line in this process."""

    def run(*arguments: str) -> Run:
        monkeypatch.setattr(sys, "argv", ["kvortex", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return Run(int(ended.value.code or 0), out, err)

    return run
