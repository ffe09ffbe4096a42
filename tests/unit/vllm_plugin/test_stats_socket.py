"""Questions between the HTTP process and the engine, over the real socket."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvortex.errors import UsageError
from kvortex.vllm_plugin import stats_socket
from kvortex.vllm_plugin.stats_socket import StatsServer, StatsUnavailableError, ask_engine, socket_name


@pytest.fixture
def engine_id():
    name = f"test-{uuid.uuid4().hex}"
    server = StatsServer(name, {"stats": lambda: {"n": 1}, "blocks": echo})
    yield name
    server.close()


def echo(**parameters: Any) -> dict[str, Any]:
    return parameters


def test_a_question_is_answered_with_its_parameters(engine_id):
    assert ask_engine(engine_id, "stats") == {"n": 1}
    assert ask_engine(engine_id, "blocks", top=3, by="age") == {"top": 3, "by": "age"}


def test_a_question_that_fails_is_logged_and_the_next_one_is_answered(engine_id, caplog):
    with pytest.raises(StatsUnavailableError, match="without an answer"):
        ask_engine(engine_id, "stats", no_such_parameter=1)
    assert "could not be answered" in caplog.text
    assert ask_engine(engine_id, "stats") == {"n": 1}


def test_an_unknown_question_gets_no_answer_and_the_next_one_does(engine_id):
    with pytest.raises(StatsUnavailableError, match="without an answer"):
        ask_engine(engine_id, "colour")
    assert ask_engine(engine_id, "stats") == {"n": 1}


@pytest.mark.parametrize("line", [b"", b"not JSON\n", b"[1]\n", b"\xff\xfe\n", b'{"ask": ["stats"]}\n', b"x" * 9000])
def test_what_is_no_question_closes_the_connection_only(engine_id, line):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(socket_name(engine_id))
        connection.sendall(line)
        connection.shutdown(socket.SHUT_WR)
        try:
            assert connection.recv(100) == b""
        except ConnectionResetError:
            pass  # closed before all of it was read
    assert ask_engine(engine_id, "stats") == {"n": 1}


def test_one_who_connects_and_says_nothing_holds_others_up_for_a_bounded_time(engine_id, monkeypatch):
    monkeypatch.setattr(stats_socket, "QUESTION_TIMEOUT", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(socket_name(engine_id))
        assert ask_engine(engine_id, "stats") == {"n": 1}


def test_a_second_server_of_one_engine_id_is_refused_with_the_process_that_has_it(engine_id):
    """Field trial B67."""
    with pytest.raises(UsageError, match=rf"process {os.getpid()}, has the engine id '{engine_id}'") as refused:
        StatsServer(engine_id, {"stats": lambda: {"n": 2}})
    assert "engine_id" in refused.value.hint
    assert ask_engine(engine_id, "stats") == {"n": 1}


def test_of_two_that_start_at_once_one_has_the_id_each_time():
    """Field trial B67: 20 tries."""
    for number in range(20):
        name = f"test-{uuid.uuid4().hex}"
        both = threading.Barrier(2)

        def start(answer: int, name: str = name, both: threading.Barrier = both) -> StatsServer | UsageError:
            both.wait(10)
            try:
                return StatsServer(name, {"stats": lambda: {"n": answer}})
            except UsageError as refused:
                return refused

        with ThreadPoolExecutor(2) as pool:
            started = list(pool.map(start, (1, 2)))
        running = [server for server in started if isinstance(server, StatsServer)]
        assert len(running) == 1, (number, started)
        assert ask_engine(name, "stats") == {"n": 1 + started.index(running[0])}
        running[0].close()


def test_two_servers_do_not_meet_and_one_that_ends_leaves_the_other(engine_id):
    """Field trial B67."""
    other = StatsServer(f"{engine_id}-b", {"stats": lambda: {"n": 2}})
    assert (ask_engine(engine_id, "stats"), ask_engine(f"{engine_id}-b", "stats")) == ({"n": 1}, {"n": 2})
    other.close()
    assert ask_engine(engine_id, "stats") == {"n": 1}
    with pytest.raises(StatsUnavailableError, match="does not answer"):
        ask_engine(f"{engine_id}-b", "stats")
    StatsServer(f"{engine_id}-b", {}).close()  # its address is free again


def test_two_long_ids_that_begin_alike_are_two_addresses():
    names = {socket_name("x" * 5000 + end) for end in ("a", "b")}
    assert len(names) == 2
    assert all(len(name.encode()) <= 107 for name in names)


@pytest.mark.parametrize("side", ["who asks", "who answers"])
def test_another_user_is_neither_answered_nor_believed(engine_id, monkeypatch, side):
    """Field trial B67: another user's process may have taken the address of an engine that is gone."""
    asked = []
    other = StatsServer(f"{engine_id}-other", {"stats": lambda: asked.append(1) or {}})
    asker = threading.get_ident()
    real = stats_socket._peer

    def peer(connection: socket.socket) -> tuple[int, int]:
        foreign = (threading.get_ident() == asker) == (side == "who answers")
        return (real(connection)[0], os.getuid() + 1) if foreign else real(connection)

    monkeypatch.setattr(stats_socket, "_peer", peer)
    with pytest.raises(StatsUnavailableError):
        ask_engine(f"{engine_id}-other", "stats")
    other.close()
    assert not asked


def test_an_engine_that_is_gone_is_told():
    with pytest.raises(StatsUnavailableError, match="does not answer"):
        ask_engine("nobody", "stats")
