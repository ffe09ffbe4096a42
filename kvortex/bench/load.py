"""Plays a workload against one server: all conversations' turn 1, then all their turn 2, and so on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import httpx

from kvortex.bench.counters import Counters, read_counters
from kvortex.bench.request import Endpoint, Failed, Good, complete
from kvortex.bench.workload import Workload
from kvortex.errors import KVortexError
from kvortex.sizes import counted

_WARM_UP_TOKENS: Final = 4
_PROGRESS_EVERY_S: Final = 15.0


class WarmUpError(KVortexError):
    """The request before the load has no answer: there is nothing to measure."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of all conversations.

    Attributes:
        wall_s: from the first request's sending to the last one's end.
        results: of each conversation, in their order.
    """

    wall_s: float
    results: tuple[Good | Failed, ...]


@dataclass(frozen=True, slots=True)
class Played:
    """What came of it.

    Attributes:
        counters: the server's, before turn 1 and after each turn; empty where it has none.
        stand_in_answers: answers whose token ids the server did not tell: the next prompts held other ones.
        client_cpu_share: of one core, used by this process during the load.
    """

    workload: Workload
    turns: tuple[Turn, ...]
    counters: tuple[Counters, ...]
    stand_in_answers: int
    client_cpu_share: float


async def play(endpoint: Endpoint, workload: Workload, *, timeout_s: float, say: Callable[[str], None]) -> Played:
    """Warms the server up with one request, then plays.

    A failed request is a result; its conversation goes on without that answer. So there are always
    conversations x turns requests.

    Args:
        timeout_s: a request that has not ended by then has failed.
        say: told how far it is.

    Raises:
        WarmUpError: the server does not answer the first request.
    """
    async with endpoint.open_client() as client:
        await warm_up(client, endpoint, workload, timeout_s)
        return await _Player(client, endpoint, workload, timeout_s, say).play()


async def warm_up(client: httpx.AsyncClient, endpoint: Endpoint, workload: Workload, timeout_s: float) -> None:
    """One request that is not of the load; raises WarmUpError if it has no answer."""
    num_tokens = min(_WARM_UP_TOKENS, workload.gen)
    result = await complete(client, endpoint, workload.warm_up_prompt(), num_tokens, timeout_s)
    if isinstance(result, Failed):
        status = f" {result.status}" if result.status is not None else ""
        raise WarmUpError(f"the warm-up request failed ({result.kind}{status}): {result.detail}")


class _Player:
    """One run of a workload."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        endpoint: Endpoint,
        workload: Workload,
        timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        self.client = client
        self.endpoint = endpoint
        self.workload = workload
        self.timeout_s = timeout_s
        self.say = say
        self.prompts: list[list[int]] = [[] for _ in range(workload.conversations)]
        self.room = asyncio.Semaphore(workload.concurrency)
        self.stand_in_answers = 0
        self.done_of_turn = 0

    async def play(self) -> Played:
        counters = [await read_counters(self.client)]
        turns: list[Turn] = []
        wall_s = cpu_s = 0.0
        for number in range(1, self.workload.turns + 1):
            for conversation, prompt in enumerate(self.prompts):
                prompt += self.workload.user_tokens(conversation, number)
            cpu_before = time.process_time()
            turns.append(await self._turn(number))
            cpu_s += time.process_time() - cpu_before
            wall_s += turns[-1].wall_s
            counters.append(await read_counters(self.client))
        known = [reading for reading in counters if reading is not None]
        complete_readings = len(known) == len(counters) and len({reading.counted_by for reading in known}) == 1
        return Played(
            workload=self.workload,
            turns=tuple(turns),
            counters=tuple(known) if complete_readings else (),
            stand_in_answers=self.stand_in_answers,
            client_cpu_share=cpu_s / wall_s if wall_s > 0 else 0.0,
        )

    async def _turn(self, number: int) -> Turn:
        self.done_of_turn = 0
        started = time.perf_counter()
        progress = asyncio.create_task(self._say_progress(number))
        try:
            # A group, so that an interruption ends every request at once.
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._ask(i, number)) for i in range(self.workload.conversations)]
        finally:
            progress.cancel()
        wall_s = time.perf_counter() - started
        turn = Turn(wall_s, tuple(task.result() for task in tasks))
        failed = sum(isinstance(result, Failed) for result in turn.results)
        self.say(f"turn {number} of {self.workload.turns}: {wall_s:.1f} s, {len(tasks) - failed} ok, {failed} failed")
        return turn

    async def _ask(self, conversation: int, number: int) -> Good | Failed:
        prompt = self.prompts[conversation]
        async with self.room:
            result = await complete(self.client, self.endpoint, prompt, self.workload.gen, self.timeout_s)
        self.done_of_turn += 1
        if isinstance(result, Good):
            if result.token_ids is None:
                self.stand_in_answers += 1
                prompt += self.workload.stand_in_answer(conversation, number, result.output_tokens)
            else:
                prompt += result.token_ids
        return result

    async def _say_progress(self, number: int) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_EVERY_S)
            self.say(f"turn {number}: {self.done_of_turn:,} of {counted(self.workload.conversations, 'request')} ended")
