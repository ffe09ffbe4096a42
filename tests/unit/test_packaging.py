"""What an sdist carries: all that its own tests, pages and Makefile use."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ALWAYS = {"pyproject.toml"}  # hatchling adds it


def test_the_sdist_carries_the_whole_checkout():
    git = shutil.which("git") or pytest.skip("no git on this machine")
    listed = subprocess.run([git, "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    if not listed:
        pytest.skip("not a checkout: nothing says what belongs to it")
    tracked = {path.split("/")[0] for path in listed.split() if not path.startswith(".")}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert set(build["targets"]["sdist"]["include"]) | ALWAYS == tracked
