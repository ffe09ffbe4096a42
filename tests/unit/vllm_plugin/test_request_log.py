"""The server's log of requests: what a line says and does not say, how large it gets, what a bad disk does."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvortex.errors import UsageError
from kvortex.keys import BlockKey, block_key
from kvortex.replay.trace import load_trace
from kvortex.vllm_plugin import request_log
from kvortex.vllm_plugin.request_log import EndedRequest, RequestLog, open_request_log

BLOCK = 32


def key(number: int) -> BlockKey:
    return block_key(number.to_bytes(32, "big"), 0)


def ended(*numbers: int, input_tokens: int | None = None, at_s: float = 100.0) -> EndedRequest:
    tokens = len(numbers) * BLOCK if input_tokens is None else input_tokens
    return EndedRequest(at_s, tokens, 40, [key(n) for n in numbers])


def written(path: Path, *requests: EndedRequest, max_bytes: int = 10**6) -> list[dict[str, Any]]:
    log = RequestLog(path, max_bytes, BLOCK)
    for request in requests:
        log.add(request)
    log.close()
    return lines_of(path)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_a_request_of_a_trace(tmp_path: Path) -> None:
    """A prompt of two blocks and a half; its answer fills the third."""
    path = tmp_path / "log"
    (line,) = written(path, ended(1, 2, 3, input_tokens=80, at_s=1764472869.1234))
    assert {name: line[name] for name in ("timestamp", "input_length", "output_length", "block_size")} == {
        "timestamp": 1764472869123,
        "input_length": 80,
        "output_length": 40,
        "block_size": BLOCK,
    }
    assert (len(line["hash_ids"]), len(line["output_hash_ids"])) == (2, 1)
    (request,) = load_trace(path)
    assert request.blocks == tuple(line["hash_ids"])
    assert request.output_blocks == tuple(line["output_hash_ids"])
    assert (request.input_tokens, request.output_tokens, request.block_tokens) == (80, 40, BLOCK)


def test_equal_blocks_have_equal_numbers_and_others_do_not(tmp_path: Path) -> None:
    first, again, other = written(tmp_path / "log", ended(1, 2), ended(1, 2), ended(1, 3))
    assert first["hash_ids"] == again["hash_ids"]
    assert first["hash_ids"][0] == other["hash_ids"][0]
    assert first["hash_ids"][1] != other["hash_ids"][1]


def test_a_guessed_key_is_not_found_in_the_log(tmp_path: Path) -> None:
    """Two servers give one prompt different numbers, and no number holds a piece of its key."""
    (one,) = written(tmp_path / "one", ended(*range(1000, 1050)))
    (two,) = written(tmp_path / "two", ended(*range(1000, 1050)))
    assert set(one["hash_ids"]).isdisjoint(two["hash_ids"])
    assert all(0 <= number < 1 << 53 for number in one["hash_ids"])
    for number, block in zip(one["hash_ids"], range(1000, 1050), strict=True):
        assert number.to_bytes(7, "big") not in key(block)
        assert key(block).hex() not in (tmp_path / "one").read_text()


def test_only_its_user_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        written(tmp_path / "log", ended(1))
    finally:
        os.umask(before)
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_both_files_together_stay_within_the_bound_and_hold_the_newest(tmp_path: Path) -> None:
    path, bound = tmp_path / "log", 4000
    written(path, *(ended(n, at_s=float(n)) for n in range(200)), max_bytes=bound)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= bound
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log", "log.1"]
    times = [line["timestamp"] for file in ("log.1", "log") for line in lines_of(tmp_path / file)]
    assert times == [1000 * n for n in range(200 - len(times), 200)]
    assert len(times) > 10


def test_a_new_server_begins_a_new_file_and_keeps_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path, ended(1))
    before = path.read_text()
    assert len(written(path, ended(1), ended(1))) == 2
    assert (tmp_path / "log.1").read_text() == before


def test_a_line_longer_than_a_file_may_be_is_dropped_and_counted(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "log", 1000, BLOCK)
    log.add(ended(*range(100)))
    log.add(ended(1))
    log.close()
    assert log.counts() == {"written": 1, "dropped": {"queue_full": 0, "too_long": 1, "not_written": 0}}


def test_a_disk_that_stands_still_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer hangs in its first write; the queue takes two more, the rest is dropped, and no call waits."""
    hangs, go_on = threading.Event(), threading.Event()
    write = os.write

    def stuck(file: int, data: bytes) -> int:
        hangs.set()
        go_on.wait(60)
        return write(file, data)

    monkeypatch.setattr(request_log.os, "write", stuck)
    log = RequestLog(tmp_path / "log", 10**6, BLOCK, max_queued=2)
    log.add(ended(0))
    assert hangs.wait(60)
    put = log._queue.put

    def put_at_once(request: EndedRequest | None, block: bool = True, timeout: float | None = None) -> None:
        assert not block, "the scheduler would wait"
        put(request, block, timeout)

    with monkeypatch.context() as watched:
        watched.setattr(log._queue, "put", put_at_once)
        for n in range(1, 6):
            log.add(ended(n))
    assert log.counts()["dropped"]["queue_full"] == 3
    go_on.set()
    log.close()
    assert log.counts()["written"] == len(lines_of(tmp_path / "log")) == 3


