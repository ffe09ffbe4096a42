"""What prefetch costs where it cannot help, without a GPU: throughput of a busy engine with prefetch off and on.

As in `virtual_sessions.py`, but a closed loop: `--concurrency` requests run at any time, and the same ones are asked
either way.

    never       sessions of one turn each
    uniform     sessions that return after 0 to 120 s, any time as likely
    memoryless  whoever is silent is as likely as any other to be next: nothing can be learnt
    hints       the same, and a client hints all the time: for sessions that are over, and for their whole prompts
    inverted    `uniform`, and what is learnt of returns is told the wrong way round

    python benchmarks/virtual_adversaries.py --json adversaries.json
    python benchmarks/virtual_adversaries.py --only hints --link-gb-s 12

A prefetch costs the link's time before other loads, GPU blocks that others had used, steps only to plan, and some of a
step that runs beside a copy (`--beside`). What the scheduler side computes is hidden behind the step before, as with
async scheduling; `--plan-us` and `--hint-us` charge for it.
"""

from __future__ import annotations

import argparse
import copy
import heapq
import itertools
import json
import logging
import random
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import vllm
from virtual_sessions import TimingWorker, in_ms
from virtual_turns import Play, add_options
from vllm.v1.request import Request

from kvortex.bench.figures import percentile
from kvortex.cache.sessions.rhythm import Habit, Rhythms
from kvortex.vllm_plugin.scheduler import SchedulerSide

LONGEST_THINK_S = 120.0
SHOWN = ("vram_hit", "ram_hit", "computed", "stored_blocks", "loaded_blocks", "lost_blocks", "ram_evicted_blocks")


class Adversary(StrEnum):
    """Why prefetch cannot help."""

    NEVER = "never"
    UNIFORM = "uniform"
    MEMORYLESS = "memoryless"
    HINTS = "hints"
    INVERTED = "inverted"


class Inverted(Rhythms):
    """Says of the unlikely that it is sure, and of the likely that it is not."""

    def p_return_within(self, habit: Habit, silent_s: float, horizon_s: float) -> float:
        return 1 - super().p_return_within(habit, silent_s, horizon_s)


class Turn(NamedTuple):
    """Of a session: it adds so many tokens to the prompt."""

    session: str
    tokens: int
    is_last: bool


@dataclass(slots=True)
class Live:
    """A request, and how many tokens of its answer were seen."""

    request: Request
    asked_s: float
    is_last: bool
    told: int = 0


