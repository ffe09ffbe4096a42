"""Traces as Mooncake writes them, and what is wrong with others."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from kvortex.errors import ConfigError
from kvortex.replay.trace import TracedRequest, coarser, load_trace

GOOD = '{"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 5]}'


LOGGED = (
    '{"timestamp": 1500, "input_length": 80, "output_length": 50, "block_size": 32, "hash_ids": [7, 8], '
    '"output_hash_ids": [9]}'
)


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
        (GOOD.replace("{", '{"block_size": 0, '), "block_size is 0"),
        (GOOD.replace("{", '{"block_size": "128", '), 'block_size is "128"'),
        (GOOD.replace("{", '{"block_size": 512.5, '), "block_size is 512.5"),
        (GOOD.replace("{", '{"output_hash_ids": [5], '), "stands twice"),
        (GOOD.replace("{", '{"output_hash_ids": null, '), "output_hash_ids is not a list"),
        (LOGGED, "blocks of 32 tokens, after blocks of 512"),
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


# ---- a server's own log


def test_a_log_says_how_large_its_blocks_are_and_which_the_answer_filled(tmp_path: Path) -> None:
    (request,) = load_trace(write(tmp_path / "log", LOGGED))
    assert request == TracedRequest(1.5, 80, 50, (7, 8), (9,), 32)
    assert request.all_blocks == (7, 8, 9)


def test_a_log_is_in_the_order_in_which_requests_ended_and_is_sorted(tmp_path: Path) -> None:
    requests = load_trace(write(tmp_path / "log", LOGGED, LOGGED.replace("1500", "700")))
    assert [request.arrival_s for request in requests] == [0.7, 1.5]


def test_a_last_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for end in (LOGGED[:-1], LOGGED[:40], LOGGED[:1]):
        path.write_text(f"{LOGGED}\n{end}")
        assert len(load_trace(path)) == 1
    path.write_text(f"{LOGGED}\n{LOGGED}")
    assert len(load_trace(path)) == 2
    path.write_text(f"{LOGGED}\n{LOGGED[:40]}\n{LOGGED}\n")
    with pytest.raises(ConfigError, match=f"{path}:2: is not JSON"):
        load_trace(path)


# ---- larger blocks


def test_a_larger_block_is_named_by_its_last_part() -> None:
    """A trace that gives the rest of a prompt a number goes on doing so."""
    whole = TracedRequest(0.0, 4 * 512, 7, (1, 2, 3, 4))
    rest = TracedRequest(0.0, 4 * 512 + 5, 7, (1, 2, 3, 4, 5))
    short = TracedRequest(0.0, 600, 7, (1, 2))
    no_rest = TracedRequest(0.0, 3 * 512 + 5, 7, (1, 2, 3))
    found = coarser([whole, rest, short, no_rest], 1024)
    assert [request.blocks for request in found] == [(2, 4), (2, 4, 5), (2,), (2,)]
    assert {request.block_tokens for request in found} == {1024}


def test_a_larger_block_may_begin_in_the_prompt_and_end_in_the_answer() -> None:
    """80 tokens of prompt are one block of 64; the next is complete with the answer's first block."""
    logged = TracedRequest(0.0, 3 * 32 + 5, 100, (1, 2, 3), (4, 5, 6), 32)
    (request,) = coarser([logged], 64)
    assert (request.blocks, request.output_blocks) == ((2,), (4, 6))
