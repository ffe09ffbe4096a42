"""`kvortex bench serve` and `bench compare` as a user calls them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvortex.bench import compare as compare_module
from kvortex_cli.bench_compare import take_options
from tests.cli.test_help import HEAVY, run
from tests.fakes.stub_server import Behaviour, stub_server

SMALL = ("--conversations", "4", "--turns", "2", "--first", "6", "--add", "2", "--gen", "4", "--concurrency", "2")
# What a comparison starts instead of vLLM.
STUB_MODULE = "tests.fakes.stub_server"


def test_serve_prints_a_table_with_its_conditions(kvortex: Any) -> None:
    with stub_server([Behaviour.GOOD]) as server:
        result = kvortex("bench", "serve", "--url", server.url + "/v1/", *SMALL)
    assert result.code == 0, result.err
    assert "8 / 0" in result.out
    for named in (
        "workload: 4 conversations of 2 turns",
        "4 generated, 2 requests at a time; seed 0",
        "hardware: ",
        "versions: ",
        "vLLM 0.32.0",
    ):
        assert named in result.out
    assert "turn 2 of 2" in result.err
    assert "Traceback" not in result.err


def test_an_open_load_has_no_bound_among_its_conditions_and_is_told_turn_by_turn(kvortex: Any) -> None:
    load = ("--think", "agents", "--rate", "100", "--conversations", "3", "--turns", "1", "--first", "6", "--gen", "4")
    with stub_server([Behaviour.GOOD]) as server:
        result = kvortex("bench", "serve", "--url", server.url, *load)
    assert result.code == 0, result.err
    assert "4 generated, as many at a time as come; seed 0" in result.out
    assert re.search(r"turn 1, p50 / p99: TTFT [0-9.]+ / [0-9.]+ ms, TPOT [0-9.]+ / [0-9.]+ ms", result.out)


def test_serve_prints_json_and_nothing_else_on_stdout(kvortex: Any, tmp_path: Path) -> None:
    with stub_server([Behaviour.GOOD]) as server:
        result = kvortex("bench", "serve", "--url", server.url, *SMALL, "--json", "--html", "page.html", "--seed", "7")
    document = json.loads(result.out)
    assert document["requests"]["ok"] == 8
    assert document["workload"]["seed"] == 7
    assert document["server"]["vllm"] == "0.32.0"
    assert document["figures"]["output_tokens_per_s"] > 0
    assert "8 / 0" in Path("page.html").read_text()


def test_a_password_in_the_address_is_shown_nowhere(kvortex: Any) -> None:
    with stub_server([Behaviour.GOOD]) as server:
        url = server.url.replace("//", "//me:PASSWORD@")
        result = kvortex("bench", "serve", "--url", url, *SMALL, "--json", "--html", "page.html")
    assert result.code == 0, result.err
    assert "PASSWORD" not in result.out + result.err + Path("page.html").read_text()


def test_serve_exits_with_one_over_the_allowed_share_and_still_shows_the_result(kvortex: Any) -> None:
    behaviours = [*[Behaviour.GOOD] * 8, Behaviour.STATUS_500]
    for share, code in (("0.2", 0), ("0.1", 1)):
        with stub_server(behaviours) as server:
            result = kvortex("bench", "serve", "--url", server.url, *SMALL, "--max-failures", share)
        assert result.code == code
        assert "7 / 1" in result.out
    assert "error: 1 of 8 requests failed" in result.err
    assert "http_status 500" in result.out


def test_one_request_is_one_request(kvortex: Any) -> None:
    one = ("--conversations", "1", "--turns", "1", "--concurrency", "1", "--first", "6", "--gen", "4")
    with stub_server([Behaviour.GOOD, Behaviour.STATUS_500]) as server:
        result = kvortex("bench", "serve", "--url", server.url, *one)
    assert "1 conversation of 1 turn: " in result.out
    assert "error: 1 of 1 request failed" in result.err
    assert not re.search(r"\b1 (requests|conversations|turns)\b", result.out + result.err)


def test_serve_exits_with_one_if_all_fail_whatever_is_allowed(kvortex: Any) -> None:
    with stub_server([Behaviour.GOOD, Behaviour.EMPTY]) as server:
        result = kvortex("bench", "serve", "--url", server.url, *SMALL, "--max-failures", "1", "--json")
    assert result.code == 1
    document = json.loads(result.out)
    assert document["requests"]["failures"] == {"empty_stream": 8}
    assert document["figures"]["ttft_p50_s"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--url", "localhost:8000"), 2, "'localhost:8000' is not an address"),
        (("--url", "http://127.0.0.1:9"), 1, "no answer from http://127.0.0.1:9"),
        (("--url", "http://me:PW@127.0.0.1:9"), 1, "no answer from http://***@127.0.0.1:9"),
        (("--conversations", "0"), 2, "--conversations"),
        (("--vocab", "5"), 2, "--vocab '5' is no range"),
        (("--timeout", "0"), 2, "--timeout: takes more than 0 seconds"),
        (("--timeout", "soon"), 2, "--timeout: 'soon' is not a duration"),
        (("--html", "no/such/dir/x.html"), 2, "--html no/such/dir/x.html cannot be written"),
        (("--first", "100000"), 2, "a conversation grows to 100010 tokens, and the server takes 100000"),
    ],
)
def test_serve_refuses_a_wrong_call_with_one_message(
    kvortex: Any, arguments: tuple[str, ...], code: int, message: str
) -> None:
    with stub_server([Behaviour.GOOD]) as server:
        result = kvortex("bench", "serve", "--url", server.url, *SMALL, *arguments)
    assert result.code == code
    assert message in result.err
    assert result.out == ""
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--vocab", "5"), "--vocab '5' is no range of token ids"),
        (("--rate", "1"), "--rate goes with --think"),
        (("--for", "2m"), "--for goes with --think"),
        (("--think", "agents", "--for", "soon"), "--for: 'soon' is not a duration"),
        (("--ttft-goal", "1s"), "--ttft-goal goes with --think"),
        (("--hint", "1s"), "--hint goes with --think"),
        (("--tpot-goal", "9ms"), "--tpot-goal goes with --think"),
        (("--think", "people", "--concurrency", "8"), "--concurrency does not go with --think"),
    ],
)
def test_serve_refuses_a_wrong_call_before_it_asks_the_server(
    kvortex: Any, arguments: tuple[str, ...], message: str
) -> None:
    """What would change nothing is no less wrong: it would be taken for measured."""
    with stub_server([Behaviour.GOOD]) as server:
        result = kvortex("bench", "serve", "--url", server.url, *arguments)
        assert server.asked == []
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: {message}\n")


@pytest.fixture
def stub_engines(clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison starts stubs; the model's name, a directory here, says how they behave."""
    for name in ("good", "dies_at_start", "good,hang"):
        Path(name).mkdir()
    monkeypatch.setattr(compare_module, "SERVER_MODULE", STUB_MODULE)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