class AdversaryPlay(Play):
    """A closed loop of sessions that end after some turns, each replaced by a new one."""

    make_worker = TimingWorker

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self._adversary = Adversary(options.adversary)
        self._order = self._turns_in_order()
        self._next = next(self._order)
        self._hint_dice = random.Random(f"hints/{options.seed}")
        self._talks: dict[str, list[int]] = {}
        self._over: list[str] = []
        self._live: dict[str, Live] = {}
        self._tokens = 0
        self._asked = self._ended = 0
        self._first_s: list[float] = []
        self._gaps_s: list[float] = []
        self._hints = 0
        self._hints_owed = 0.0
        self._hints_unpaid = 0
        self._passed_s = 0.0
        if self._adversary is Adversary.INVERTED and (prefetcher := self._side._prefetcher) is not None:
            prefetcher.book.rhythms = Inverted()

    @property
    def _side(self) -> SchedulerSide:
        side: SchedulerSide = self.scheduler.connector._scheduler_side
        return side

    # ---- the load

    def run(self) -> list[dict[str, Any]]:
        """One row: the whole play, and how long of it is warm."""
        warm_up, warm_s = self._options.warm_up, 0.0
        while True:
            self._ask()
            if not self._live:
                return [self._row(warm_s)]
            if self._adversary is Adversary.HINTS:
                self._hint()
            before_s = self.now_s
            self._step()
            self._see_answers(before_s)
            if not warm_s and self._ended >= warm_up:
                warm_s = self.now_s
                self._first_s.clear()
                self._gaps_s.clear()

    def _turns_in_order(self) -> Iterator[Turn]:
        """The same with prefetch off and on, however quick the engine is."""
        options, dice = self._options, random.Random(f"load/{self._options.seed}")
        if self._adversary is Adversary.NEVER:
            for number in itertools.count():
                yield Turn(f"s{number}", options.first, is_last=True)
        played: dict[int, int] = {}
        for seat in self._seats(dice):
            # They begin in the midst of their turns, so that they do not all end at once.
            turn = played[seat] if seat in played else dice.randrange(options.turns)
            at = turn % options.turns
            tokens = options.added
            if at == 0 or seat not in played:
                tokens = options.first + at * (options.added + options.answer)
            played[seat] = turn + 1
            yield Turn(f"s{seat}-{turn // options.turns}", tokens, is_last=at == options.turns - 1)

    def _seats(self, dice: random.Random) -> Iterator[int]:
        """Whose session has the next turn."""
        options = self._options
        if self._adversary in (Adversary.UNIFORM, Adversary.INVERTED):
            due = [(dice.uniform(0, LONGEST_THINK_S), seat) for seat in range(options.returning)]
            heapq.heapify(due)
            while True:
                at_s, seat = due[0]
                yield seat
                heapq.heapreplace(due, (at_s + dice.uniform(0, LONGEST_THINK_S), seat))
        recent: deque[int] = deque(maxlen=options.concurrency)
        while True:
            seat = dice.randrange(options.sessions)
            if seat not in recent:
                recent.append(seat)
                yield seat

    def _ask(self) -> None:
        while self._asked < self._options.warm_up + self._options.requests and self._next.session not in self._live:
            if len(self._live) == self._options.concurrency:
                return
            turn, self._next = self._next, next(self._order)
            self._asked += 1
            dice = random.Random(f"talk/{self._options.seed}/{turn.session}/{len(self._talks.get(turn.session, ()))}")
            talk = self._talks.setdefault(turn.session, [])
            talk += [dice.randrange(10, 128000) for _ in range(turn.tokens)]
            request = self._request(f"{turn.session}-{len(talk)}", talk)
            request.kv_transfer_params = {"session_id": turn.session}
            self._live[turn.session] = Live(request, self.now_s, turn.is_last)
            self.scheduler.add_request(request)

    def _see_answers(self, before_s: float) -> None:
        for session, live in list(self._live.items()):
            told, live.told = live.told, live.request.num_output_tokens
            self._tokens += live.told - told
            if told:
                self._gaps_s.append(self.now_s - before_s)
            elif live.told:
                self._first_s.append(self.now_s - live.asked_s)
            if live.request.is_finished():
                self._ended += 1
                self._talks[session] += live.request.output_token_ids
                del self._live[session]
                if live.is_last:
                    self._over.append(session)

    def _hint(self) -> None:
        """For sessions that are over and, one in four, for any; half of them by their whole prompts."""
        self._hints_owed += self._options.hints_a_s * self._passed_s
        dice, known = self._hint_dice, list(self._talks)
        for _ in range(int(self._hints_owed) if self._over else 0):
            session = dice.choice(known if dice.random() < 0.25 else self._over)
            tokens = self._talks[session] if dice.random() < 0.5 else None
            self._side.hint(session if tokens is None else None, tokens)
            self._hints += 1
            self._hints_unpaid += 1
        self._hints_owed %= 1.0

    # ---- what it costs

    def _more_s(self, ends_s: float) -> float:
        options = self._options
        self._passed_s = ends_s - self.now_s
        beside_s = options.beside * self._worker.moving_s(self.now_s, ends_s)
        hints_s, self._hints_unpaid = self._hints_unpaid * options.hint_us * 1e-6, 0
        cpu_s = hints_s + options.plan_us * 1e-6
        return beside_s if self._side._prefetcher is None else beside_s + cpu_s

    def _row(self, warm_s: float) -> dict[str, Any]:
        """Counts are of the whole play, times of the answers after the warm-up."""
        totals = self._totals()
        prefetch = self._side.snapshot()["prefetch"]
        wasted, loaded = prefetch["wasted_blocks"], totals["loaded_blocks"]
        return {
            "seconds": round(self.now_s, 3),
            "warm_seconds": round(self.now_s - warm_s, 3),
            "ttft_p50_ms": in_ms(percentile(self._first_s, 0.5)),
            "ttft_p99_ms": in_ms(percentile(self._first_s, 0.99)),
            "between_tokens_p99_ms": in_ms(percentile(self._gaps_s, 0.99)),
            **{name: totals[name] for name in SHOWN},
            "hints": self._hints,
            **{name.removesuffix("_blocks"): count for name, count in prefetch.items()},
            "wasted_share": round(wasted / max(1, loaded), 4),
            "wasted_link_share": round(wasted * self._worker.block_s / self.now_s, 4),
        }


