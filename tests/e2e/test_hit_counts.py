"""Field trial B57: who hit what, told by KVortex, by vLLM's counters and by each request's own cached tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from vllm import SamplingParams

from kvortex.messages import Direction
from tests.e2e.engine import WRITE_THROUGH, Engine, engine, greedy, prompt
from tests.fakes.copy_engines import HeldEngine

LONG = prompt(1, 1024)
"""512 tokens of it in VRAM, 256 more in RAM, the rest nowhere."""


class Delta(NamedTuple):
    """What one request added.

    Attributes:
        queried, vram_hit, ram_hit, computed: KVortex's counters of prompt tokens.
        asked, taken: vLLM's external queries and hits.
        cached: of the request's own usage; None where it has none.
    """

    queried: int
    vram_hit: int
    ram_hit: int
    computed: int
    asked: int
    taken: int
    cached: int | None


class LoadsAsTold(HeldEngine):
    loads = "release"

    def submit(self, orders, *, after=None) -> None:
        super().submit(orders, after=after)
        for order in orders:
            if order.direction is Direction.STORE or self.loads == "release":
                self.release(order.job_id)
            elif self.loads == "fail":
                self.fail(order.job_id)


class Counted:
    """An engine, and the deltas of what it is asked."""

    def __init__(self, vllm: Engine, copier: LoadsAsTold) -> None:
        self.vllm, self.copier = vllm, copier
        self.asked = self.taken = 0
        make_stats = vllm.scheduler.make_stats

        def counted(*args: Any, **options: Any) -> Any:
            stats = make_stats(*args, **options)
            if stats is not None and stats.connector_prefix_cache_stats is not None:
                self.asked += stats.connector_prefix_cache_stats.queries
                self.taken += stats.connector_prefix_cache_stats.hits
            return stats

        vllm.scheduler.make_stats = counted

    def _now(self) -> tuple[int, ...]:
        tokens = self.vllm.stats()["tokens"]
        mine = (tokens[name] for name in ("queried", "vram_hit", "ram_hit", "computed"))
        return (*mine, self.asked, self.taken)

    def delta(self, tokens: list[int], params: SamplingParams | None = None) -> Delta:
        before = self._now()
        (output,) = self.vllm.llm.generate([{"prompt_token_ids": tokens}], params or greedy(1), use_tqdm=False)
        self.vllm.settle()
        change = [now - then for now, then in zip(self._now(), before, strict=True)]
        return Delta(*change, cached=output.num_cached_tokens)

    def aborted(self, tokens: list[int]) -> Delta:
        """Given up while its load is held."""
        before = self._now()
        self.copier.loads = "hold"
        llm = self.vllm.llm.llm_engine
        llm.add_request("gone", {"prompt_token_ids": tokens}, greedy(1))
        for _ in range(5):
            llm.step()
        assert self.copier.held
        llm.abort_request(["gone"])
        self.copier.release_all()
        for _ in range(5):
            llm.step()
        self.copier.loads = "release"
        change = [now - then for now, then in zip(self._now(), before, strict=True)]
        return Delta(*change, cached=None)


@pytest.fixture(scope="module")
def counted(tiny_llama) -> Iterator[Counted]:
    copiers: list[LoadsAsTold] = []

    def make(layout, slab):
        copiers.append(LoadsAsTold(layout, slab))
        return copiers[0]

    with engine(tiny_llama, WRITE_THROUGH, make_engine=make, disable_log_stats=False) as vllm:
        yield Counted(vllm, copiers[0])


def test_every_request_adds_exactly_what_it_took(counted: Counted) -> None:
    vllm = counted.vllm
    cold = counted.delta(LONG[:768])
    assert cold == Delta(768, 0, 0, 768, asked=768, taken=0, cached=0)

    vllm.evict_vram()
    counted.delta(LONG[:513])
    partly = counted.delta(LONG)
    assert partly == Delta(1024, 512, 256, 256, asked=512, taken=256, cached=768)

    # All of it is in VRAM now, but a prompt's last block is computed.
    local = counted.delta(LONG)
    assert local == Delta(1024, 992, 0, 32, asked=32, taken=0, cached=992)

    every_position = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    before = vllm.stats()["missed"]["not_asked"]
    # vLLM's own counter has it as asked of the connector; KVortex's says that it was not.
    assert counted.delta(LONG, every_position) == Delta(1024, 0, 0, 1024, asked=1024, taken=0, cached=0)
    assert vllm.stats()["missed"]["not_asked"] - before == 1024


def test_what_an_aborted_request_would_have_taken_is_not_used(counted: Counted) -> None:
    counted.delta(LONG)
    counted.vllm.evict_vram()
    gone = counted.aborted(LONG)
    assert gone[:4] == (0, 0, 0, 0)


def test_a_failed_load_is_a_failure_and_not_a_hit(counted: Counted) -> None:
    counted.delta(LONG)
    counted.vllm.evict_vram()
    before = counted.vllm.stats()["failures"]
    counted.copier.loads = "fail"
    failed = counted.delta(LONG)
    counted.copier.loads = "release"
    assert (*failed[:4], failed.cached) == (1024, 0, 0, 1024, 0)
    after = counted.vllm.stats()["failures"]
    assert after["load"] - before["load"] == 31
    assert after["recomputed_tokens"] - before["recomputed_tokens"] == 992
