"""The answers with KVortex are those without it, and the tests that say so can fail."""

from __future__ import annotations

import pytest

from kvortex.messages import Direction
from kvortex.transfer.base import KVLayout
from kvortex.transfer.cpu import CpuCopyEngine, HostMover
from tests.e2e.engine import BLOCK_BYTES, BLOCK_SIZE, WRITE_THROUGH, engine, greedy, prompt
from tests.fakes.copy_engines import ZeroLoadEngine

CONVERSATIONS = [prompt(seed, 600) for seed in range(4)]


@pytest.fixture(scope="module")
def expected(tiny_llama):
    """Plain vLLM's answers, each prompt computed from nothing."""
    with engine(tiny_llama, None) as plain:
        return [plain.ask(tokens) for tokens in CONVERSATIONS]


def test_text_and_logprobs_are_equal_through_store_eviction_and_load(tiny_llama, expected):
    with engine(tiny_llama, WRITE_THROUGH) as vllm:
        for _ in range(3):
            assert [vllm.ask(tokens) for tokens in CONVERSATIONS] == expected
        stats = vllm.stats()
        assert stats["tokens"]["ram_hit"] >= 4 * 18 * BLOCK_SIZE, (
            "half of what could be hit, on a machine too busy to copy in time"
        )
        assert stats["load"]["blocks"] > 0
        assert stats["load"]["with_step_blocks"] > 0
        assert stats["evicted"]["vram_blocks"] > 0


def test_an_engine_that_loads_zeros_is_found_out(tiny_llama, expected):
    """The negative control of the test above: the same claim with wrong bytes must not hold."""
    with engine(tiny_llama, WRITE_THROUGH, make_engine=lambda layout, slab: ZeroLoadEngine(layout, slab, 2)) as vllm:
        assert [vllm.ask(tokens) for tokens in CONVERSATIONS] == expected
        again = [vllm.ask(tokens) for tokens in CONVERSATIONS]
        assert vllm.stats()["tokens"]["ram_hit"] > 0
        assert vllm.stats()["load"]["with_step_blocks"] > 0
        assert again != expected


class SwappingMover(HostMover):
    """Loads each pair of blocks the wrong way round."""

    def copy_piece(self, direction, gpu_blocks, slots) -> None:
        if direction is Direction.LOAD:
            slots = slots[::-1].copy()
        super().copy_piece(direction, gpu_blocks, slots)


@pytest.mark.parametrize(("mover", "same"), [(HostMover, True), (SwappingMover, False)])
def test_every_loaded_block_has_the_bytes_that_were_computed_for_its_key(tiny_llama, mover, same):
    """Attention does not care in which order the blocks of one prefix lie, so text alone cannot tell; bytes can.
    With the mover that swaps blocks, the test must see it."""
    layouts: list[KVLayout] = []

    def make_engine(layout, slab):
        layouts.append(layout)
        return CpuCopyEngine(layout, slab, 1, mover=mover(layout, slab))

    def bytes_by_key(vllm):
        blocks = vllm.side._residency._key_of
        return {key: b"".join(r[block].numpy().tobytes() for r in layouts[0].regions) for block, key in blocks.items()}

    with engine(tiny_llama, WRITE_THROUGH, make_engine=make_engine) as vllm:
        vllm.ask(CONVERSATIONS[0])
        computed = bytes_by_key(vllm)
        vllm.evict_vram()
        vllm.ask(CONVERSATIONS[0])
        assert vllm.stats()["load"]["blocks"] == 18
        loaded = {key: held for key, held in bytes_by_key(vllm).items() if key in computed}
        assert len(loaded) == 18
        assert all(loaded[key] == computed[key] for key in loaded) is same


def test_with_the_default_thresholds_a_pool_that_overflows_slowly_keeps_conversations(tiny_llama, expected):
    """85 % and 75 % of a pool that one step cannot flush: what is reclaimed was stored before."""
    with engine(tiny_llama, {}, num_blocks=120, max_num_batched_tokens=1152) as vllm:
        prompts = [prompt(seed, 200) for seed in range(100, 140)]
        first = [vllm.ask(tokens) for tokens in prompts]
        assert [vllm.ask(tokens) for tokens in prompts] == first
        stats = vllm.stats()
        assert stats["tokens"]["ram_hit"] > 0
        assert stats["store"]["blocks"] > 0


@pytest.mark.parametrize("policy", ["adaptive", "lru"])
def test_a_pool_and_a_ram_far_smaller_than_the_load_still_answer_right(tiny_llama, expected, policy):
    settings = {**WRITE_THROUGH, "ram_cache_size": 30 * BLOCK_BYTES, "eviction_policy": policy}
    with engine(tiny_llama, settings, num_blocks=37) as vllm:
        for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 2, 1, 0], [0, 3, 3, 1]):
            assert [vllm.ask(CONVERSATIONS[i]) for i in order] == [expected[i] for i in order]
        stats = vllm.stats()
        assert stats["evicted"]["ram_blocks" if policy == "lru" else "vram_blocks"] > 0
        assert policy == "lru" or stats["tokens"]["ram_hit"] > 0
        assert stats["tiers"]["ram"]["used_blocks"] <= 30
        assert stats["tiers"]["ram"]["pinned_blocks"] == 0


def test_a_batch_of_requests_with_a_shared_prefix_loads_it_once(tiny_llama):
    shared = prompt(7, 512)
    prompts = [shared + prompt(seed, 40) for seed in range(20, 26)]
    with engine(tiny_llama, None, num_blocks=200) as plain:
        right = [plain.ask(tokens) for tokens in prompts]
    with engine(tiny_llama, WRITE_THROUGH, num_blocks=60) as vllm:
        vllm.ask(shared + [5] * 40)
        vllm.evict_vram()
        before = vllm.stats()["load"]["blocks"]
        together = vllm.ask_all(prompts)
        assert [tokens for tokens, _ in together] == [tokens for tokens, _ in right]
        loaded = vllm.stats()["load"]["blocks"] - before
        assert 16 <= loaded < 2 * 16, "the prefix is 16 blocks"


def test_a_request_that_ends_in_the_step_that_loads_is_counted_like_others(tiny_llama):
    with engine(tiny_llama, WRITE_THROUGH) as vllm:
        vllm.ask(CONVERSATIONS[0])
        vllm.evict_vram()
        before = vllm.stats()
        vllm.ask(CONVERSATIONS[0], greedy(1))
        after = vllm.stats()
        assert after["load"]["with_step_blocks"] - before["load"]["with_step_blocks"] == 18
        assert after["tokens"]["queried"] - before["tokens"]["queried"] == 600
        assert after["tokens"]["ram_hit"] - before["tokens"]["ram_hit"] == 18 * BLOCK_SIZE
        assert after["refused"]["aborted"] == 0