def play(options: argparse.Namespace, adversary: Adversary, seed: int, *, prefetch: bool) -> dict[str, Any]:
    """The row of one play."""
    options = copy.copy(options)
    options.adversary, options.seed = adversary, seed
    if adversary in (Adversary.UNIFORM, Adversary.INVERTED):
        options.warm_up += options.returning
    options.kv_cache = {"prefetch_enabled": prefetch, **options.kv_cache}
    (row,) = AdversaryPlay(options).run()
    return {"prefetch": prefetch, "seed": seed, **row}


def compared(off: list[dict[str, Any]], on: list[dict[str, Any]]) -> dict[str, Any]:
    """What prefetch changes, seed by seed. The work is the same, so throughput goes as 1 over time; what is lost in the
    warm-up too is held against what comes after it."""
    ratios = [
        a["warm_seconds"] / (a["warm_seconds"] + b["seconds"] - a["seconds"]) for a, b in zip(off, on, strict=True)
    ]
    line: dict[str, Any] = {"throughput": round(statistics.median(ratios), 4), "worst": round(min(ratios), 4)}
    for name in ("seconds", "ttft_p50_ms", "ttft_p99_ms", "between_tokens_p99_ms"):
        line[name] = [statistics.median(row[name] for row in rows) for rows in (off, on)]
    for name in ("hints", "issued", "used", "wasted", "wasted_share", "wasted_link_share"):
        line[name] = statistics.median(row[name] for row in on)
    return line


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Those of `virtual_turns.py`, and of a closed loop."""
    add_options(parser, ram_gb=1000.0)
    parser.set_defaults(turns=8)
    parser.add_argument("--sessions", type=int, default=60, help="that go on at a time")
    parser.add_argument("--returning", type=int, default=500, help="the same, where they return after 0 to 120 s")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument(
        "--warm-up", type=int, default=100, help="requests before; where all return, one a session more"
    )
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--hints-a-s", type=float, default=20.0)
    parser.add_argument(
        "--beside", type=float, default=0.04, help="of a copy's time, what a step beside it takes longer"
    )
    parser.add_argument("--hint-us", type=float, default=0.0, help="that a hint takes of a step")
    parser.add_argument("--plan-us", type=float, default=0.0, help="prefetch's own computing takes of a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_load_options(parser)
    parser.add_argument("--only", type=Adversary, nargs="+", choices=list(Adversary), default=list(Adversary))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    logging.getLogger("vllm").setLevel(logging.WARNING)
    lines: dict[str, Any] = {}
    for adversary in options.only:
        rows = {
            on: [play(options, adversary, seed, prefetch=on) for seed in range(options.seeds)] for on in (False, True)
        }
        lines[adversary] = compared(rows[False], rows[True]) | {"plays": rows[False] + rows[True]}
        print(
            json.dumps({"adversary": adversary} | {k: v for k, v in lines[adversary].items() if k != "plays"}),
            flush=True,
        )
    if options.json:
        shown = {name: value for name, value in vars(options).items() if name != "json"}
        document = {"benchmark": "virtual_adversaries", "vllm": vllm.__version__, "options": shown, "results": lines}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
