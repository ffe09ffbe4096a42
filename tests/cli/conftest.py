"""Runs the `kvortex` command line as a user would, with nothing of this machine's environment in it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvortex_cli.main import main


@dataclass(frozen=True)
class Run:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable that a configuration reads, and an empty current directory."""
    for variable in list(os.environ):
        if variable.startswith(("KVORTEX_", "VLLM_", "HF_TOKEN")):
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
