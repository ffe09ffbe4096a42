"""A decoder that embeds: what its last token gives may come from the cache, what every token gives may not."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import PoolerConfig

from kvortex.transfer.cpu import CpuCopyEngine
from tests.e2e.engine import WRITE_THROUGH, Engine, engine, prompt
from tests.e2e.tiny_models import save_model
from tests.fakes.copy_engines import ZeroLoadMover

PROMPTS = [prompt(seed, 600) for seed in range(2)]


def options(task: str) -> dict[str, Any]:
    return {"runner": "pooling", "skip_tokenizer_init": False, "pooler_config": PoolerConfig(task=task)}


def ask_all(vllm: Engine, task: str, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    questions = [{"prompt_token_ids": tokens} for tokens in prompts]
    return [a.outputs.data.tolist() for a in vllm.llm.encode(questions, pooling_task=task, use_tqdm=False)]


def evict_vram(vllm: Engine, task: str) -> None:
    vllm.evict_vram(lambda tokens: ask_all(vllm, task, [tokens]))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory) -> str:
    return str(save_model("qwen3", tmp_path_factory.mktemp("embedder")))


def test_embeddings_are_equal_through_eviction_and_load(embedder):
    with engine(embedder, None, **options("embed")) as plain:
        right = ask_all(plain, "embed")
    movers: list[ZeroLoadMover] = []

    def make_engine(layout, slab):
        movers.append(ZeroLoadMover(layout, slab, zeros=False))
        return CpuCopyEngine(layout, slab, 2, mover=movers[0])

    with engine(embedder, WRITE_THROUGH, make_engine=make_engine, **options("embed")) as vllm:
        assert ask_all(vllm, "embed") == right
        evict_vram(vllm, "embed")
        before = vllm.stats()["load"]["bytes"]
        assert ask_all(vllm, "embed") == right
        assert vllm.stats()["load"]["bytes"] > before
        evict_vram(vllm, "embed")
        movers[0].zeros = True
        assert all(wrong != same for wrong, same in zip(ask_all(vllm, "embed"), right, strict=True))


def test_embeddings_of_every_token_are_complete_and_equal(embedder):
    with engine(embedder, None, **options("token_embed")) as plain:
        right = ask_all(plain, "token_embed")
    with engine(embedder, WRITE_THROUGH, **options("token_embed")) as vllm:
        for _ in range(2):
            with vllm.matches() as matches:
                every = ask_all(vllm, "token_embed")
            assert set(matches) == {(0, False)}
            assert [len(tokens) for tokens in every] == [600, 600]
            assert every == right
            evict_vram(vllm, "token_embed")
        stats = vllm.stats()
        assert stats["tiers"]["ram"]["used_blocks"] > 0
        assert stats["load"]["bytes"] == 0
