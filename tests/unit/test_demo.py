"""What of examples/ needs no vLLM: the demo's arithmetic, its event stream, and the end of its servers."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of examples/ as its neighbours do; forgotten after the test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == EXAMPLES:
            del sys.modules[name]


@pytest.fixture
def demo(example: Callable[[str], ModuleType]) -> Any:
    return example("demo")


@pytest.fixture
def conversation(example: Callable[[str], ModuleType]) -> Any:
    return example("conversation")


@pytest.fixture
def server(example: Callable[[str], ModuleType]) -> Any:
    return example("server")


def turn(demo: Any, *, number: int = 2, text: str = "yes", plain_text: str = "yes", **tokens: int) -> Any:
    counted = {"queried": 100, "vram_hit": 10, "ram_hit": 70, "computed": 20} | tokens
    return demo.Turn(
        conversation="A",
        number=number,
        plain=demo.Answer(plain_text, 100, 2.0),
        kvortex=demo.Answer(text, 100, 0.5),
        tokens=demo.Tokens(**counted),
    )


# --- what counts as a good run ------------------------------------------------------------------------------


def test_a_good_run_has_no_problems(demo: Any) -> None:
    assert demo.find_problems([turn(demo)]) == []


def test_another_text_with_kvortex_is_a_problem(demo: Any) -> None:
    assert "KVortex 'no'" in demo.find_problems([turn(demo, text="no")])[0]


def test_a_queried_token_that_is_counted_nowhere_is_a_problem(demo: Any) -> None:
    assert "not every queried token" in demo.find_problems([turn(demo, computed=19)])[0]


def test_a_run_that_never_hits_ram_is_a_problem(demo: Any) -> None:
    assert demo.find_problems([turn(demo, ram_hit=0, computed=90)]) == ["no prompt token came from RAM"]


def test_tokens_are_counted_from_one_reading_to_the_next(demo: Any) -> None:
    assert demo.Tokens(9, 4, 3, 2).since(demo.Tokens(5, 2, 2, 1)) == demo.Tokens(4, 2, 1, 1)


def test_first_turns_do_not_count_in_the_median(demo: Any) -> None:
    slow = demo.Answer("yes", 100, 99.0)
    first = dataclasses.replace(turn(demo, number=1), plain=slow, kvortex=slow)
    assert demo.median_ttft_s([first, turn(demo)]) == (2.0, 0.5)


def test_the_data_names_both_servers_figures(demo: Any) -> None:
    data = demo.as_data([turn(demo)], {"kvortex": "1", "vllm": "2"})
    assert data["turns"] == [
        {
            "conversation": "A",
            "turn": 2,
            "prompt_tokens": 100,
            "vram_hit": 10,
            "ram_hit": 70,
            "computed": 20,
            "ttft_s": 0.5,
            "ttft_none_s": 2.0,
            "text": "yes",
            "text_none": "yes",
        }
    ]
    assert (data["ttft_median_s"], data["ttft_none_median_s"]) == (0.5, 2.0)
    assert data["stats"] == {"kvortex": "1", "vllm": "2"}


# --- what is said -------------------------------------------------------------------------------------------


def test_a_conversation_says_the_same_in_every_run(conversation: Any) -> None:
    assert conversation.user_message("A", 1) == conversation.user_message("A", 1)


def test_conversations_share_no_beginning_longer_than_their_names(conversation: Any) -> None:
    one, other = conversation.user_message("A", 1), conversation.user_message("B", 1)
    assert (one[:9], other[:9]) == ("Logbook A", "Logbook B")


def test_an_event_stream_line_without_data_is_no_event(conversation: Any) -> None:
    assert [conversation.parse_event(line) for line in ("", ": ping", "data: [DONE]")] == [{}, {}, {}]


def test_an_error_inside_the_stream_is_an_error(conversation: Any) -> None:
    with pytest.raises(conversation.RequestError, match="engine died"):
        conversation.parse_event('data: {"error": {"message": "engine died"}}')


# --- servers come and go ------------------------------------------------------------------------------------


@pytest.fixture
def pretend_kvortex(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a Python program in the place of the `kvortex` command; it has PRELUDE's names."""

    def install(body: str) -> None:
        program = tmp_path / "kvortex"
        program.write_text(f"#!{sys.executable}\n{PRELUDE}\n{textwrap.dedent(body)}\n")
        program.chmod(0o755)
        monkeypatch.setattr(server, "kvortex", lambda: str(program))

    return install


PRELUDE = """
import http.server, os, signal, subprocess, sys
port = int(sys.argv[sys.argv.index("--port") + 1])

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass

def serve_health():
    http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""


def gone(pid: int) -> bool:
    """Whether the process has ended, given a moment: as an orphan it is reaped by somebody else."""
    for _ in range(1000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_a_server_is_ready_inside_its_block_and_gone_after_it(server: Any, pretend_kvortex: Any) -> None:
    pretend_kvortex("print(os.getpid(), flush=True); serve_health()")
    with server.Server(["model"], say=lambda _: None) as running:
        assert running.http.get("/health").status_code == 200
        pid = int(running.log.read_text())
    assert gone(pid)


def test_what_a_server_leaves_behind_is_killed_with_it(server: Any, pretend_kvortex: Any) -> None:
    pretend_kvortex("""
        print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
        serve_health()
    """)
    with server.Server(["model"], say=lambda _: None) as running:
        child_pid = int(running.log.read_text())
    assert gone(child_pid)


def test_a_server_that_ignores_sigterm_is_killed(
    server: Any, pretend_kvortex: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STOPPED_WITHIN_S", 0.2)
    pretend_kvortex("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        serve_health()
    """)
    with server.Server(["model"], say=lambda _: None) as running:
        pid = int(running.log.read_text())
    assert gone(pid)


def test_an_error_inside_the_block_stops_the_server_too(server: Any, pretend_kvortex: Any) -> None:
    pretend_kvortex("print(os.getpid(), flush=True); serve_health()")
    running = server.Server(["model"], say=lambda _: None)

    def interrupted() -> None:
        with running:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert gone(int(running.log.read_text()))


def test_a_server_that_dies_at_start_shows_the_end_of_its_log(server: Any, pretend_kvortex: Any) -> None:
    pretend_kvortex('sys.exit("no such model")')
    with pytest.raises(server.ServerError, match=r"died \(exit 1\)(.|\n)*no such model"):
        server.Server(["model"], say=lambda _: None).__enter__()


def test_a_server_that_is_never_ready_is_given_up_and_stopped(
    server: Any, pretend_kvortex: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "READY_WITHIN_S", 1.0)
    pretend_kvortex("signal.pause()")
    never_ready = server.Server(["model"], say=lambda _: None)
    with pytest.raises(server.ServerError, match="not ready"):
        never_ready.__enter__()
    assert gone(never_ready._process.pid)


def test_an_error_inside_the_block_shows_the_end_of_the_servers_log(server: Any, pretend_kvortex: Any) -> None:
    pretend_kvortex("""
        Health.do_POST = lambda self: (print("out of memory", flush=True), os._exit(3))
        serve_health()
    """)
    said: list[str] = []
    running = server.Server(["model"], say=said.append)

    def asked() -> None:
        with running:
            running.http.post("/v1/chat/completions")

    with pytest.raises(httpx.TransportError):
        asked()
    assert said[-1].endswith("out of memory")
