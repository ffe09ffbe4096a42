"""Hints and sessions over HTTP, against a real server in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import prompt
from tests.e2e.server import ENDED_WITHIN_S, Server, inherited_environment
from tests.e2e.soak import MOST_ANSWER, Soak, all_prompts, faults_of, settled

KEY = "sk-one"
SOAK_S = float(os.environ.get("KVORTEX_SOAK_S", "10"))


@pytest.fixture(scope="module")
def server(tiny_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log: Path = tmp_path_factory.mktemp("prefetch") / "server.log"
    with Server(tiny_llama, log=log, api_key=KEY, prefetch=True) as running:
        yield running


def ask(server: Server, prompt: list[int] | str, session: str | None, **body: Any) -> str:
    headers = {"X-Session-Id": session} if session else {}
    asked = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **body}
    answer = server.client.post("/v1/completions", json=asked, headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def get(server: Server, path: str) -> Any:
    answer = server.client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def lines(server: Server, session: str) -> list[dict[str, Any]]:
    (engine,) = get(server, "/kvortex/sessions?top=100")["engines"]
    return [found for found in engine["sessions"] if found["session"] == session]


def vram_blocks(server: Server, session: str) -> int:
    (line,) = lines(server, session)
    return int(line["vram_blocks"])


def until(is_so: Callable[[], bool], within_s: float = ENDED_WITHIN_S) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def hint(server: Server, body: dict[str, Any]) -> Any:
    answer = server.client.post("/kvortex/prefetch", json=body)
    assert answer.status_code == 202, answer.text
    return answer.json()


def push_out(server: Server) -> None:
    for seed in range(3):
        ask(server, prompt(time.monotonic_ns() % 10**9 + seed, 1000), None)
    until(lambda: get(server, "/kvortex/stats")["store"]["in_flight"] == 0)


def hint_of_lost(server: Server, session: str, body: dict[str, Any]) -> Any:
    """Pushes out and hints until the hint was quicker than a guess. Not before it is lost: a hint has VRAM keep it."""
    for _ in range(30):
        push_out(server)
        if vram_blocks(server, session) == 0 and (found := hint(server, body))["ram_blocks"] > 0:
            return found
    raise AssertionError(f"it is always there before the hint: {lines(server, session)}")


def test_a_hint_wakes_an_idle_engine_and_the_turn_is_a_hit_in_vram(server: Server) -> None:
    tokens = prompt(1, 200)
    first = ask(server, tokens, "typing")
    for _ in range(10):
        found = hint_of_lost(server, "typing", {"session": "typing"})
        assert found["known"] is True
        try:
            until(lambda there=found["vram_blocks"]: vram_blocks(server, "typing") > there, within_s=10.0)
            break
        except AssertionError:
            # Too many hints were for nothing so far: what requests load themselves makes room for more.
            assert ask(server, tokens, "typing") == first
    else:
        raise AssertionError(f"no hint was followed: {get(server, '/kvortex/stats')}")
    until(lambda: get(server, "/kvortex/stats")["load"]["in_flight"] == 0)
    before = get(server, "/kvortex/stats")
    assert ask(server, tokens, "typing") == first
    after = get(server, "/kvortex/stats")
    assert after["prefetch"]["used_blocks"] > before["prefetch"]["used_blocks"]
    assert after["tokens"]["vram_hit"] > before["tokens"]["vram_hit"]


def test_a_hint_by_what_was_said_finds_the_same_blocks(server: Server) -> None:
    words = " ".join(f"w{token}" for token in prompt(2, 200))
    ask(server, words, "saying")
    found = hint_of_lost(server, "saying", {"prompt": words})
    assert found["blocks"] >= 6
    salted = hint(server, {"prompt": words, "cache_salt": "other"})
    assert (salted["vram_blocks"], salted["ram_blocks"]) == (0, 0)
    said = hint(server, {"messages": [{"role": "user", "content": words}]})
    assert said["blocks"] >= 6


def test_callers_with_other_salts_do_not_hint_each_others_sessions(server: Server) -> None:
    ask(server, prompt(3, 100), "mine", cache_salt="one")
    ask(server, prompt(3, 100), "mine", cache_salt="two")
    assert [line["turns"] for line in lines(server, "mine")] == [1, 1]
    assert hint(server, {"session": "mine"})["known"] is False
    assert hint(server, {"session": "mine", "cache_salt": "three"})["known"] is False
    assert hint(server, {"session": "mine", "cache_salt": "two"})["known"] is True


@pytest.mark.parametrize("given", ["prompt_cache_key", "session_id", "kv_transfer_params"])
def test_every_way_of_naming_a_session_reaches_the_engine(server: Server, given: str) -> None:
    name = f"by-{given}"
    ask(server, prompt(5, 100), None, **{given: {"session_id": name} if given == "kv_transfer_params" else name})
    assert [line["turns"] for line in lines(server, name)] == [1]


def test_without_a_key_there_is_no_answer(server: Server) -> None:
    headers = {"Authorization": "Bearer sk-other"}
    assert server.client.post("/kvortex/prefetch", json={"session": "a"}, headers=headers).status_code == 401
    assert server.client.get("/kvortex/sessions", headers=headers).status_code == 401


def test_metrics_tell_what_became_of_prefetched_blocks(server: Server) -> None:
    for outcome in ("issued", "used", "wasted", "late"):
        assert f'kvortex_prefetch_blocks_total{{outcome="{outcome}"}}' in server.metrics()


def test_an_open_load_of_sessions_is_played_and_told(server: Server) -> None:
    command = [sys.executable, "-c", "from kvortex_cli.main import main; main()", "bench", "serve", "--url", server.url]
    load = ["--think", "agents", "--rate", "5", "--conversations", "3", "--turns", "2"]
    sizes = ["--first", "100", "--add", "20", "--gen", "4", "--vocab", "3-500"]
    done = subprocess.run(
        [*command, *load, *sizes, "--json"],
        env=inherited_environment(VLLM_API_KEY=KEY),
        capture_output=True,
        text=True,
        timeout=ENDED_WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["requests"]["ok"] == 6
    assert document["sessions"]["who"] == "agents"
    assert document["sessions"]["prefetched"] is not None
    assert 0 <= document["sessions"]["goodput_share"] <= 1
    assert [line["turns"] for i in range(3) for line in lines(server, f"kvortex-bench-0-{i}")] == [2, 2, 2]


def test_a_short_soak_is_answered_right_and_leaves_nothing(server: Server) -> None:
    """Clients that give up, mixed lengths, sessions, hints. A long one: `python -m tests.e2e.soak`.

    The right answer is what the server says under a salt that nobody has used: all of it is computed.
    """
    right = {}
    for which, tokens in all_prompts(talks=3).items():
        asked = {"prompt": tokens, "max_tokens": MOST_ANSWER, "temperature": 0, "ignore_eos": True}
        more = {"return_token_ids": True, "cache_salt": f"{which} alone"}
        answer = server.client.post("/v1/completions", json=asked | more)
        assert answer.status_code == 200, answer.text
        right[which] = answer.json()["choices"][0]["token_ids"]
    before = settled(server)["tokens"]["queried"]
    played = Soak(server, right, seed=1).play(SOAK_S, sample_every_s=1.0)
    stats = settled(server)
    assert played.checked > 0
    assert faults_of(stats, played, before) == []
    assert played.rss.keys() >= {"server", "EngineCore"}
