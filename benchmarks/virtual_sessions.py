"""What prefetch does for sessions with think times, without a GPU: shares that are exact, times that are estimates.

As in `virtual_turns.py`: vLLM's own scheduler and block pool, KVortex's own scheduler side, and a worker that only
keeps time; but an open load, as `kvortex bench serve --think` plays it.

    python benchmarks/virtual_sessions.py --think agents --rate 1.2
    python benchmarks/virtual_sessions.py --think agents --rate 1.2 --prefetch --json sessions.json
    python benchmarks/virtual_sessions.py --think agents --rate 1.2 --vram-gb 120 --ram-gb 0    # the bound

With several seeds a play each, and the figures of all together: when steps and requests meet moves the median of one
play by a tenth.
"""

from __future__ import annotations

import argparse
import heapq
import json
import logging
import math
import random
from collections.abc import Sequence
from typing import Any

import vllm
from virtual_turns import Play, Worker, add_options
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvortex.bench.figures import percentile
from kvortex.bench.think import Think, arrivals_s, think_s
from kvortex.messages import LinkFacts, StepReport
from kvortex.vllm_plugin import connector as plugin

IDLE_STEP_S = 0.02


class TimingWorker(Worker):
    """Also tells how long steps take and how quick the link is, as a real one does."""

    def __init__(self, block_bytes: int, bytes_a_second: float, lag_steps: int) -> None:
        super().__init__(block_bytes, bytes_a_second, lag_steps)
        self._link: LinkFacts | None = LinkFacts(bytes_a_second, by_layer=True)
        self._steps: dict[int, float] = {}

    def timed(self, number: int, seconds: float) -> None:
        if number:
            self._steps[number] = seconds

    def answers(self, now_s: float) -> KVConnectorOutput:
        output = super().answers(now_s)
        meta = output.kv_connector_worker_meta
        report = StepReport() if meta is None else meta.report
        if self._link is not None:
            report.links[0], self._link = self._link, None
        report.step_seconds.update(self._steps)
        self._steps.clear()
        output.kv_connector_worker_meta = plugin.KVortexWorkerMetadata(report)
        return output


class SessionPlay(Play):
    """Sessions that begin at random, on a clock that only steps move."""

    make_worker = TimingWorker

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        dice = random.Random(options.seed)
        begins = arrivals_s(options.sessions, options.rate, options.seed)
        self._due = [(at_s, number) for number, at_s in enumerate(begins) if at_s <= options.for_s]
        self._talks = [[dice.randrange(10, 128000) for _ in range(options.first)] for _ in begins]
        self._turns = [0] * options.sessions
        self._live: dict[int, tuple[Request, float]] = {}
        self._first_s: dict[tuple[int, int], float] = {}
        self._gaps_s: list[float] = []
        self._dice = dice
        self._hints: list[tuple[float, int]] = []

    def run(self) -> list[dict[str, Any]]:
        """One row for the load."""
        heapq.heapify(self._due)
        while self._due or self._live:
            self._hint()
            self._begin_turns()
            if not self._live and not self.scheduler.has_requests():
                self.now_s = min(self._due[0][0], self.now_s + IDLE_STEP_S)
            before_s = self.now_s
            self._step()
            self._see_answers(before_s)
        return [self._row()]

    def _hint(self) -> None:
        """Who is about to come says so."""
        while self._hints and self._hints[0][0] <= self.now_s:
            _, number = heapq.heappop(self._hints)
            self.scheduler.connector._scheduler_side.hint(f"s{number}", None)

    def _begin_turns(self) -> None:
        while self._due and self._due[0][0] <= self.now_s:
            at_s, number = heapq.heappop(self._due)
            self._turns[number] += 1
            if self._turns[number] > 1:
                self._talks[number] += [self._dice.randrange(10, 128000) for _ in range(self._options.added)]
            request = self._request(f"{number}-{self._turns[number]}", self._talks[number])
            request.kv_transfer_params = {"session_id": f"s{number}"}
            self._live[number] = request, at_s
            self.scheduler.add_request(request)

    def _see_answers(self, before_s: float) -> None:
        options = self._options
        for number, (request, asked_s) in list(self._live.items()):
            turn = self._turns[number]
            if request.num_output_tokens > 1:
                self._gaps_s.append(self.now_s - before_s)
            elif request.num_output_tokens:
                self._first_s.setdefault((number, turn), self.now_s - asked_s)
            if request.is_finished():
                self._talks[number] += request.output_token_ids
                del self._live[number]
                back_s = self.now_s + think_s(options.think, options.seed, number, turn)
                if turn < options.turns and back_s <= options.for_s:
                    heapq.heappush(self._due, (back_s, number))
                    if options.hint:
                        heapq.heappush(self._hints, (max(self.now_s, back_s - options.hint), number))

    def later_s(self) -> list[float]:
        """To the first token, of each turn in which a session goes on."""
        return [seconds for (_, turn), seconds in self._first_s.items() if turn > 1]

    def _row(self) -> dict[str, Any]:
        later = self.later_s()
        row: dict[str, Any] = {
            "seconds": round(self.now_s, 1),
            "ttft_p50_ms": in_ms(percentile(later, 0.5)),
            "ttft_p99_ms": in_ms(percentile(later, 0.99)),
            "between_tokens_p50_ms": in_ms(percentile(self._gaps_s, 0.5)),
            "between_tokens_p99_ms": in_ms(percentile(self._gaps_s, 0.99)),
            "host_schedule_p50_ms": in_ms(percentile(self.schedule_s[False], 0.5), 3),
            "host_schedule_that_admits_p50_ms": in_ms(percentile(self.schedule_s[True], 0.5), 3),
        }
        if self._options.ram_gb:
            snapshot = self.scheduler.connector._scheduler_side.snapshot()
            prefetch = snapshot["prefetch"]
            row |= self._totals()
            row |= {name.removesuffix("_blocks"): count for name, count in prefetch.items()}
            row |= {f"admission_{name}": value for name, value in snapshot["admission"].items()}
            row |= shares_of([row])
        return row


