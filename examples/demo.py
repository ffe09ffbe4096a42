"""Conversations that outgrow the KV pool, served without and with KVortex.

    make demo                            or, in an environment that has vLLM and kvortex:
    python examples/demo.py MODEL

Four conversations of three turns take turns, A1 B1 C1 D1 A2 B2 ..., on a server whose KV pool holds about
two of them. Whenever one continues, vLLM has thrown its KV away: plain vLLM computes it again, KVortex
brings it back from host RAM. The demo shows where each prompt's KV came from and the time to the first token,
and fails (exit 1) unless both servers say the same, word for word. DEMO_JSON=FILE writes all of it as data.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from conversation import Answer, Conversation, RequestError, ask
from server import Server, ServerError, kvortex

CONVERSATIONS = ("A", "B", "C", "D")
TURNS = (1, 2, 3)
STATS_WITHIN_S = 5.0


class Tokens(NamedTuple):
    """Prompt tokens by where their KV came from: `tokens` of GET /kvortex/stats, whose counters only grow."""

    queried: int
    vram_hit: int
    ram_hit: int
    computed: int

    def since(self, earlier: Tokens) -> Tokens:
        return Tokens(*(now - then for now, then in zip(self, earlier, strict=True)))

    def add_up(self) -> bool:
        return self.vram_hit + self.ram_hit + self.computed == self.queried


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one conversation, on both servers."""

    conversation: str
    number: int
    plain: Answer
    kvortex: Answer
    tokens: Tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model's folder or name")
    parser.add_argument("--config", default=str(Path(__file__).with_name("demo.yaml")))
    options = parser.parse_args()
    # Ctrl-C is an exception, so it ends the `with` blocks and their servers; make SIGTERM one, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return demo(options.model, options.config)
    except (RequestError, ServerError) as error:
        say(f"FAILED: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; no server is left")
        return 130


def demo(model: str, config: str) -> int:
    say("1 of 2: plain vLLM")
    plain: dict[tuple[str, int], Answer] = {}
    with Server([model, "--config", config, "--set", "kv_cache.backend=none"], say=say) as server:
        warm_up(server)
        for name, number, answer in talk(server):
            plain[name, number] = answer
            say(f"conversation {name}, turn {number}: first token after {answer.ttft_s:.2f} s")

    say("2 of 2: the same with KVortex")
    turns: list[Turn] = []
    with Server([model, "--config", config], say=say) as server:
        warm_up(server)
        counted = read_tokens(server, Tokens(0, 0, 0, 0))
        print(HEADER)
        for name, number, answer in talk(server):
            before, counted = counted, read_tokens(server, counted)
            turns.append(Turn(name, number, plain[name, number], answer, counted.since(before)))
            print(row(turns[-1]), flush=True)
        stats = read_stats(server)
        print(f"\n$ kvortex inspect stats --url {server.url}", flush=True)
        inspect = subprocess.run([kvortex(), "inspect", "stats", "--url", server.url], check=False)

    print("", *summary(turns), sep="\n", flush=True)
    if path := os.environ.get("DEMO_JSON"):
        Path(path).write_text(json.dumps(as_data(turns, stats), indent=2) + "\n")
        say(f"wrote {path}")
    problems = find_problems(turns)
    if inspect.returncode != 0:
        problems.append(f"kvortex inspect ended with exit code {inspect.returncode}")
    for problem in problems:
        say(f"FAILED: {problem}")
    return 1 if problems else 0


# --- talking to a server ------------------------------------------------------------------------------------


def warm_up(server: Server) -> None:
    """Whatever a server does only once should not count as the first conversation's time."""
    ask(server.http, [{"role": "user", "content": "Say hello."}], session="warm-up")


def talk(server: Server) -> Iterator[tuple[str, int, Answer]]:
    """Every turn of every conversation, one at a time: all first turns, then all second ones, and so on."""
    conversations = {name: Conversation(server.http, name) for name in CONVERSATIONS}
    for number in TURNS:
        for name, conversation in conversations.items():
            yield name, number, conversation.turn(number)