COMPARE = ("bench", "compare", "good", "--engines", "none,kvortex", "--set", "kv_cache.ram_cache_size=1MB", *SMALL)


@pytest.mark.usefixtures("stub_engines")
def test_compare_prints_a_table_and_takes_vllms_options(kvortex: Any) -> None:
    result = kvortex(*COMPARE, "--max-model-len=64", "-tp", "1", "--logs", "logs", "--html", "page.html")
    assert result.code == 0, result.err
    assert len(re.findall(r" 8 / 0 │$", result.out, re.MULTILINE)) == 2, result.out
    assert "1.00x" in result.out
    assert "engine kvortex: KVortex, 1 MB of RAM for KV: VLLM_PLUGINS=" in result.out
    assert "--max-model-len 64" in result.out
    assert sorted(p.name for p in Path("logs").iterdir()) == ["kvortex-1.log", "none-1.log", "result.json"]
    assert "8 / 0" in Path("page.html").read_text()


@pytest.mark.usefixtures("stub_engines")
def test_compare_exits_with_one_if_kvortex_was_not_measured(kvortex: Any) -> None:
    result = kvortex("bench", "compare", "dies_at_start", *COMPARE[3:], "--json", "--logs", "logs")
    assert result.code == 1
    document = json.loads(result.out)
    assert [engine["runs"][0]["outcome"] for engine in document["engines"]] == ["failed", "failed"]
    assert document["problems"] == ["no engine was measured", "kvortex was not measured"]
    assert "error: no engine was measured" in result.err
    assert json.loads(Path("logs/result.json").read_text())["engines"] == document["engines"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--engines", "none,kvotex"), 'did you mean "kvortex"?'),
        (("--turn", "3"), "did you mean --turns?"),
        (("--port", "8000"), "--port: is not for a comparison"),
        (("--enforce-eagerly",), "did you mean --enforce-eager?"),
        (("--runs", "0"), "--runs"),
        (("--runs",), "--runs"),
        (("--vocab", "5"), "--vocab '5' is no range"),
        (("--max-model-len", "8"), "grows to 16 tokens, and the server takes 8"),
    ],
)
@pytest.mark.usefixtures("stub_engines")
def test_compare_refuses_a_wrong_call_before_starting_anything(
    kvortex: Any, arguments: tuple[str, ...], message: str
) -> None:
    result = kvortex(*COMPARE, *arguments)
    assert result.code == 2
    assert message in result.err
    assert "starting" not in result.err
    assert result.out == ""


@pytest.mark.usefixtures("clean_environment")
def test_compare_looks_for_the_model_before_starting_anything(kvortex: Any) -> None:
    result = kvortex("bench", "compare", "/none/such", *COMPARE[3:])
    assert (result.code, result.out) == (2, "")
    assert result.err.splitlines() == [
        "error: /none/such is no directory on this machine, and no Hub name (owner/name) either",
        "hint: check the path, or give owner/name",
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.usefixtures("stub_engines")
def test_an_interrupted_comparison_leaves_no_server(number: signal.Signals) -> None:
    code = (
        f"from kvortex.bench import compare\ncompare.SERVER_MODULE = '{STUB_MODULE}'\n"
        "from kvortex_cli.main import main\nmain()"
    )
    arguments = ["bench", "compare", "good,hang", *COMPARE[3:], "--logs", "logs"]
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        # A background job, as of a CI runner, is born deaf to SIGINT or SIGHUP, and so are its children.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # noqa: PLW1509
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "ready after" in line:
                break
        family = psutil.Process(process.pid).children(recursive=True)
        assert family
        time.sleep(0.3)  # into the load, or the requests before it: it must not matter
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "error: interrupted" in err
    assert not [child for child in family if child.is_running()]


@pytest.mark.parametrize("command", ["serve", "compare"])
def test_help_imports_nothing_heavy(command: str) -> None:
    done = run("bench", command, "--help")
    assert done.returncode == 0
    assert "--conversations" in done.stdout
    assert set(json.loads(done.stderr)).isdisjoint(HEAVY)


def test_own_options_are_taken_from_among_vllms() -> None:
    flags = {"--seed": False, "--json": True, "--max-failures": False}
    arguments = ["M", "-tp", "2", "--seed", "3", "--json", "--max_failures=0.5", "--set", "seed=1", "--", "--seed", "4"]
    taken, left = take_options(arguments, flags)
    assert taken == ["--seed", "3", "--json", "--max-failures=0.5"]
    assert left == ["M", "-tp", "2", "--set", "seed=1", "--", "--seed", "4"]
