"""The list of tools/check_mutations.py is up to date. That each is caught the tool says, in some minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_mutations import MUTATIONS, Mutation, mutated

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_what_is_broken_stands_in_the_source_once(mutation: Mutation) -> None:
    source = (ROOT / mutation.file).read_text()
    broken = mutated(source, mutation)
    compile(broken, mutation.file, "exec")
    assert broken != source
    file, *chosen = mutation.tests.split()
    text = (ROOT / file).read_text()
    assert not chosen or any(chosen[1] in line for line in text.splitlines() if line.startswith("def test_"))


def test_every_invariant_is_broken() -> None:
    assert {mutation.invariant for mutation in MUTATIONS} == set(range(1, 11))