def read_stats(server: Server) -> dict[str, Any]:
    try:
        response = server.http.get("/kvortex/stats").raise_for_status()
    except httpx.HTTPError as error:
        raise RequestError(f"GET /kvortex/stats: {error}") from error
    stats: dict[str, Any] = response.json()
    return stats


def read_tokens(server: Server, before: Tokens) -> Tokens:
    """The token counters once they have moved on from `before` and add up; as they are if they never do.

    The engine tells its counters a step behind the answer, so a first look can be too early.
    """
    deadline = time.monotonic() + STATS_WITHIN_S
    while True:
        counters = read_stats(server)["tokens"]
        tokens = Tokens(*(counters[name] for name in Tokens._fields))
        if (tokens != before and tokens.add_up()) or time.monotonic() > deadline:
            return tokens
        time.sleep(0.05)


# --- what came of it ----------------------------------------------------------------------------------------

HEADER = """
                       prompt tokens, KV from              time to first token
conversation  turn     all    VRAM    RAM  computed     plain vLLM    KVortex"""


def row(turn: Turn) -> str:
    where = turn.tokens
    return (
        f"{turn.conversation:<12}  {turn.number:>4}  {turn.kvortex.prompt_tokens:>6}  "
        f"{where.vram_hit:>6} {where.ram_hit:>6}  {where.computed:>8}     "
        f"{turn.plain.ttft_s:>8.2f} s  {turn.kvortex.ttft_s:>7.2f} s"
    )


def median_ttft_s(turns: Sequence[Turn]) -> tuple[float, float]:
    """Medians with plain vLLM and with KVortex, over the turns that continue a conversation."""
    later = [turn for turn in turns if turn.number > 1]
    return (
        statistics.median(turn.plain.ttft_s for turn in later),
        statistics.median(turn.kvortex.ttft_s for turn in later),
    )


def summary(turns: Sequence[Turn]) -> list[str]:
    plain_s, kvortex_s = median_ttft_s(turns)
    same = sum(turn.plain.text == turn.kvortex.text for turn in turns)
    return [
        f"Continuing a conversation, median time to first token: {plain_s:.2f} s with plain vLLM, "
        f"{kvortex_s:.2f} s with KVortex.",
        f"Identical answers with and without KVortex: {same} of {len(turns)}.",
    ]


def find_problems(turns: Sequence[Turn]) -> list[str]:
    """Everything that makes these numbers worthless; empty after a good run."""
    problems = []
    for turn in turns:
        name = f"conversation {turn.conversation}, turn {turn.number}"
        if turn.plain.text != turn.kvortex.text:
            problems.append(f"{name}: plain vLLM said {turn.plain.text!r}, KVortex {turn.kvortex.text!r}")
        if not turn.tokens.add_up():
            problems.append(f"{name}: not every queried token is counted once: {turn.tokens}")
    if not any(turn.tokens.ram_hit for turn in turns):
        problems.append("no prompt token came from RAM")
    return problems


def as_data(turns: Sequence[Turn], stats: dict[str, Any]) -> dict[str, Any]:
    plain_s, kvortex_s = median_ttft_s(turns)
    return {
        "turns": [
            {
                "conversation": turn.conversation,
                "turn": turn.number,
                "prompt_tokens": turn.kvortex.prompt_tokens,
                "vram_hit": turn.tokens.vram_hit,
                "ram_hit": turn.tokens.ram_hit,
                "computed": turn.tokens.computed,
                "ttft_s": turn.kvortex.ttft_s,
                "ttft_none_s": turn.plain.ttft_s,
                "text": turn.kvortex.text,
                "text_none": turn.plain.text,
            }
            for turn in turns
        ],
        "stats": stats,
        "ttft_median_s": kvortex_s,
        "ttft_none_median_s": plain_s,
        "hardware": hardware(),
        "versions": {
            "python": platform.python_version(),
            "torch": importlib.metadata.version("torch"),
            "kvortex": stats["kvortex"],
            "vllm": stats["vllm"],
        },
    }


def hardware() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return f"{len(os.sched_getaffinity(0))} x {cpu}, {platform.system()} {platform.machine()}"


def say(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