def shares_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of what was loaded."""
    loaded = max(1, sum(row["loaded_blocks"] for row in rows))
    used, wasted = (sum(row[name] for row in rows) for name in ("used", "wasted"))
    return {"prefetched_share": round(used / loaded, 3), "wasted_share": round(wasted / loaded, 3)}


def together(plays: Sequence[SessionPlay], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    later = [seconds for play in plays for seconds in play.later_s()]
    times = {"ttft_p50_ms": in_ms(percentile(later, 0.5)), "ttft_p99_ms": in_ms(percentile(later, 0.99))}
    if "loaded_blocks" not in rows[0]:
        return times
    return times | {name: sum(row[name] for row in rows) for name in ("vram_hit", "ram_hit")} | shares_of(rows)


def in_ms(seconds: float | None, digits: int = 1) -> float | None:
    return None if seconds is None else round(seconds * 1e3, digits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, ram_gb=100.0)
    parser.add_argument("--think", type=Think, choices=list(Think), default=Think.AGENTS)
    parser.add_argument("--rate", type=float, default=1.2, help="sessions that begin a second")
    parser.add_argument("--sessions", type=int, default=120)
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="a play each")
    parser.add_argument("--for", type=float, dest="for_s", default=math.inf, help="seconds after which no turn begins")
    parser.add_argument("--prefetch", action="store_true")
    parser.add_argument(
        "--hint", type=float, metavar="S", help="each session says so many seconds before that it comes"
    )
    options = parser.parse_args()
    options.kv_cache = {"prefetch_enabled": options.prefetch, **options.kv_cache}
    logging.getLogger("vllm").setLevel(logging.WARNING)
    plays: list[SessionPlay] = []
    rows: list[dict[str, Any]] = []
    for seed in options.seed:
        plays.append(SessionPlay(argparse.Namespace(**{**vars(options), "seed": seed})))
        rows += [{"seed": seed} | row for row in plays[-1].run()]
        print(json.dumps(rows[-1]))
    of_all = together(plays, rows)
    print(json.dumps({"together": of_all}))
    if options.json:
        shown = {name: value for name, value in vars(options).items() if name != "json"}
        document = {"benchmark": "virtual_sessions", "vllm": vllm.__version__, "options": shown, "results": rows}
        document["together"] = of_all
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
