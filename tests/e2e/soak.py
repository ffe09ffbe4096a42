"""A soak: real servers through real HTTP, for as long as told, and killed at random moments as often as told.

    python -m tests.e2e.soak --seconds 3600 --kills 20 --report soak.json

Conversations grow, end and begin anew, some named, some hinted; prompts and answers of mixed lengths; clients that give
up before, during and after the first token, and slow ones. Every finished answer is compared with that of plain vLLM
(`backend: none`, the same options), the statistics with each other, and each process's memory with itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from tests.e2e.server import Server

TALKS: Final = 20
TURNS: Final = 5
FIRST_TOKENS: Final = 90
TURN_TOKENS: Final = 170
MOST_ANSWER: Final = 24
GONE_WITHIN_S: Final = 20.0
REMOVED_AFTER_S: Final = 65.0
"""Files of killed servers are removed once they are a minute old."""
MOST_GROWTH: Final = 0.05
"""Of a process's memory, from the second quarter of a soak to the last."""

Right = dict[tuple[int, int], list[int]]
"""The right answer, `MOST_ANSWER` tokens of it, by conversation and turn."""


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
        async with httpx.AsyncClient(base_url=server.url, headers=server.client.headers, timeout=120) as client:

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
        wrong: answers that are not plain vLLM's.
        asked_tokens: of every prompt sent, ended or not; `ended_tokens`: of those that were answered to the end.
        rss: process name -> (seconds since the start, bytes) as sampled.
    """

    ends: Counter[str] = field(default_factory=Counter)
    checked: int = 0
    wrong: list[str] = field(default_factory=list)
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
        async with httpx.AsyncClient(
            base_url=self._server.url, headers=self._server.client.headers, timeout=120
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
            if said != self._right[which][:max_tokens]:
                played.wrong.append(f"{which} {kind}: {said}, not {self._right[which][:max_tokens]}")


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


def settled(server: Server, within_s: float = 60.0) -> dict[str, Any]:
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


# ---- killed


def shared_memory_of(family: Iterable[psutil.Process]) -> set[str]:
    """Files in /dev/shm that these processes have mapped."""
    found: set[str] = set()
    for process in family:
        try:
            found.update(m.path for m in process.memory_maps() if m.path.startswith("/dev/shm/"))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return {path.removesuffix(" (deleted)") for path in found}


@dataclass(frozen=True)
class Traces:
    """What a server has while it lives."""

    family: list[psutil.Process]
    shared: set[str]

    @classmethod
    def of(cls, server: Server) -> Traces:
        family = server.family()
        return cls(family, shared_memory_of(family))

    def still_running(self, server: Server) -> list[str]:
        """What is left of it a while after its end: processes, its port."""
        _, alive = psutil.wait_procs(self.family, timeout=GONE_WITHIN_S)
        found = [f"process {p.pid}" for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", server.port))
            except OSError as error:
                found.append(f"port {server.port}: {error}")
        return found


def kill(server: Server, *, whole: bool) -> None:
    """SIGKILL to the server alone, as the kernel's OOM killer would; or to all of it at once, as a supervisor would."""
    try:
        if whole:
            os.killpg(server.process.pid, signal.SIGKILL)
        else:
            server.process.kill()
    except ProcessLookupError:
        return


async def _play_and_kill(soak: Soak, server: Server, after_s: float, *, whole: bool) -> Traces:
    """The kill comes while requests run. What was answered before it is checked, nothing else is."""

    async def client() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as connection:
            try:
                await soak.client(connection, time.monotonic() + 300)
            except httpx.HTTPError:
                return

    clients = [asyncio.create_task(client()) for _ in range(4)]
    await asyncio.sleep(after_s)
    traces = Traces.of(server)
    kill(server, whole=whole)
    await asyncio.gather(*clients)
    return traces


