"""What benchmarks, examples and tests for GPUs import of KVortex exists: nothing of them but this runs in CI."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [file for folder in ("benchmarks", "examples", "tests/gpu", "tools") for file in (ROOT / folder).glob("*.py")]


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what would be its package is none
        return False


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_every_name_imported_from_kvortex_exists(file: Path) -> None:
    imports = [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("kvortex.", "kvortex_cli."))
    ]
    missing = []
    for node in imports:
        module = pytest.importorskip(str(node.module), exc_type=ModuleNotFoundError)
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            if not hasattr(module, alias.name) and not is_module(name):
                missing.append(name)
    assert not missing, missing


def test_control_a_name_that_is_gone_is_found() -> None:
    assert not hasattr(importlib.import_module("kvortex.vllm_plugin.stats_socket"), "read_stats")
