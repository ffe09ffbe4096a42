"""Plays sessions that begin on their own, and whose users think between turns: an open load.

A server that is too slow for it gets a queue, which shows in the times to the first token.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import httpx

from kvortex.bench.counters import Counters, read_counters
from kvortex.bench.load import warm_up
from kvortex.bench.request import Endpoint, Failed, Good, complete
from kvortex.bench.think import Think, arrivals_s, think_s
from kvortex.bench.workload import Workload
from kvortex.sizes import counted

_PROGRESS_EVERY_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class SessionLoad:
    """Attributes:
    workload: what is said; its `conversations` are the sessions, its `concurrency` bounds nothing.
    rate: sessions that begin a second.
    hint_s: before each later turn its session is announced, so many seconds ahead or all of its pause; None: is not.
    for_s: no turn begins later than so many seconds after the first one; who would go on then is gone. None: all turns.
    """

    workload: Workload
    who: Think
    rate: float
    hint_s: float | None = None
    for_s: float | None = None


@dataclass(frozen=True, slots=True)
class PlayedSessions:
    """What came of it.

    Attributes:
        wall_s: from the first request's sending to the last one's end.
        turns: of each turn, the results of the sessions that took it.
        counters: the server's, before and after; None where it has none.
        most_in_flight: requests at a time.
        hints: what was said to the hints, HTTP statuses or why there is none.
    """

    load: SessionLoad
    wall_s: float
    turns: tuple[tuple[Good | Failed, ...], ...]
    counters: tuple[Counters, Counters] | None
    stand_in_answers: int
    client_cpu_share: float
    most_in_flight: int
    hints: Counter[str] = field(default_factory=Counter)


async def play_sessions(
    endpoint: Endpoint, load: SessionLoad, *, timeout_s: float, say: Callable[[str], None]
) -> PlayedSessions:
    """Warms the server up with one request, then plays; see `load.play`."""
    async with endpoint.open_client() as client:
        await warm_up(client, endpoint, load.workload, timeout_s)
        return await _Player(client, endpoint, load, timeout_s, say).play()


class _Player:
    """One run."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        endpoint: Endpoint,
        load: SessionLoad,
        timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        self.client = client
        self.endpoint = endpoint
        self.load = load
        self.timeout_s = timeout_s
        self.say = say
        self.stand_in_answers = 0
        self.in_flight = self.most_in_flight = self.done = 0
        self.hints: Counter[str] = Counter()
        self.no_turn_after = math.inf  # of time.perf_counter

    async def play(self) -> PlayedSessions:
        workload = self.load.workload
        before = await read_counters(self.client)
        begun, cpu_before = time.perf_counter(), time.process_time()
        if self.load.for_s is not None:
            self.no_turn_after = begun + self.load.for_s
        progress = asyncio.create_task(self._say_progress())
        begins = arrivals_s(workload.conversations, self.load.rate, workload.seed)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._session(i, at_s)) for i, at_s in enumerate(begins)]
        finally:
            progress.cancel()
        wall_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_before
        after = await read_counters(self.client)
        known = before is not None and after is not None and before.counted_by == after.counted_by
        return PlayedSessions(
            load=self.load,
            wall_s=wall_s,
            turns=_by_turn([task.result() for task in tasks], workload.turns),
            counters=(before, after) if known and before is not None and after is not None else None,
            stand_in_answers=self.stand_in_answers,
            client_cpu_share=cpu_s / wall_s if wall_s > 0 else 0.0,
            most_in_flight=self.most_in_flight,
            hints=self.hints,
        )

    async def _session(self, number: int, at_s: float) -> list[Good | Failed]:
        workload = self.load.workload
        if not await self._pause(at_s):
            return []
        prompt: list[int] = []
        results: list[Good | Failed] = []
        for turn in range(1, workload.turns + 1):
            if turn > 1 and not await self._think(number, turn):
                break
            prompt += workload.user_tokens(number, turn)
            result = await self._ask(number, prompt)
            results.append(result)
            if isinstance(result, Good) and result.token_ids is not None:
                prompt += result.token_ids
            elif isinstance(result, Good):
                self.stand_in_answers += 1
                prompt += workload.stand_in_answer(number, turn, result.output_tokens)
        return results

    async def _think(self, number: int, turn: int) -> bool:
        """The pause before a turn; with a hint when so much of it is left as was asked for. Its answer is waited for: a
        hint behind its request would say nothing. False at once where the turn would come too late."""
        pause_s = think_s(self.load.who, self.load.workload.seed, number, turn - 1)
        ahead_s = min(pause_s, self.load.hint_s or 0.0)
        if not await self._pause(pause_s - ahead_s, then_s=ahead_s):
            return False
        if self.load.hint_s is not None:
            await asyncio.gather(self._hint(number), asyncio.sleep(ahead_s))
        return True

    async def _pause(self, pause_s: float, *, then_s: float = 0.0) -> bool:
        """Waits, unless what comes `then_s` after it would come too late."""
        if time.perf_counter() + pause_s + then_s > self.no_turn_after:
            return False
        await asyncio.sleep(pause_s)
        return True

    async def _hint(self, number: int) -> None:
        try:
            answer = await self.client.post(
                "/kvortex/prefetch", json={"session": self._name(number)}, timeout=self.timeout_s
            )
        except httpx.HTTPError as error:
            self.hints[type(error).__name__] += 1
        else:
            self.hints[f"HTTP {answer.status_code}"] += 1

    def _name(self, number: int) -> str:
        return f"kvortex-bench-{self.load.workload.seed}-{number}"

    async def _ask(self, number: int, prompt: list[int]) -> Good | Failed:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        gen, name = self.load.workload.gen, self._name(number)
        try:
            return await complete(self.client, self.endpoint, prompt, gen, self.timeout_s, session=name)
        finally:
            self.in_flight -= 1
            self.done += 1

    async def _say_progress(self) -> None:
        workload = self.load.workload
        while True:
            await asyncio.sleep(_PROGRESS_EVERY_S)
            all_of_them = counted(workload.conversations * workload.turns, "request")
            most = "" if self.load.for_s is None else "at most "
            self.say(f"{self.done:,} of {most}{all_of_them} ended, {self.in_flight:,} run")


def _by_turn(sessions: Sequence[Sequence[Good | Failed]], turns: int) -> tuple[tuple[Good | Failed, ...], ...]:
    return tuple(tuple(session[turn] for session in sessions if turn < len(session)) for turn in range(turns))