def test_a_full_disk_leaves_whole_lines_and_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = os.write, []

    def half_of_the_second(file: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return write(file, data[: len(data) // 2] if len(calls) == 2 else data)

    monkeypatch.setattr(request_log.os, "write", half_of_the_second)
    path = tmp_path / "log"
    log = RequestLog(path, 10**6, BLOCK)
    for n in range(4):
        log.add(ended(n, at_s=float(n)))
    log.close()
    assert [line["timestamp"] for line in lines_of(path)] == [0, 3000]
    assert log.counts() == {"written": 2, "dropped": {"queue_full": 0, "too_long": 0, "not_written": 2}}


def test_a_folder_that_goes_away_is_counted_and_its_return_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    log = RequestLog(folder / "log", 600, BLOCK)
    log.add(ended(1))
    while log.counts()["written"] < 1:
        threading.Event().wait(0.01)
    folder.rename(tmp_path / "elsewhere")
    for n in range(5):
        log.add(ended(n))
    while not log.counts()["dropped"]["not_written"]:
        threading.Event().wait(0.01)
    folder.mkdir()
    log.add(ended(7, at_s=7.0))
    log.close()
    assert lines_of(folder / "log")[-1]["timestamp"] == 7000


def test_two_servers_cannot_share_one(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = RequestLog(path, 10**6, BLOCK)
    with pytest.raises(UsageError, match="another server writes the request log"):
        RequestLog(path, 10**6, BLOCK)
    log.add(ended(1))
    log.close()
    assert len(lines_of(path)) == 1
    assert not (tmp_path / "log.1").exists()


def test_what_is_no_log_is_neither_moved_nor_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(UsageError, match="is there and is no request log"):
        RequestLog(path, 10**6, BLOCK)
    assert path.read_text() == "mine"


@pytest.mark.parametrize(("engine_id", "name"), [("a1b2", "log.jsonl"), ("a1b2_dp1", "log.dp1.jsonl")])
def test_each_engine_of_a_data_parallel_server_has_its_own(tmp_path: Path, engine_id: str, name: str) -> None:
    settings = SimpleNamespace(request_log=str(tmp_path / "log.jsonl"), request_log_size=10**6)
    facts: Any = SimpleNamespace(settings=settings, engine_id=engine_id)
    log = open_request_log(facts, BLOCK)
    assert log is not None
    log.close()
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_without_a_file_there_is_no_log() -> None:
    facts: Any = SimpleNamespace(settings=SimpleNamespace(request_log=None), engine_id="a")
    assert open_request_log(facts, BLOCK) is None
