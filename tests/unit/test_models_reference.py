"""docs/models.md is what the rows say that the end-to-end tests run, and each test that it names is there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.e2e.model_table import FEATURES, MODELS
from tools.write_models_reference import PAGE, page

ROOT = Path(__file__).parent.parent.parent


def test_the_models_page_is_what_the_rows_say():
    text = PAGE.read_text()
    assert text == page(text), "run tools/write_models_reference.py"


def test_a_row_that_changes_is_seen(monkeypatch):
    monkeypatch.setattr("tools.write_models_reference.MODELS", MODELS[1:])
    text = PAGE.read_text()
    assert text != page(text)


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row.name)
def test_the_test_of_a_feature_is_there(row):
    path, _, name = row.test.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
