"""Bytes that change in RAM are caught before they are loaded, and computed again; unverified, they make a wrong text.

KVORTEX_VERIFY_ROUNDS sets how often twenty blocks are changed; 5 unless set.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvortex.keys import BlockKey
from kvortex.transfer import checksums
from tests.e2e.engine import BLOCK_BYTES, BLOCK_SIZE, WRITE_THROUGH, Engine, engine, greedy, prompt

ROUNDS = int(os.environ.get("KVORTEX_VERIFY_ROUNDS", "5"))
CHANGES = 20
"""A round."""

PROMPT_BLOCKS = 6
PROMPTS = [prompt(seed, PROMPT_BLOCKS * BLOCK_SIZE + 1) for seed in range(16)]
"""Whole blocks and a token more, with which the answer fills no block: what RAM holds of them is what is loaded."""


class Damage:
    """Changes bytes of blocks in RAM: a bit, a byte, a run of bytes or all of the block."""

    def __init__(self, vllm: Engine) -> None:
        self._vllm = vllm
        self._rows = get_kv_transfer_group()._worker_side._slab.tensor.numpy()
        self._rng = random.Random(1)
        self.keys: list[BlockKey] = []

    def choose(self, count: int) -> list[int]:
        """Slots of the prompts' blocks."""
        slots = sorted(self._vllm.side._index.ready_slots(self.keys).values())
        assert len(slots) == len(self.keys), "a block of the prompts is not in RAM"
        return self._rng.sample(slots, count)

    def change(self, slot: int) -> None:
        size = self._rng.choice([1, 1, 64, BLOCK_BYTES])
        begin = self._rng.randrange(BLOCK_BYTES - size + 1)
        one_bit = size == 1 and self._rng.random() < 0.5
        mask = [1 << self._rng.randrange(8)] if one_bit else [self._rng.randrange(1, 256) for _ in range(size)]
        self._rows[slot, begin : begin + size] ^= np.array(mask, np.uint8)


@contextmanager
def warm(model: str, verify: str) -> Iterator[tuple[Engine, Damage, list[tuple[int, ...]]]]:
    """An engine with the prompts in RAM, and the right answers."""
    settings = {**WRITE_THROUGH, "verify": verify, "ram_cache_size": 4000 * BLOCK_BYTES}
    with engine(model, settings, num_blocks=40) as vllm:
        right = texts(vllm)
        vllm.settle()
        damage = Damage(vllm)
        index = vllm.side._index
        damage.keys = [key for slot in range(index.num_slots) if (key := index.key_at(slot)) is not None]
        assert len(damage.keys) == PROMPT_BLOCKS * len(PROMPTS)
        yield vllm, damage, right


def texts(vllm: Engine) -> list[tuple[int, ...]]:
    return [tokens for tokens, _ in vllm.ask_all(PROMPTS, greedy(8))]


def change_while_others_run(vllm: Engine, damage: Damage, slots: Sequence[int], seed: int) -> None:
    """Others' prompts push the prompts out of VRAM; between their steps the slots are changed."""
    rng = random.Random(seed)
    left = list(slots)
    core = vllm.llm.llm_engine
    for i in range(3):
        core.add_request(f"{seed}-{i}", {"prompt_token_ids": prompt(rng.randrange(10**9), 700)}, greedy(12))
    while core.has_unfinished_requests():
        core.step()
        while left and rng.random() < 0.6:
            damage.change(left.pop())
    for slot in left:
        damage.change(slot)
    vllm.evict_vram()


def test_every_block_that_changes_in_ram_is_caught_and_computed_again(tiny_llama):
    with warm(tiny_llama, "all") as (vllm, damage, right):
        changed: list[int] = []
        for round_number in range(ROUNDS):
            slots = damage.choose(CHANGES)
            assert not set(slots) & set(changed), "a slot that was found changed holds a block again"
            changed += slots
            change_while_others_run(vllm, damage, slots, round_number)
            assert texts(vllm) == right
            vllm.settle()
            stats = vllm.stats()
            assert stats["verify"]["corrupt_blocks"] == len(changed)
            assert stats["tiers"]["ram"]["quarantined_blocks"] == len(changed)
        assert stats["verify"]["intact_blocks"] > 0, "prompts without a changed block come from RAM"
        assert stats["tokens"]["ram_hit"] > 0
        assert stats["verify"]["failed_load_blocks"] == stats["failures"]["load"] >= len(changed)
        assert stats["missed"]["load_failed"] == stats["failures"]["recomputed_tokens"] > 0
        assert stats["tiers"]["ram"]["pinned_blocks"] == 0
        assert vllm.side._index.doomed == 0
        assert vllm.llm.reset_prefix_cache()
        assert vllm.stats()["tiers"]["ram"]["quarantined_blocks"] == len(changed), "memory is not mended by a reset"
        assert texts(vllm) == right


def test_an_abort_while_blocks_are_compared_leaks_nothing(tiny_llama, monkeypatch):
    with warm(tiny_llama, "all") as (vllm, _, right):
        vllm.evict_vram()
        vllm.settle()
        free = vllm.free_blocks
        entered, opened = threading.Event(), threading.Event()
        real = checksums.xxhash.xxh3_64_intdigest

        def held(row: np.ndarray) -> int:
            entered.set()
            assert opened.wait(300), "never opened"
            return real(row)

        monkeypatch.setattr(checksums.xxhash, "xxh3_64_intdigest", held)
        core = vllm.llm.llm_engine
        core.add_request("gone", {"prompt_token_ids": PROMPTS[0]}, greedy())
        deadline = time.monotonic() + 300
        while not entered.is_set():
            core.step()
            assert time.monotonic() < deadline, "nothing is compared"
        core.abort_request(["gone"])
        core.step()
        assert vllm.stats()["tiers"]["ram"]["pinned_blocks"] == PROMPT_BLOCKS, "their bytes are being read"
        opened.set()
        vllm.settle()
        stats = vllm.stats()
        assert stats["tiers"]["ram"]["pinned_blocks"] == stats["sessions"]["active"] == 0
        assert vllm.free_blocks == free
        assert texts(vllm) == right


def test_without_verification_the_same_changes_make_wrong_texts(tiny_llama):
    """The negative control: what the test above changes does matter."""
    with warm(tiny_llama, "off") as (vllm, damage, right):
        change_while_others_run(vllm, damage, damage.choose(CHANGES), 0)
        assert texts(vllm) != right
        assert vllm.stats()["failures"]["load"] == 0
