"""Servers that are killed at random moments: each starts again, nothing of them is left, a server beside them goes on.

python -m tests.e2e.kills --kills 20 --report kills.json
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from tests.e2e.server import ENDED_WITHIN_S, Server, is_running
from tests.e2e.soak import Right, Soak, parser_of, prompt_of, report_of, right_by_plain_vllm, settled

GONE_WITHIN_S: Final = 120.0
REMOVED_AFTER_S: Final = 65.0
"""Files of killed servers are removed once they are a minute old."""
UNTOLD: Final = "vllm_dist_"
"""torch's meeting points, of a few bytes: nothing tells a dead server's from a living one's, so they stay."""


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
        found = [f"process {p.pid}" for p in alive if is_running(p)]
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
    that starts after all of them and ends well: by then no file of theirs may be left. (Its own sockets are: vLLM
    leaves them at a clean end, too.)

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
        server.process.wait(ENDED_WITHIN_S)
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
        theirs = set(own.iterdir())
        with last:
            last.complete(prompt_of(0, 0))
        files = [path for path in sorted(shared) if Path(path).exists()]
        files += [str(path) for path in sorted(theirs) if path.exists() and not path.name.startswith(UNTOLD)]
        untold = sum(path.name.startswith(UNTOLD) for path in own.iterdir())
        lines.append({"number": "last", "left": files, "untold": untold})
        print(json.dumps(lines[-1]), file=sys.stderr, flush=True)
    return lines


def main() -> int:
    """1 if anything was wrong or left behind."""
    parser = parser_of("SIGKILLs to `kvortex serve` at random moments, beside a server that nobody kills")
    parser.add_argument("--kills", type=int, default=20, help="servers that are killed (%(default)s)")
    options = parser.parse_args()

    def play(model: str, folder: Path) -> dict[str, Any]:
        right = right_by_plain_vllm(model, folder, options.serve)
        with Server(model, log=folder / "bystander.log", options=options.serve, prefetch=True) as bystander:
            bystander.complete(prompt_of(0, 1))
            kills = kill_and_restart(
                model,
                right,
                options.kills,
                seed=options.seed,
                folder=folder,
                options=options.serve,
                bystander=bystander,
            )
        faults = [f"kill {line['number']} left {line['left']}" for line in kills if line["left"]]
        faults += [f"kill {line['number']}: {line['wrong']} wrong answers" for line in kills if line.get("wrong")]
        faults += [
            f"kill {line['number']} touched its neighbour" for line in kills if line.get("bystander") == "touched"
        ]
        return {"kills": kills, "faults": faults}

    return report_of(options, play)


if __name__ == "__main__":
    sys.exit(main())
