"""Each kind of model in `model_table.py`: it answers as without KVortex, or is refused at start in one message."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform

from kvortex.errors import KVortexError
from kvortex.transfer.cpu import CpuCopyEngine
from kvortex.vllm_plugin.worker import WorkerSide
from tests.e2e.engine import BLOCK_SIZE, WRITE_THROUGH, engine, prompt
from tests.e2e.model_table import MODELS, REFUSED, Model, Refused
from tests.e2e.tiny_models import save_model
from tests.fakes.copy_engines import ZeroLoadMover

PROMPTS = [prompt(seed, 600) for seed in range(3)]
ALL_MODELS = os.environ.get("KVORTEX_TEST_ALL_MODELS") == "1"
HAS: dict[str, Callable[[], bool]] = {
    "amx": torch.cpu._is_amx_tile_supported,
    "avx512": lambda: torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported(),
}
"""What vLLM asks a processor for."""


@contextmanager
def prefix_caching_forced() -> Iterator[None]:
    """vLLM's CPU build turns it off for multi-head latent attention, whose kernels can do it."""
    as_it_is = CpuPlatform.check_and_update_config.__func__

    def check_and_update(platform: type[CpuPlatform], config: VllmConfig) -> None:
        as_it_is(platform, config)
        config.cache_config.enable_prefix_caching = True
        config.scheduler_config.enable_chunked_prefill = True

    with patch.object(CpuPlatform, "check_and_update_config", classmethod(check_and_update)):
        yield


def serves_as_without_kvortex(row: Model, folder: str) -> None:
    """Computed answers are plain vLLM's computed ones, loaded ones are plain vLLM's from its own prefix cache. These
    two are equal but where vLLM adds up a cached prefix apart, as it does for latent attention.

    In the end all loads bring zeros, and the answers must be other ones: they do come from what is loaded.
    """
    with engine(folder, None, **row.options) as plain:
        pairs = [(plain.ask(tokens), plain.ask(tokens)) for tokens in PROMPTS]
        computed, cached = map(list, zip(*pairs, strict=True))
    if not row.caching_forced:
        assert cached == computed

    movers: list[ZeroLoadMover] = []

    def make_engine(layout, slab):
        movers.append(ZeroLoadMover(layout, slab, zeros=False))
        return CpuCopyEngine(layout, slab, 2, mover=movers[0])

    block_size = row.options.get("block_size", BLOCK_SIZE)
    settings = {**WRITE_THROUGH, "ram_cache_size": 20_000_000, "block_size": block_size}
    with engine(folder, settings, make_engine=make_engine, **row.options) as vllm:
        assert [vllm.ask(tokens) for tokens in PROMPTS] == computed
        vllm.evict_vram()
        assert vllm.stats()["load"]["bytes"] == 0
        for tokens, right in zip(PROMPTS, cached, strict=True):
            before = vllm.stats()
            assert vllm.ask(tokens) == right
            after = vllm.stats()
            assert after["load"]["bytes"] > before["load"]["bytes"]
            hit = after["tokens"]["ram_hit"] - before["tokens"]["ram_hit"]
            assert hit == 599 // block_size * block_size
        vllm.evict_vram()
        movers[0].zeros = True
        wrong = [vllm.ask(tokens) for tokens in PROMPTS]
        assert all(text != right for (text, _), (right, _) in zip(wrong, cached, strict=True))


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row.family)
def test_a_model_answers_as_without_kvortex(tmp_path, row):
    if row.long and not ALL_MODELS:
        pytest.skip("KVORTEX_TEST_ALL_MODELS=1 runs it")
    folder = str(save_model(row.family, tmp_path / row.family))
    if row.caching_forced:
        with prefix_caching_forced():
            serves_as_without_kvortex(row, folder)
    else:
        serves_as_without_kvortex(row, folder)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_a_model_that_cannot_be_served_is_refused_at_start_in_one_message(tmp_path, monkeypatch, row: Refused):
    """And before a worker has taken its part of RAM."""
    folder = str(save_model(row.family, tmp_path / row.family))
    if row.cpus and HAS[row.cpus]():
        serves_as_without_kvortex(Model(row.name, row.family, row.attention, row.options), folder)
        return
    registered: list[WorkerSide] = []
    monkeypatch.setattr(WorkerSide, "register", lambda side, _: registered.append(side))
    with (
        pytest.raises(NotImplementedError if row.by_vllm else KVortexError) as refusal,
        engine(folder, WRITE_THROUGH, **row.options),
    ):
        pass
    first_line, *hint = str(refusal.value).splitlines()
    assert first_line == row.message
    if not row.by_vllm:
        assert len(hint) == 1
        assert "kv_cache.backend: none" in hint[0]
        assert not registered
