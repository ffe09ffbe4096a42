"""A soak: a real server through real HTTP, for as long as told. What a SIGKILL leaves: `tests.e2e.kills`.

    python -m tests.e2e.soak --seconds 3600 --report soak.json

Conversations grow, end and begin anew, some named, some hinted; prompts and answers of mixed lengths; clients that give
up before, during and after the first token, and slow ones. Every finished answer is compared with that of plain vLLM
(`backend: none`, the same options), the statistics with each other, and each process's memory with itself.

Where plain vLLM does not always agree with itself, as on a GPU, --near-ties has it judge the answers that differ (see
`tests.near_ties`). An option after `--` replaces the soak's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from tests.e2e.server import Server
from tests.e2e.tiny_models import save_model
from tests.near_ties import Judge, Question, Verdict, check_control, tolerance_of, worst_gap

TALKS: Final = 20
TURNS: Final = 5
FIRST_TOKENS: Final = 90
TURN_TOKENS: Final = 170
MOST_ANSWER: Final = 24
MOST_GROWTH: Final = 0.05
"""Of a process's memory, from the second quarter of a soak to the last."""

Right = dict[tuple[int, int], list[int]]
"""The right answer, `MOST_ANSWER` tokens of it, by conversation and turn."""


@dataclass(frozen=True, slots=True)
class Differing:
    """An answer that is not plain vLLM's.

    Attributes:
        which: conversation and turn.
        kind: of the request.
    """

    which: tuple[int, int]
    kind: str
    said: tuple[int, ...]
    right: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.which} {self.kind}: {list(self.said)}, not {list(self.right)}"

    @property
    def question(self) -> Question:
        return Question(tuple(prompt_of(*self.which)), self.said)


def prompt_of(talk: int, turn: int) -> list[int]:
    """Each turn's prompt goes on from the last one's."""
    dice = random.Random(7000 + talk)
    return [dice.randrange(3, 510) for _ in range(FIRST_TOKENS + TURN_TOKENS * turn)]


def all_prompts(talks: int = TALKS) -> dict[tuple[int, int], list[int]]:
    return {(talk, turn): prompt_of(talk, turn) for talk in range(talks) for turn in range(TURNS)}


def right_answers(server: Server, *, at_once: int = 4) -> Right:
    """What a server says that has no offload."""

    async def ask_all() -> Right:
        limit = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(base_url=server.url, headers=server.client.headers, timeout=300) as client:

            async def one(which: tuple[int, int], tokens: list[int]) -> tuple[tuple[int, int], list[int]]:
                async with limit:
                    return which, await complete(client, tokens, MOST_ANSWER)

            return dict(await asyncio.gather(*(one(which, tokens) for which, tokens in all_prompts().items())))

    return asyncio.run(ask_all())


