"""Two real workers, each with its own slab and its own part of every block; one decision for both."""

from __future__ import annotations

import pytest

from tests.e2e.engine import BLOCK_SIZE, WRITE_THROUGH, engine, prompt
from tests.e2e.tiny_models import save_model

CONVERSATIONS = [prompt(seed, 600) for seed in range(3)]
HIT_BLOCKS = 18


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory):
    """Its KV heads are parted between the ranks; the tiny Llama has one, which both would have."""
    return str(save_model("llama-ungrouped", tmp_path_factory.mktemp("two-heads")))


def forget_bytes(worker, rank):
    """In a worker's process: its slab lies there as if nothing had been copied."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    slab = get_kv_transfer_group()._worker_side._slab
    if worker.rank == rank:
        slab.tensor.zero_()
    return worker.rank, slab.tensor.nbytes


def test_both_ranks_restore_their_part_and_one_that_does_not_is_found_out(two_heads):
    with engine(two_heads, WRITE_THROUGH, tensor_parallel_size=2) as vllm:
        computed = [vllm.ask(tokens) for tokens in CONVERSATIONS]
        assert vllm.stats()["ranks"] == 2
        for _ in range(3):
            vllm.evict_vram()
            before = vllm.stats()
            assert [vllm.ask(tokens) for tokens in CONVERSATIONS] == computed
            after = vllm.stats()
            assert after["tokens"]["ram_hit"] - before["tokens"]["ram_hit"] == 3 * HIT_BLOCKS * BLOCK_SIZE
        assert after["failures"]["load"] == after["failures"]["store"] == 0
        assert (
            after["load"]["bytes"]
            == after["load"]["blocks"]
            * after["tiers"]["ram"]["capacity_bytes"]
            // (after["tiers"]["ram"]["capacity_blocks"])
        )

        vllm.evict_vram()
        told = vllm.llm.collective_rpc(forget_bytes, args=(1,))
        assert sorted(rank for rank, _ in told) == [0, 1]
        assert sum(size for _, size in told) == pytest.approx(after["tiers"]["ram"]["capacity_bytes"], rel=0.05)
        assert [vllm.ask(tokens) for tokens in CONVERSATIONS] != computed, "the test sees one rank's bytes"


def test_what_one_rank_cannot_give_is_computed_by_both(two_heads):
    """The other rank has loaded its part well; the blocks count as failed on both."""
    with engine(two_heads, {**WRITE_THROUGH, "verify": "all"}, tensor_parallel_size=2) as vllm:
        computed = [vllm.ask(tokens) for tokens in CONVERSATIONS]
        vllm.evict_vram()
        vllm.llm.collective_rpc(forget_bytes, args=(1,))
        assert [vllm.ask(tokens) for tokens in CONVERSATIONS] == computed
        stats = vllm.stats()
        assert stats["failures"]["load"] == stats["verify"]["failed_load_blocks"] == 3 * HIT_BLOCKS
        assert stats["failures"]["recomputed_tokens"] == 3 * HIT_BLOCKS * BLOCK_SIZE
        assert stats["tokens"]["ram_hit"] == 0
        assert stats["tiers"]["ram"]["pinned_blocks"] == 0
        assert stats["tiers"]["ram"]["quarantined_blocks"] == 3 * HIT_BLOCKS
        # What was computed again was stored again, in other slots.
        vllm.evict_vram()
        assert [vllm.ask(tokens) for tokens in CONVERSATIONS] == computed
        assert vllm.stats()["tokens"]["ram_hit"] == 3 * HIT_BLOCKS * BLOCK_SIZE