def kill_and_restart(
    model: str,
    right: Right,
    kills: int,
    *,
    seed: int,
    folder: Path,
    options: Sequence[str] = (),
    bystander: Server | None = None,
) -> list[dict[str, Any]]:
    """Starts a server, plays on it, kills it at a random moment, and again; a line for each kill.

    One in four is killed while it starts; one in two with all of its processes at once. The last line is of a server
    that starts after all of them and ends well: by then no file of theirs may be left.

    Raises:
        AssertionError: a server did not start.
    """
    dice = random.Random(seed)
    lines: list[dict[str, Any]] = []
    before = None if bystander is None else settled(bystander)["tokens"]
    own = folder / "tmp"
    own.mkdir()
    shared: set[str] = set()
    for number in range(kills):
        whole = bool(number % 2)
        server = Server(model, log=folder / f"killed-{number}.log", options=options, prefetch=True)
        server.env |= {"TMPDIR": str(own)}
        line: dict[str, Any] = {"number": number, "all_at_once": whole}
        started = time.monotonic()
        server.start()
        if number % 4 == 3:
            time.sleep(dice.uniform(0.0, 30.0))
            traces = Traces.of(server)
            kill(server, whole=whole)
        else:
            server.wait_until_ready()
            line["start_s"] = round(time.monotonic() - started, 1)
            soak = Soak(server, right, seed=seed + number)
            traces = asyncio.run(_play_and_kill(soak, server, dice.uniform(0.0, 8.0), whole=whole))
            line |= {"checked": soak.played.checked, "wrong": len(soak.played.wrong)}
        server.process.wait(30)
        server.client.close()
        line["killed_after_s"] = round(time.monotonic() - started, 1)
        line["left"] = traces.still_running(server)
        shared |= traces.shared
        if bystander is not None:
            line["bystander"] = "untouched" if bystander.stats()["tokens"] == before else "touched"
        lines.append(line)
        print(json.dumps(line), file=sys.stderr, flush=True)
    if kills:
        time.sleep(REMOVED_AFTER_S)
        last = Server(model, log=folder / "last.log", options=options)
        last.env |= {"TMPDIR": str(own)}
        with last:
            last.complete(prompt_of(0, 0))
        files = [path for path in sorted(shared) if Path(path).exists()] + [str(path) for path in sorted(own.iterdir())]
        lines.append({"number": "last", "left": files})
        print(json.dumps(lines[-1]), file=sys.stderr, flush=True)
    return lines


# ---- from the command line


def main() -> int:
    """1 if anything was wrong or left behind."""
    parser = argparse.ArgumentParser(description="a soak of `kvortex serve`, and SIGKILLs at random moments")
    parser.add_argument("--model", help="a folder with a model; a tiny Llama with random weights where not given")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the soak (%(default)s)")
    parser.add_argument("--kills", type=int, default=20, help="servers that are killed after it (%(default)s)")
    parser.add_argument(
        "--ram", default="4MB", help="host RAM; the conversations of the tiny Llama take 6 MB (%(default)s)"
    )
    parser.add_argument("--at-once", type=int, default=6, help="clients (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random (%(default)s)")
    parser.add_argument("--report", type=Path, help="the figures as JSON go here, too")
    parser.add_argument("serve", nargs="*", help="after --: options of `kvortex serve`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvortex-soak-") as name:
        folder = Path(name)
        model = options.model or _tiny_model(folder)
        report = soak_and_kill(model, folder, options)
    text = json.dumps(report, indent=1)
    print(text)
    if options.report is not None:
        options.report.write_text(text + "\n")
    return int(bool(report["faults"]))


def soak_and_kill(model: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Plain vLLM's answers, the soak, the kills beside the soaked server; figures and faults."""
    with Server(model, log=folder / "plain.log", options=[*options.serve, "--set", "kv_cache.backend=none"]) as plain:
        right = right_answers(plain)
    with Server(model, log=folder / "soaked.log", options=options.serve, prefetch=True, ram=options.ram) as server:
        played = Soak(server, right, seed=options.seed, at_once=options.at_once).play(options.seconds)
        stats = settled(server)
        faults = faults_of(stats, played)
        kills = kill_and_restart(
            model,
            right,
            options.kills,
            seed=options.seed,
            folder=folder,
            options=options.serve,
            bystander=server,
        )
        if kills and settled(server)["tokens"] != stats["tokens"]:
            faults.append("the server beside the killed ones was touched")
    faults += [f"kill {line['number']} left {line['left']}" for line in kills if line["left"]]
    faults += [f"kill {line['number']}: {line['wrong']} wrong answers" for line in kills if line.get("wrong")]
    memory = {name: growth(samples) for name, samples in played.rss.items()}
    faults += [f"{name} grew by {g['grown']:.1%}" for name, g in memory.items() if g["grown"] > MOST_GROWTH]
    return {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {platform.platform()}",
        "kvortex": stats["kvortex"],
        "vllm": stats["vllm"],
        "seconds": round(played.seconds, 1),
        "requests": dict(played.ends),
        "checked": played.checked,
        "wrong": played.wrong[:10],
        "memory": memory,
        "stats": {name: stats[name] for name in ("tokens", "store", "load", "evicted", "prefetch", "failures")},
        "kills": kills,
        "faults": faults,
    }


def _tiny_model(folder: Path) -> str:
    from tests.e2e.tiny_models import save_model

    return str(save_model("llama", folder / "tiny-llama"))


if __name__ == "__main__":
    sys.exit(main())
