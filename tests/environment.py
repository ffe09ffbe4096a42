"""Keeps from a test what the machine and the shell that it runs in would change of its outcome."""

from __future__ import annotations

import os
import socket

import pytest

_OF_THE_TERMINAL = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")

ROOMY = (
    "import kvortex.hardware.memory as _memory, kvortex.leftovers as _leftovers\n"
    "_memory.read_shared_memory = lambda: None\n"
    "_leftovers.remove_leftovers = lambda environment: _leftovers.Removed()\n"
)
"""Before the code of a process that serves: no /dev/shm that could be too small, nothing there to remove."""


def drop_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the terminal, and KVORTEX_*: the tests have such of their own, which the product refuses as unknown."""
    for variable in list(os.environ):
        if variable.startswith("KVORTEX_") or variable in _OF_THE_TERMINAL:
            monkeypatch.delenv(variable)


def skip_without_address(host: str) -> None:
    """Skips the test on a machine without this address, such as one without IPv6."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except OSError:
        pytest.skip(f"this machine has no {host}")
