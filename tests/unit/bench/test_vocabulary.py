"""Which token ids prompts are made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvortex.bench.vocabulary import Vocabulary, parse_vocabulary, vocabulary_of, vocabulary_of_model
from kvortex.bench.workload import Workload
from kvortex.errors import UsageError


def test_a_range_names_both_its_ends() -> None:
    assert parse_vocabulary("10-20") == Vocabulary(10, 21)
    assert str(parse_vocabulary("10-20")) == "10-20"


@pytest.mark.parametrize("text", ["", "5", "20-10", "a-b", "-5-7", "1-2-3"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--vocab"):
        parse_vocabulary(text)


@pytest.mark.parametrize(("size", "expected"), [(128256, (1000, 30000)), (8000, (1000, 8000)), (512, (128, 512))])
def test_a_small_vocabulary_has_fewer(size: int, expected: tuple[int, int]) -> None:
    vocabulary = vocabulary_of(size)
    assert (vocabulary.low, vocabulary.high) == expected


@pytest.mark.parametrize("config", [{"vocab_size": 512}, {"text_config": {"vocab_size": 512}}])
def test_the_models_own_configuration_says_it(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert vocabulary_of_model(str(tmp_path)) == Vocabulary(128, 512)


def test_a_model_that_cannot_be_read_from_here_gets_the_usual_ids() -> None:
    assert vocabulary_of_model("/no/such/model") == Vocabulary(1000, 30000)


def test_prompts_are_drawn_from_it() -> None:
    workload = Workload(first=500, vocabulary=Vocabulary(10, 13))
    assert set(workload.user_tokens(0, 1)) == {10, 11, 12}
    assert workload.user_tokens(0, 1) != workload.warm_up_prompt()
    assert workload.user_tokens(0, 1) != workload.user_tokens(1, 1)


def test_a_conversations_length_is_known_before() -> None:
    assert Workload(turns=4, first=8192, add=512, gen=128).longest == 8192 + 3 * 640 + 128
    assert Workload(turns=1, first=10, add=5, gen=2).longest == 12
