"""`kvortex inspect` on servers that answer, answer with something else, or not at all; in a pipe and in a terminal."""

from __future__ import annotations

import json
import termios

import pytest

from kvortex.cache.holdings import BlockOrder
from kvortex.cache.sessions.line import MOST_SESSIONS
from kvortex_cli import inspect
from kvortex_cli.inspect import Order
from tests.cli.terminal import Terminal
from tests.fakes.stats_document import busy_ledger, stats_document
from tests.fakes.stub_server import Behaviour, stub_server


@pytest.fixture
def server():
    with stub_server([Behaviour.GOOD]) as running:
        running.stats = stats_document(busy_ledger(1000))
        yield running


BLOCKS = {
    "by": "idle",
    "top": 2,
    "engines": [
        {
            "ram": {
                **{"block_bytes": 10**6, "capacity_blocks": 8000, "examined_slots": 8000, "blocks": 2000},
                "by_idle": [{"under_s": 60, "blocks": 1500}, {"under_s": None, "blocks": 500}],
                "by_uses": [{"from_uses": uses, "blocks": blocks} for uses, blocks in ((0, 100), (1, 700), (2, 1200))],
                "first": [
                    {"key": "00ff", "group": 0, "slot": 7, "age_s": 7200.0, "idle_s": 180.0, "uses": 3, "pins": 0}
                ],
            },
            "vram": {
                **{"block_bytes": 10**6, "resident_blocks": 3, "clean_blocks": 1, "waiting_blocks": 2},
                "first_waiting": [{"key": "abcd", "group": 0, "block_id": 11, "idle_s": 5.0, "in_use": True}],
            },
        }
    ],
}


def test_stats_say_whether_it_helps_and_why_not_always(kvortex, server):
    run = kvortex("inspect", "--url", server.url)
    assert run.code == 0, run.err
    assert run.out.startswith("The cache is helping. Of 1,000,000 prompt tokens RAM gave 50.0% and VRAM 10.0%")
    assert "150,000 computed tokens were in RAM and were given up" in run.out
    rows = {row.split("│")[1].strip(): row.split("│")[2].strip() for row in run.out.splitlines() if row.count("│") == 4}
    assert rows["given up by RAM"] == "150,000"
    assert rows["new text of a prompt"] == "200,000"
    assert rows["computed"] == "400,000"


def test_blocks_that_changed_in_ram_are_said_first_in_words(kvortex, server):
    ledger = busy_ledger(1000)
    ledger.verified_blocks = 70_000
    server.stats = stats_document(ledger)
    server.stats["verify"]["mode"] = "all"
    quiet = " ".join(kvortex("inspect", "--url", server.url).out.split())
    assert quiet.startswith("The cache is helping.")
    assert "9,000 evicted so far, 70,000 verified │" in quiet
    ledger.corrupt_blocks = 3
    server.stats |= stats_document(ledger)
    server.stats["verify"]["mode"] = "sample"
    server.stats["tiers"]["ram"]["quarantined_blocks"] = 2
    said = " ".join(kvortex("inspect", "--url", server.url).out.split())
    assert said.startswith("RAM does not keep what is stored in it: 3 blocks were found changed before a load.")
    assert "2 of RAM's blocks are out of use" in said
    assert "docs/verification.md" in said
    assert "70,000 verified, 3 found changed, 2 out of use" in said
    assert "The cache is helping." in said
    with Terminal("inspect", "--watch", "--every", "0.2", "--url", server.url) as terminal:
        rows = terminal.wait_for(lambda rows: fits(rows, 24))
        assert "RAM does not keep what is stored in it: 3 blocks had changed" in rows[3], rows


def test_blocks_are_shown_by_age_and_use(kvortex, server):
    server.blocks = BLOCKS
    run = kvortex("inspect", "blocks", "--top", "2", "--url", server.url)
    assert run.code == 0, run.err
    assert server.asked[-1] == "/kvortex/blocks?top=2&by=idle"
    for text in ("under 60 s", "1,500", "never again", "once", "2 times or more", "1,200", "00ff", "2 h ago", "abcd"):
        assert text in run.out, text
    assert json.loads(kvortex("inspect", "blocks", "--json", "--url", server.url).out) == BLOCKS


def test_the_orders_of_the_command_are_those_of_the_server():
    assert [order.value for order in Order] == [order.value for order in BlockOrder]
    assert inspect.MOST_SESSIONS == MOST_SESSIONS


