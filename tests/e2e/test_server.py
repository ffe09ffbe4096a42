"""Real servers over real HTTP: statistics, metrics, keys, signals, and two of them side by side."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.cli.terminal import Terminal
from tests.e2e.engine import prompt
from tests.e2e.server import (
    ENDED_WITHIN_S,
    KEY,
    Server,
    command_line,
    run_kvortex,
)

PROMPTS = [prompt(seed, 600) for seed in range(3)]

STATS_FIELDS = {
    "tiers.vram": {"capacity_bytes", "capacity_blocks", "resident_blocks", "clean_blocks", "in_use_blocks"},
    "tiers.ram": {"capacity_bytes", "used_bytes", "capacity_blocks", "used_blocks", "pinned_blocks"},
    "tokens": {"queried", "vram_hit", "ram_hit", "computed"},
    "store": {"blocks", "bytes", "seconds", "in_flight"},
    "load": {"blocks", "bytes", "seconds", "in_flight"},
    "evicted": {"ram_blocks", "vram_blocks"},
    "dedup": {"references", "unique_blocks"},
    "prefetch": {"issued_blocks", "used_blocks", "wasted_blocks", "late_blocks"},
    "failures": {"store", "load", "recomputed_tokens"},
    "sessions": {"known", "active"},
}


def test_a_conversation_comes_back_from_ram_and_the_text_is_the_same(server):
    first = [server.complete(tokens) for tokens in PROMPTS]
    assert [server.complete(tokens) for tokens in PROMPTS] == first
    stats = server.settled()
    assert stats["tokens"]["ram_hit"] > 0
    assert stats["load"]["bytes"] == stats["load"]["blocks"] * 12288


def test_stats_have_every_field_of_the_contract(server):
    stats = server.stats()
    assert {"kvortex", "vllm", "model", "uptime_s"} <= stats.keys()
    for path, fields in STATS_FIELDS.items():
        part = stats
        for name in path.split("."):
            part = part[name]
        assert fields <= part.keys(), path


def test_every_queried_token_is_counted_once(server):
    before = server.stats()["tokens"]
    server.complete(PROMPTS[0])
    server.complete(prompt(50, 333))
    after = server.stats()["tokens"]
    assert after["vram_hit"] + after["ram_hit"] + after["computed"] == after["queried"]
    assert after["queried"] - before["queried"] == 600 + 333


def test_prometheus_agrees_with_stats(server):
    """Field trial B58: the engine is another process, and its series are on the server's /metrics."""
    stats, metrics = server.settled(), server.metrics()
    expected = {
        'kvortex_prompt_tokens_total{source="vram"}': stats["tokens"]["vram_hit"],
        'kvortex_prompt_tokens_total{source="ram"}': stats["tokens"]["ram_hit"],
        'kvortex_prompt_tokens_total{source="computed"}': stats["tokens"]["computed"],
        "kvortex_queried_tokens_total": stats["tokens"]["queried"],
        "kvortex_store_blocks_total": stats["store"]["blocks"],
        "kvortex_store_bytes_total": stats["store"]["bytes"],
        "kvortex_load_blocks_total": stats["load"]["blocks"],
        "kvortex_load_bytes_total": stats["load"]["bytes"],
        "kvortex_load_in_flight_blocks": 0,
        'kvortex_capacity_bytes{tier="ram"}': stats["tiers"]["ram"]["capacity_bytes"],
        'kvortex_vram_blocks{state="resident"}': stats["tiers"]["vram"]["resident_blocks"],
        'kvortex_vram_blocks{state="clean"}': stats["tiers"]["vram"]["clean_blocks"],
        'kvortex_ram_blocks{state="used"}': stats["tiers"]["ram"]["used_blocks"],
        'kvortex_evicted_blocks_total{tier="vram"}': stats["evicted"]["vram_blocks"],
        'kvortex_failed_blocks_total{direction="load"}': stats["failures"]["load"],
    }
    assert {name: metrics.get(name) for name in expected} == expected


