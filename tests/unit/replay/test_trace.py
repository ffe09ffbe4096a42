"""Traces as Mooncake writes them, and what is wrong with others."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from kvortex.errors import ConfigError
from kvortex.replay.trace import TracedRequest, load_trace

GOOD = '{"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 5]}'


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_line_is_a_request(tmp_path: Path) -> None:
    assert load_trace(write(tmp_path / "t.jsonl", GOOD, "", GOOD)) == [TracedRequest(1.5, 600, 7, (0, 5))] * 2


def test_gzip_is_read_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD.encode()))
    assert len(load_trace(path)) == 1


def test_the_partial_last_block_may_be_left_out(tmp_path: Path) -> None:
    assert load_trace(write(tmp_path / "t", GOOD.replace("[0, 5]", "[0]")))[0].blocks == (0,)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        (GOOD.replace("1500", '"soon"'), 'timestamp is "soon"'),
        (GOOD.replace("1500", "-1"), "timestamp is -1"),
        (GOOD.replace("1500", "true"), "timestamp is true"),
        (GOOD.replace("600", "600.5"), "input_length is 600.5, not a whole number"),
        (GOOD.replace('"output_length": 7, ', ""), "output_length is null"),
        (GOOD.replace("[0, 5]", "[0, 5, 6]"), "3 hash_ids for 600 tokens"),
        (GOOD.replace("[0, 5]", "[]"), "0 hash_ids for 600 tokens"),
        (GOOD.replace("[0, 5]", "[3, 3]"), "stands twice"),
        (GOOD.replace("[0, 5]", '["a", 5]'), "hash_ids is not a list of whole numbers"),
        (GOOD.replace("[0, 5]", "[-1, 5]"), "hash_ids is not a list of whole numbers"),
        (GOOD.replace("1500", "3"), "is earlier than the request before it"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, line)
    with pytest.raises(ConfigError) as caught:
        load_trace(path)
    assert caught.value.message.startswith(f"{path}:2: ")
    assert says in caught.value.message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    cut_short = tmp_path / "t.gz"
    cut_short.write_bytes(gzip.compress(GOOD.encode() * 100)[:-9])
    not_gzip = write(tmp_path / "u.gz", GOOD)
    not_text = tmp_path / "v"
    not_text.write_bytes(b"\xff\xfe\n")
    for path in (tmp_path / "missing", tmp_path, cut_short, not_gzip, not_text, write(tmp_path / "empty", "")):
        with pytest.raises(ConfigError, match=str(path)):
            load_trace(path)
