"""A server's own log, played again: the replay finds the hits that the server counted."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import pytest

from kvortex.replay.trace import load_trace
from tests.e2e.engine import BLOCK_BYTES, BLOCK_SIZE, WRITE_THROUGH, Engine, engine, greedy, prompt
from tests.e2e.server import ENDED_WITHIN_S, inherited_environment

VRAM_BLOCKS = 39  # vLLM keeps one of 40
TALKS, TURNS = 6, 4


def converse(running: Engine) -> int:
    """Conversations in a shuffled order that grow by their answers and a question a turn. Returns the requests made."""
    talks = [prompt(seed, 200 + 37 * seed) for seed in range(TALKS)]
    order = [talk for talk in range(TALKS) for _ in range(TURNS)]
    random.Random(5).shuffle(order)
    for asked, talk in enumerate(order):
        ((answer, _),) = running.ask_all([talks[talk]], greedy(45))
        running.settle()
        talks[talk] += [*answer, *prompt(1000 + asked, 30)]
    return len(order)


def replayed(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", "from kvortex_cli.main import main; main()", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=ENDED_WITHIN_S,
        env=inherited_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.parametrize("ram_blocks", [1000, 70])
def test_a_replay_of_the_log_finds_the_hits_that_the_server_counted(tiny_llama, tmp_path, ram_blocks):
    """Same sizes and policy. With room for all, they differ by what vLLM alone does: it computes a prompt's last token,
    so a prompt of whole blocks hits one block less. With RAM for two thirds, the order of copies differs, too, and may
    cost the server 10 % of the hits (3 % when this was written)."""
    log = tmp_path / "requests.jsonl"
    settings = {
        **WRITE_THROUGH,
        "eviction_policy": "lru",
        "ram_cache_size": ram_blocks * BLOCK_BYTES,
        "request_log": str(log),
    }
    with engine(tiny_llama, settings) as running:
        requests = converse(running)
        counted = running.stats()["tokens"]
    found = counted["vram_hit"] + counted["ram_hit"]
    assert counted["ram_hit"] > 0
    assert counted["computed"] > 0

    logged = load_trace(log)
    assert len(logged) == requests
    assert sum(request.input_tokens for request in logged) == counted["queried"]
    assert any(request.output_blocks for request in logged)

    sizes = ("--ram", str(ram_blocks * BLOCK_BYTES), "--vram", str(VRAM_BLOCKS * BLOCK_BYTES), "--warm-up", "0")
    document = replayed("bench", "replay", str(log), "--model", tiny_llama, *sizes, "--policy", "lru")
    (played,) = document["results"]
    assert document["block_tokens"] == BLOCK_SIZE
    assert played["queried_tokens"] == counted["queried"]
    whole = sum(request.input_tokens % BLOCK_SIZE == 0 for request in logged)
    more = whole * BLOCK_SIZE if ram_blocks == 1000 else 0.1 * found
    assert found <= played["hit_tokens"] <= found + more, (played, counted)

    planned = replayed("plan", str(log), "--model", tiny_llama, *sizes)
    of_size = {row["ram_bytes"]: row for row in planned["sizes"]}[ram_blocks * BLOCK_BYTES]
    assert of_size["lru"]["hit_tokens"] == played["hit_tokens"]
    assert planned["conversations"]["number"] == TALKS