def body_of(tokens: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    asked = {"prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {**asked, "return_token_ids": True, **more}


async def complete(client: httpx.AsyncClient, tokens: list[int], max_tokens: int, **more: Any) -> list[int]:
    headers = more.pop("headers", {})
    answer = await client.post("/v1/completions", json=body_of(tokens, max_tokens, **more), headers=headers)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


@dataclass
class Played:
    """What became of a soak's requests.

    Attributes:
        wrong: answers that are not plain vLLM's, and no near ties where those are told apart.
        near_ties: what is told of those, by name.
        asked_tokens: of every prompt sent, ended or not; `ended_tokens`: of those that were answered to the end.
        rss: process name -> (seconds since the start, bytes) as sampled.
    """

    ends: Counter[str] = field(default_factory=Counter)
    checked: int = 0
    wrong: list[Differing] = field(default_factory=list)
    near_ties: dict[str, Any] | None = None
    asked_tokens: int = 0
    ended_tokens: int = 0
    seconds: float = 0.0
    rss: dict[str, list[tuple[float, int]]] = field(default_factory=dict)


class Soak:
    """The load on one running server."""

    def __init__(self, server: Server, right: Right, *, seed: int, at_once: int = 6) -> None:
        self._server = server
        self._right = right
        self._dice = random.Random(seed)
        self._at_once = at_once
        self._turn = {talk: 0 for talk, _ in right}
        self.played = Played()

    def play(self, seconds: float, *, sample_every_s: float = 5.0) -> Played:
        started = time.monotonic()
        asyncio.run(self._play(started + seconds, sample_every_s, started))
        self.played.seconds += time.monotonic() - started
        return self.played

    async def _play(self, until: float, sample_every_s: float, started: float) -> None:
        # A request that is given up may keep its place in the client's pool for good.
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._server.url, headers=self._server.client.headers, timeout=300, limits=limits
        ) as client:
            sampler = asyncio.create_task(self._sample(until, sample_every_s, started))
            await asyncio.gather(*(self.client(client, until) for _ in range(self._at_once)))
            await sampler

    async def _sample(self, until: float, every_s: float, started: float) -> None:
        while (now := time.monotonic()) < until:
            for name, rss in memory_of(self._server).items():
                self.played.rss.setdefault(name, []).append((now - started, rss))
            await asyncio.sleep(every_s)

    async def client(self, client: httpx.AsyncClient, until: float) -> None:
        """One user's requests, one after the other."""
        dice = self._dice
        while time.monotonic() < until:
            kind = dice.choices(
                ["whole", "stream", "slow", "leaves", "gives up", "once"], weights=[50, 15, 5, 12, 10, 8]
            )[0]
            if kind == "once":
                tokens = [dice.randrange(3, 510) for _ in range(dice.choice([20, 200, 900]))]
                await self._end(kind, client, tokens, None, dice.randint(1, 8))
                continue
            talk = dice.choice(list(self._turn))
            turn = self._turn[talk]
            self._turn[talk] = (turn + 1) % TURNS
            if dice.random() < 0.3:
                await client.post("/kvortex/prefetch", json=dice.choice([{"session": f"s{talk}"}, {"session": "x"}]))
            await self._end(kind, client, prompt_of(talk, turn), (talk, turn), dice.randint(1, MOST_ANSWER))

    async def _end(
        self, kind: str, client: httpx.AsyncClient, tokens: list[int], which: tuple[int, int] | None, max_tokens: int
    ) -> None:
        played, dice = self.played, self._dice
        played.asked_tokens += len(tokens)
        headers = {"X-Session-Id": f"s{which[0]}"} if which is not None and which[0] % 2 else {}
        said: list[int] = []
        if kind in ("whole", "once"):
            said = await complete(client, tokens, max_tokens, headers=headers)
        elif kind == "gives up":
            task = asyncio.create_task(complete(client, tokens, max_tokens, headers=headers))
            done, _ = await asyncio.wait({task}, timeout=dice.choice([0.001, 0.02, 0.1, 0.4]))
            if not done:
                task.cancel()
                await asyncio.wait({task})
                played.ends["gave up"] += 1
                return
            said = task.result()
        else:
            leaves_after = dice.randint(0, 3) if kind == "leaves" else None
            asked = body_of(tokens, max_tokens, stream=True)
            async with client.stream("POST", "/v1/completions", json=asked, headers=headers) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        said += json.loads(line[6:])["choices"][0].get("token_ids") or []
                    if leaves_after is not None and len(said) >= leaves_after:
                        played.ends["left"] += 1
                        return
                    if kind == "slow":
                        await asyncio.sleep(0.05)
        played.ends[kind] += 1
        played.ended_tokens += len(tokens)
        if which is not None:
            played.checked += 1
            right = self._right[which][:max_tokens]
            if said != right:
                played.wrong.append(Differing(which, kind, tuple(said), tuple(right)))


def memory_of(server: Server) -> dict[str, int]:
    """Resident bytes by process; a process's title says what it is."""
    found: dict[str, int] = {}
    for process in server.family():
        try:
            title = " ".join(process.cmdline())
            name = next((n for n in ("EngineCore", "Worker", "resource_tracker") if n in title), "server")
            found[name] = found.get(name, 0) + process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return found


def growth(samples: list[tuple[float, int]]) -> dict[str, float]:
    """Of one process: the medians of the second and of the last quarter (in the first one it warms up)."""
    quarter = max(1, len(samples) // 4)
    early = statistics.median(rss for _, rss in samples[quarter : 2 * quarter] or samples)
    late = statistics.median(rss for _, rss in samples[-quarter:])
    return {"samples": len(samples), "early_mb": early / 1e6, "late_mb": late / 1e6, "grown": late / early - 1}


def settled(server: Server, within_s: float = 300.0) -> dict[str, Any]:
    """The statistics, once no request and no copy is under way."""
    deadline = time.monotonic() + within_s
    while True:
        stats = server.stats()
        busy = stats["sessions"]["active"] + stats["store"]["in_flight"] + stats["load"]["in_flight"]
        if not busy or time.monotonic() > deadline:
            return stats
        time.sleep(0.2)


def faults_of(stats: dict[str, Any], played: Played, queried_before: int = 0) -> list[str]:
    """What does not agree, when nothing runs any more. Of a server that nobody else asked since."""
    tokens, ram, store, load = stats["tokens"], stats["tiers"]["ram"], stats["store"], stats["load"]
    reset = stats["refused"]["reset"]
    must = {
        "no answer is wrong": not played.wrong,
        "no request is active": stats["sessions"]["active"] == 0,
        "no copy is under way": store["in_flight"] == load["in_flight"] == 0,
        "no slot is pinned": ram["pinned_blocks"] == 0,
        "no VRAM block is in use": stats["tiers"]["vram"]["in_use_blocks"] == 0,
        "RAM holds what was stored and not given up": reset > 0
        or ram["used_blocks"] == store["blocks"] - stats["evicted"]["ram_blocks"],
        "RAM holds no more than it may": ram["used_blocks"] <= ram["capacity_blocks"],
        "every token is counted once": tokens["vram_hit"] + tokens["ram_hit"] + tokens["computed"] == tokens["queried"],
        "every computed token has a reason": sum(stats["missed"].values()) == tokens["computed"],
        "what was answered was counted": played.ended_tokens <= tokens["queried"] - queried_before,
        "what was not asked was not": tokens["queried"] - queried_before <= played.asked_tokens,
        "prefetched blocks are used, wasted or there": stats["prefetch"]["used_blocks"]
        + stats["prefetch"]["wasted_blocks"]
        <= stats["prefetch"]["issued_blocks"],
        "nothing failed": stats["failures"]["store"] == stats["failures"]["load"] == stats["ignored_answers"] == 0,
    }
    return [what for what, holds in must.items() if not holds]


# ---- near ties


def judge_of(server: Server, *, at_once: int = 4) -> Judge:
    """A server that has no offload, asked over HTTP."""

    async def judge_all(questions: Sequence[Question]) -> list[float]:
        limit = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(base_url=server.url, headers=server.client.headers, timeout=300) as client:

            async def one(question: Question) -> float:
                asked = {"prompt": question.tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
                async with limit:
                    answer = await client.post("/v1/completions", json=asked)
                assert answer.status_code == 200, answer.text
                places = answer.json()["choices"][0]["prompt_logprobs"]
                logprobs = [
                    None if place is None else {int(token): found["logprob"] for token, found in place.items()}
                    for place in places
                ]
                return worst_gap(question, logprobs)

            return list(await asyncio.gather(*map(one, questions)))

    return lambda questions: asyncio.run(judge_all(questions))


def tell_near_ties(played: Played, right: Right, again: Right, judge: Judge) -> list[str]:
    """Leaves as wrong what is no near tie, and writes the figures of both.

    The control: right answers to other conversations' prompts, such as a cache that mixes them up would give.

    Args:
        right, again: plain vLLM's answers, asked for twice, at different concurrency.

    Returns:
        What is wrong with the judgement itself.
    """
    talks = 1 + max(talk for talk, _ in right)
    own, mixed = [], []
    for (talk, turn), answer in right.items():
        prompt, other, second = tuple(prompt_of(talk, turn)), right[(talk + 1) % talks, turn], again[talk, turn]
        if answer != second:
            own += [Question(prompt, tuple(answer)), Question(prompt, tuple(second))]
        if other not in (answer, second):
            mixed.append(Question(prompt, tuple(other)))
    asked = list(dict.fromkeys([*own, *mixed, *(one.question for one in played.wrong)]))
    gaps = dict(zip(asked, judge(asked), strict=True))
    own_gaps = [gaps[question] for question in own]
    tolerance = tolerance_of(own_gaps)
    control = Verdict(tuple(gaps[question] for question in mixed), len(mixed), tolerance)
    gap_of = {one: gaps[one.question] if len(one.said) == len(one.right) else math.inf for one in played.wrong}
    verdict = Verdict(tuple(gap_of[one] for one in played.wrong), played.checked, tolerance)
    played.wrong = [one for one in played.wrong if not gap_of[one] <= tolerance]
    played.near_ties = {
        "tolerance": tolerance,
        "plain_vllm": {"asked": len(right), "differing": len(own) // 2, "worst_gap": max(own_gaps, default=0.0)},
        "count": len(verdict.ties),
        "worst_gap": max(verdict.ties, default=0.0),
        "wrong_gaps": sorted(gap for gap in verdict.wrong if gap < math.inf)[:10],
        "control": str(control),
    }
    try:
        check_control(control)
    except AssertionError as error:
        return [str(error)]
    return []


# ---- from the command line


def parser_of(description: str) -> argparse.ArgumentParser:
    """What both programs are told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", help="a folder with a model; a tiny Llama with random weights where not given")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random (%(default)s)")
    parser.add_argument("--report", type=Path, help="the figures as JSON go here, too")
    parser.add_argument("serve", nargs="*", help="after --: options of `kvortex serve`")
    return parser


def report_of(options: argparse.Namespace, play: Callable[[str, Path], dict[str, Any]]) -> int:
    """Plays in a folder of its own and tells. 1 if there were faults."""
    with tempfile.TemporaryDirectory(prefix="kvortex-soak-") as name:
        folder = Path(name)
        figures = play(options.model or str(save_model("llama", folder / "tiny-llama")), folder)
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {platform.platform()}"
    text = json.dumps({"machine": machine, **figures}, indent=1)
    print(text)
    if options.report is not None:
        options.report.write_text(text + "\n")
    return int(bool(figures["faults"]))


def plain_server(model: str, folder: Path, serve: Sequence[str]) -> Server:
    return Server(model, log=folder / "plain.log", options=[*serve, "--set", "kv_cache.backend=none"])


def right_by_plain_vllm(model: str, folder: Path, serve: Sequence[str]) -> Right:
    with plain_server(model, folder, serve) as plain:
        return right_answers(plain)


def main() -> int:
    """1 if anything was wrong or left behind."""
    parser = parser_of("a soak of `kvortex serve`")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the soak (%(default)s)")
    parser.add_argument(
        "--ram", default="4MB", help="host RAM; the conversations of the tiny Llama take 6 MB (%(default)s)"
    )
    parser.add_argument("--at-once", type=int, default=6, help="clients (%(default)s)")
    parser.add_argument(
        "--near-ties",
        action="store_true",
        help="plain vLLM judges answers that differ from its own, and near ties are not wrong; else equality is all",
    )
    options = parser.parse_args()

    def play(model: str, folder: Path) -> dict[str, Any]:
        with plain_server(model, folder, options.serve) as plain:
            right = right_answers(plain)
            again = right_answers(plain, at_once=16) if options.near_ties else right
        with Server(model, log=folder / "soaked.log", options=options.serve, prefetch=True, ram=options.ram) as server:
            played = Soak(server, right, seed=options.seed, at_once=options.at_once).play(options.seconds)
            stats = settled(server)
        faults = []
        if options.near_ties:
            with plain_server(model, folder, options.serve) as plain:
                faults = tell_near_ties(played, right, again, judge_of(plain))
        figures = figures_of(stats, played)
        return {**figures, "faults": [*figures["faults"], *faults]}

    return report_of(options, play)


def figures_of(stats: dict[str, Any], played: Played) -> dict[str, Any]:
    memory = {name: growth(samples) for name, samples in played.rss.items()}
    grown = [f"{name} grew by {g['grown']:.1%}" for name, g in memory.items() if g["grown"] > MOST_GROWTH]
    return {
        "kvortex": stats["kvortex"],
        "vllm": stats["vllm"],
        "seconds": round(played.seconds, 1),
        "requests": dict(played.ends),
        "checked": played.checked,
        "near_ties": played.near_ties,
        "num_wrong": len(played.wrong),
        "wrong": [str(one) for one in played.wrong[:10]],
        "memory": memory,
        "stats": {name: stats[name] for name in ("tokens", "store", "load", "evicted", "prefetch", "failures")},
        "faults": [*faults_of(stats, played), *grown],
    }


if __name__ == "__main__":
    sys.exit(main())