def test_metrics_have_the_names_of_the_reference_and_no_others(server):
    reference = Path(__file__).parent.parent.parent / "docs" / "metrics.md"
    documented = set(re.findall(r"^\| `(kvortex_\w+)`", reference.read_text(), re.MULTILINE))
    assert {name.partition("{")[0] for name in server.metrics()} == documented


def test_reasons_sum_to_what_was_computed_on_every_page(server):
    stats, metrics = server.settled(), server.metrics()
    assert sum(stats["missed"].values()) == stats["tokens"]["computed"] > 0
    by_reason = {f'kvortex_missed_tokens_total{{reason="{reason}"}}': n for reason, n in stats["missed"].items()}
    assert {name: metrics.get(name) for name in by_reason} == by_reason


def test_blocks_are_those_that_ram_holds(server):
    stats = server.settled()
    answer = server.client.get("/kvortex/blocks", params={"by": "uses", "top": 5})
    assert answer.status_code == 200, answer.text
    (engine,) = answer.json()["engines"]
    ram, vram = engine["ram"], engine["vram"]
    assert ram["blocks"] == stats["tiers"]["ram"]["used_blocks"] == sum(e["blocks"] for e in ram["by_uses"])
    assert ram["block_bytes"] * ram["capacity_blocks"] == stats["tiers"]["ram"]["capacity_bytes"]
    assert len(ram["first"]) == 5
    uses = [block["uses"] for block in ram["first"]]
    assert uses == sorted(uses, reverse=True)
    assert uses[0] > 0
    assert vram["clean_blocks"] == stats["tiers"]["vram"]["clean_blocks"]


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}])
def test_kvortex_routes_ask_for_the_same_key_as_v1(server, headers):
    import httpx

    for path in ("/kvortex/stats", "/kvortex/blocks", "/kvortex/dashboard", "/v1/models"):
        assert httpx.get(server.url + path, headers=headers).status_code == 401, path


def test_the_key_is_on_no_command_line_and_in_no_log(server):
    """Field trial B64."""
    assert len(server.family()) > 1
    for process in server.family():
        assert KEY not in command_line(process), process
    assert KEY not in server.log.read_text(errors="replace")


def test_nothing_but_the_api_port_listens_beyond_loopback(server):
    """Field trial B65: the server and all its children. What KVortex adds is one socket, which is no file and no port;
    the rest is vLLM's and torch's."""
    inet, unix = server.listening()
    assert ("127.0.0.1", server.port) in inet
    assert {ip for ip, _ in inet} <= {"127.0.0.1", "::1"}, inet
    (own,) = {name for name in unix if name.startswith("@kvortex-")}
    assert own.startswith(f"@kvortex-{os.getuid()}-")


def test_a_listener_beyond_loopback_is_seen(server):
    """Its control: this process is no child of the server, so it is looked at as if it were."""
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        tcp.bind(("0.0.0.0", 0))
        tcp.listen()
        unix.bind("\0kvortex-test-of-listeners")
        unix.listen()
        server_like = SimpleNamespace(family=lambda: [psutil.Process()])
        inet, names = Server.listening(server_like)
        assert ("0.0.0.0", tcp.getsockname()[1]) in inet
        assert "@kvortex-test-of-listeners" in names


