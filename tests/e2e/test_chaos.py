"""Random requests, aborts, and copies that end in any order, late, failed or promised: right answers, no leak.

The seed is in the test's name; a failure repeats with it.
"""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest

from kvortex.cache.load_choice import Way
from kvortex.messages import Direction, JobId, LinkFacts
from tests.e2e.engine import BLOCK_BYTES, Engine, engine, greedy, prompt
from tests.fakes.copy_engines import HeldEngine

REQUESTS = 120
FAMILIES = 8
"""Conversations that requests are turns of: prompts of one family share a prefix."""


class ChaosEngine(HeldEngine):
    """Ends what it holds at random polls, in random order: done, failed or late; promises some loads before."""

    def __init__(self, layout, slab, rng: random.Random) -> None:
        super().__init__(layout, slab)
        self._rng = rng
        self._promised: set[JobId] = set()
        self.calm = False
        self.known_link = LinkFacts(1e9, by_layer=True)
        self.num_failed = 0

    def poll(self):
        for job_id in self._rng.sample(self.held, len(self.held)):
            if not self.calm and self._rng.random() < 0.6:
                continue
            if not self.calm and job_id not in self._promised and self._rng.random() < 0.15:
                self.num_failed += 1
                self._rng.choice([self.fail, self.time_out])(job_id)
            else:
                self.release(job_id)
        if self._rng.random() < 0.1 and self._last_answer:
            self._answers.append(self._rng.choice(list(self._last_answer.values())))  # an answer that comes twice
        return super().poll()

    def promise(self, window_s: float, never: Collection[JobId] = ()) -> list[JobId]:
        loads = [
            order.job_id
            for order in self._held.values()
            if order.direction is Direction.LOAD and order.job_id not in {*self._promised, *never}
        ]
        promised = [job_id for job_id in loads if self._rng.random() < 0.5]
        self._promised.update(promised)
        return promised


def prompts(rng: random.Random) -> list[list[int]]:
    families = [prompt(1000 + i, 640) for i in range(FAMILIES)]
    return [
        family[: rng.randrange(40, 641)] + prompt(rng.randrange(10**6), rng.choice([0, 3, 40]))
        for family in (rng.choice(families) for _ in range(REQUESTS))
    ]


def settle(vllm: Engine, chaos: ChaosEngine) -> None:
    chaos.calm = True
    for _ in range(30):
        vllm.llm.llm_engine.step()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {"offload_threshold": 0.0},
        {"prefetch_enabled": True},
        {"offload_threshold": 0.0, "eviction_policy": "lru", "prefetch_enabled": True},
    ],
    ids=["write-through", "defaults", "lru and prefetch"],
)
def test_answers_are_right_and_nothing_leaks(tiny_llama, seed, settings, monkeypatch):
    rng = random.Random(seed)
    asked = prompts(rng)
    with engine(tiny_llama, None, num_blocks=300) as plain:
        right = [tokens for tokens, _ in (plain.ask(tokens, greedy(4)) for tokens in asked)]
    made: list[ChaosEngine] = []

    def make_engine(layout, slab):
        made.append(ChaosEngine(layout, slab, rng))
        return made[-1]

    ways = [Way.WITH_STEP, Way.BEFORE_STEP, Way.BEFORE_STEP, Way.NEXT_STEP]
    settings = {**settings, "ram_cache_size": 90 * BLOCK_BYTES}
    with engine(tiny_llama, settings, num_blocks=60, make_engine=make_engine, max_num_seqs=6) as vllm:
        (chaos,) = made
        free = vllm.free_blocks
        monkeypatch.setattr(vllm.side._choice, "way", lambda *_, **__: rng.choice(ways))
        llm = vllm.llm.llm_engine
        waiting = list(range(REQUESTS))
        said: dict[int, tuple[int, ...]] = {}
        gone: set[int] = set()
        live: dict[str, int] = {}
        for _ in range(6000):
            while waiting and len(live) < 8:
                index = waiting.pop(0)
                name = f"r{index}x"
                llm.add_request(name, {"prompt_token_ids": asked[index]}, greedy(4))
                live[name] = index
            for output in llm.step():
                if output.finished:
                    name = next(n for n in live if output.request_id.startswith(n))
                    said[live.pop(name)] = tuple(output.outputs[0].token_ids)
            if live and rng.random() < 0.03:
                name = rng.choice(list(live))
                llm.abort_request([name])
                gone.add(live.pop(name))
            if not waiting and not live:
                break
        else:
            raise AssertionError(f"requests do not end: {sorted(live)}")
        settle(vllm, chaos)
        assert not chaos.held
        wrong = [index for index, tokens in said.items() if tokens != right[index]]
        assert not wrong, f"{len(wrong)} of {len(said)} answers are wrong: {wrong}"
        assert len(said) + len(gone) == REQUESTS
        stats = vllm.stats()
        assert stats["tokens"]["ram_hit"] > 0
        assert 0 < stats["load"]["with_step_blocks"] < stats["load"]["blocks"]
        assert stats["load"]["in_flight"] == stats["store"]["in_flight"] == 0
        assert stats["tiers"]["ram"]["pinned_blocks"] == 0
        assert stats["sessions"]["active"] == 0
        assert vllm.side._index.doomed == vllm.side._index.writing == 0
        assert vllm.free_blocks == free
        assert chaos.num_failed > 0
        assert stats["failures"]["load"] + stats["failures"]["store"] > 0