@pytest.mark.parametrize(
    "arguments", [["blocks", "--by", "colour"], ["blocks", "--top", "0"], ["blocks", "--top", "1001"], ["colours"]]
)
def test_what_is_not_there_is_refused_with_exit_code_2(kvortex, server, arguments):
    assert kvortex("inspect", *arguments, "--url", server.url).code == 2
    assert server.asked == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--top", "10"], "--top goes with blocks or sessions"),
        (["stats", "--by", "idle"], "--by goes with blocks"),
        (["sessions", "--by", "age"], "--by goes with blocks"),
        (["sessions", "--top", "500"], "--top: takes at most 100 for sessions, not 500"),
        (["--every", "2"], "--every goes with --watch"),
        (["blocks", "--every", "5"], "--every goes with --watch"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(kvortex, server, arguments, says):
    run = kvortex("inspect", *arguments, "--url", server.url)
    assert (run.code, run.out) == (2, "")
    assert run.err.startswith(f"error: {says}\n")
    assert server.asked == []


def test_watching_needs_a_terminal(kvortex, server):
    run = kvortex("inspect", "--watch", "--url", server.url)
    assert run.code == 2
    assert "needs a terminal" in run.err
    assert kvortex("inspect", "--watch", "--json", "--url", server.url).code == 2


def fits(rows: list[str], lines: int) -> bool:
    return rows[0].startswith("stub/model") and len(rows) == lines and "q leaves" in rows[-1]


def test_a_screen_of_80_by_24_shows_it_all_follows_the_server_and_gives_the_terminal_back(server):
    with Terminal("inspect", "--watch", "--every", "0.2", "--url", server.url) as terminal:
        rows = terminal.wait_for(lambda rows: fits(rows, 24))
        for text in ("from RAM", "500,000", "given up by RAM", "VRAM", "RAM evicted", "live, every 0.2 s"):
            assert any(text in row for row in rows), terminal.text
        server.stats = stats_document(busy_ledger(2000), uptime_s=101.0)
        terminal.wait_for(lambda rows: any("1,000,000" in row for row in rows))
        assert b"\x1b[?1049h" in terminal.received, "on a screen of its own"
        terminal.type("q")
        assert terminal.wait_for_end() == 0
        assert b"\x1b[?1049l" in terminal.received
        assert terminal.received.rindex(b"\x1b[?25h") > terminal.received.rindex(b"\x1b[?25l"), "the cursor is back"


@pytest.mark.parametrize(("columns", "lines"), [(120, 40), (50, 24), (80, 12), (40, 10)])
def test_a_terminal_resized_while_it_runs_is_filled_anew_at_once(server, columns, lines):
    with Terminal("inspect", "--watch", "--every", "3600", "--url", server.url) as terminal:
        terminal.wait_for(lambda rows: fits(rows, 24))
        terminal.resize(columns, lines)
        rows = terminal.wait_for(lambda rows: fits(rows, lines))
        assert max(len(row) for row in rows) <= columns
        terminal.type("q")
        assert terminal.wait_for_end() == 0


def test_a_server_that_goes_away_and_comes_back_is_watched_on(server):
    with Terminal("inspect", "--watch", "--every", "0.2", "--url", server.url) as terminal:
        terminal.wait_for(lambda rows: fits(rows, 24))
        kept, server.stats = server.stats, None
        rows = terminal.wait_for(lambda rows: "no answer for" in rows[-1])
        assert any("500,000" in row for row in rows), "what was known last stays"
        server.stats = kept
        terminal.wait_for(lambda rows: "live" in rows[-1])


def test_counters_that_begin_anew_are_no_negative_rates(server):
    with Terminal("inspect", "--watch", "--every", "0.2", "--url", server.url) as terminal:
        terminal.wait_for(lambda rows: fits(rows, 24) and any("500,000" in row for row in rows))
        server.stats = stats_document(busy_ledger(10), uptime_s=200.0)
        rows = terminal.wait_for(lambda rows: fits(rows, 24) and any("5,000" in row and "RAM" in row for row in rows))
        from_ram = next(row for row in rows if row.startswith("from RAM"))
        assert from_ram.split()[2] in ("-", "0"), from_ram


def test_ctrl_c_leaves_and_the_terminal_echoes_again(server):
    with Terminal("inspect", "--watch", "--every", "3600", "--url", server.url) as terminal:
        terminal.wait_for(lambda rows: fits(rows, 24))
        assert not termios.tcgetattr(terminal._master)[3] & termios.ECHO
        terminal.type("\x03")
        terminal.wait_for_end()
        assert termios.tcgetattr(terminal._master)[3] & termios.ECHO
        assert b"Traceback" not in terminal.received


def test_blocks_are_watched_too(server):
    server.blocks = BLOCKS
    with Terminal("inspect", "blocks", "--watch", "--every", "0.2", "--url", server.url) as terminal:
        terminal.wait_for(lambda rows: "q leaves" in rows[-1] and any("00ff" in row for row in rows))


def test_a_wrong_address_is_a_message_and_no_screen():
    with Terminal("inspect", "--watch", "--url", "http://127.0.0.1:9") as terminal:
        assert terminal.wait_for_end() == 1
        assert b"no answer from" in terminal.received
        assert b"\x1b[?1049h" not in terminal.received