def test_what_the_routes_are_sent_is_no_error_of_the_servers_own(server):
    """With vLLM's own tokenizer and handlers around the routes, where the unit tests have stand-ins."""
    deep = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for body in (
        b"",
        b"{",
        b"\xff\xfe",
        deep,
        b'{"messages": [{"role": "user", "content": NaN}]}',
        b'{"messages": [{}]}',
    ):
        answer = server.client.post("/kvortex/prefetch", content=body)
        assert 400 <= answer.status_code < 500, (body[:40], answer.text)
    wrong = server.client.post("/kvortex/prefetch", content=b'{"prompt": [1, NaN]}')
    assert wrong.status_code == 422, wrong.text
    assert "prompt.list" in wrong.json()["error"]["message"]
    for query in ("top=0", "top=NaN", "top=" + "9" * 5000, "top=%ff"):
        for path in ("/kvortex/blocks", "/kvortex/sessions"):
            assert 400 <= server.client.get(f"{path}?{query}").status_code < 500, (path, query[:40])
    # A name that cannot go to the engine is no name, and the request is served.
    body = json.dumps({"prompt": PROMPTS[0], "max_tokens": 1, "prompt_cache_key": "\ud800"})
    as_json = {"Content-Type": "application/json"}
    assert server.client.post("/v1/completions", content=body, headers=as_json).status_code == 200
    too_deep = server.client.post("/v1/completions", content=b'{"session_id": ' + deep, headers=as_json)
    assert 400 <= too_deep.status_code < 500
    assert server.client.get("/health").status_code == 200


def test_inspect_shows_the_servers_own_numbers(server):
    stats = server.settled()
    table = run_kvortex("inspect", "stats", "--url", server.url, VLLM_API_KEY=KEY)
    assert table.returncode == 0, table.stderr
    assert f"{stats['tokens']['ram_hit']:,}" in table.stdout
    assert stats["verdict"]["text"] in table.stdout.replace("\n", " ")
    blocks = run_kvortex("inspect", "blocks", "--url", server.url, VLLM_API_KEY=KEY)
    assert f"RAM: {stats['tiers']['ram']['used_blocks']:,} of" in blocks.stdout, blocks.stderr
    document = run_kvortex("inspect", "--url", server.url, "--json", VLLM_API_KEY=KEY)
    assert json.loads(document.stdout)["tokens"] == stats["tokens"]


def test_inspect_watches_a_server_at_work_in_a_terminal_that_is_resized(server, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    with Terminal("inspect", "--watch", "--every", "0.2", "--url", server.url) as terminal:
        terminal.wait_for(lambda rows: len(rows) == 24 and "live" in rows[-1], ENDED_WITHIN_S)
        server.complete(prompt(60, 500))
        terminal.resize(60, 20)
        server.complete(prompt(61, 500))
        computed = f"{server.stats()['tokens']['computed']:,}"
        rows = terminal.wait_for(lambda rows: len(rows) == 20 and any(computed in row for row in rows), ENDED_WITHIN_S)
        assert max(len(row) for row in rows) <= 60
        terminal.type("q")
        assert terminal.wait_for_end(ENDED_WITHIN_S) == 0


def test_inspect_says_that_a_key_is_needed(server):
    answer = run_kvortex("inspect", "--url", server.url, VLLM_API_KEY="")
    assert answer.returncode == 1
    assert "API key" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_plain_vllm_serve_runs_the_connector(tiny_llama, tmp_path):
    """Without `kvortex serve`: vLLM's own server module, its own plugin loading, KVortex by --kv-transfer-config."""
    transfer = {
        "kv_connector": "KVortexConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"ram_cache_size": "20MB", "offload_threshold": 0},
    }
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", tiny_llama),
        *("--max-model-len", "1152", "--num-gpu-blocks-override", "40", "--kv-cache-memory-bytes", "100000000"),
        *("--enforce-eager", "--host", "127.0.0.1", "--block-size", "32"),
        *("--kv-transfer-config", json.dumps(transfer)),
    ]
    plugins = {"VLLM_PLUGINS": "kvortex,kvortex_routes"}
    with Server(tiny_llama, command=command, environment=plugins, log=tmp_path / "log") as plain:
        first = [plain.complete(tokens) for tokens in PROMPTS]
        assert [plain.complete(tokens) for tokens in PROMPTS] == first
        assert plain.settled()["tokens"]["ram_hit"] > 0
