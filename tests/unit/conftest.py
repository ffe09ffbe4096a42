"""What holds for every unit test."""

from __future__ import annotations

import pytest

from tests.environment import drop_variables


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in it that changes a command's words or what it is set to."""
    drop_variables(monkeypatch)
