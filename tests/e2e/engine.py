"""A vLLM engine in the test's own process, so that a test can look into the scheduler and stand in for the copier."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, has_kv_transfer_group
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core.block_pool import BlockPool

from kvortex.cache import gate
from kvortex.cache.costs import StepCosts
from kvortex.transfer.base import CopyEngine, KVLayout
from kvortex.transfer.slab import HostSlab
from kvortex.vllm_plugin.connector import KVortexConnector
from kvortex.vllm_plugin.scheduler import SchedulerSide
from kvortex.vllm_plugin.worker import WorkerSide

BLOCK_SIZE = 32
BLOCK_BYTES = 3 * 2 * 32 * 2 * BLOCK_SIZE
"""Of the tiny Llama: 3 layers, K and V, one head of 32, bf16."""

WRITE_THROUGH = {"offload_threshold": 0.0}

# vLLM expects one engine a process. It would import itself again, in another process, for each new architecture, and
# would wrap its kernels for each engine, which fails once numba's modules are there.
registry._run_in_subprocess = lambda look: look()
if hasattr(CpuPlatform, "register_triton_kernel_overrides"):  # not before vLLM 0.27
    register_overrides = CpuPlatform.register_triton_kernel_overrides.__func__
    CpuPlatform.register_triton_kernel_overrides = classmethod(cache(register_overrides))

gc.collect()
gc.freeze()  # what is imported stays, and need not be looked through at the end of each engine

MakeEngine = Callable[[KVLayout, HostSlab], CopyEngine]


def prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 510) for _ in range(num_tokens)]


def greedy(max_tokens: int = 8, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=1, **params)


class Engine:
    """One vLLM with or without KVortex."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler

    @property
    def connector(self) -> KVortexConnector:
        connector = self.scheduler.connector
        assert isinstance(connector, KVortexConnector)
        return connector

    @property
    def side(self) -> SchedulerSide:
        return self.connector._scheduler_side

    def ask(self, tokens: Sequence[int], params: SamplingParams | None = None) -> Answer:
        return self.ask_all([tokens], params)[0]

    def ask_all(self, prompts: Sequence[Sequence[int]], params: SamplingParams | None = None) -> list[Answer]:
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(p)} for p in prompts], params or greedy(), use_tqdm=False
        )
        return [
            (tuple(o.outputs[0].token_ids), tuple(next(iter(d.values())).logprob for d in o.outputs[0].logprobs or ()))
            for o in outputs
        ]

    def evict_vram(self, push: Callable[[list[int]], object] | None = None) -> None:
        """Pushes unrelated prompts until nothing of earlier ones is left in vLLM's pool; a reset would empty RAM.

        Args:
            push: for a model that does not generate.
        """
        push = push or (lambda tokens: self.ask(tokens, greedy(1)))
        if self.scheduler.connector is not None:
            self.settle()  # a store under way would lose its block
        tokens = (self.pool.num_gpu_blocks - 2) * int(self.core.vllm_config.cache_config.block_size)
        old = self.cached_hashes()
        for _ in range(50):
            if not old & self.cached_hashes():
                return
            push(prompt(random.randrange(10**9), min(tokens, 1000)))
        raise AssertionError("earlier blocks stay in VRAM")

    @property
    def pool(self) -> BlockPool:
        return self.scheduler.kv_cache_manager.block_pool

    def cached_hashes(self) -> set[Any]:
        """What vLLM's pool would find."""
        return {block.block_hash for block in self.pool.blocks if block.block_hash is not None}

    @contextmanager
    def matches(self) -> Iterator[list[tuple[int | None, bool]]]:
        """What KVortex answers meanwhile when vLLM asks what of a prompt it has."""
        answers: list[tuple[int | None, bool]] = []
        match = self.connector.get_num_new_matched_tokens

        def told(*asked: Any) -> tuple[int | None, bool]:
            answers.append(match(*asked))
            return answers[-1]

        with patch.object(self.connector, "get_num_new_matched_tokens", told):
            yield answers

    def settle(self, within_s: float = 300.0) -> None:
        """Steps until no copy is unanswered; at once where the test ends copies by hand."""
        deadline = time.monotonic() + within_s
        while self.side.busy and time.monotonic() < deadline and not getattr(self, "copier", None):
            self.llm.llm_engine.step()

    def stats(self) -> dict[str, Any]:
        """The snapshot, after checking what must hold whatever was done."""
        side = self.side
        snapshot = side.snapshot()
        tokens = snapshot["tokens"]
        assert tokens["vram_hit"] + tokens["ram_hit"] + tokens["computed"] == tokens["queried"], tokens
        assert sum(snapshot["missed"].values()) == tokens["computed"], snapshot["missed"]
        side._index.check()
        side._residency.check()
        if side._prefetcher is not None:
            side._prefetcher.check()
        return snapshot

    @property
    def free_blocks(self) -> int:
        return self.pool.get_num_free_blocks()


Answer = tuple[tuple[int, ...], tuple[float, ...]]


def _opened(side: WorkerSide, layout: KVLayout, make_engine: MakeEngine) -> tuple[HostSlab, CopyEngine]:
    slab = HostSlab(side._facts.num_slots, layout.block_bytes)
    return slab, make_engine(layout, slab)


def arguments_of(num_blocks: int, **options: Any) -> dict[str, Any]:
    """What vLLM is told of an engine with these options."""
    return {
        "max_model_len": 1152,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": num_blocks,
        "kv_cache_memory_bytes": 100_000_000,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        **options,
    }


@contextmanager
def engine(
    model: str,
    kv_cache: dict[str, Any] | None,
    *,
    num_blocks: int = 40,
    make_engine: MakeEngine | None = None,
    **options: Any,
) -> Iterator[Engine]:
    """A running engine; `kv_cache` None is plain vLLM. `make_engine` replaces the copy engine.

    Without prefetch unless `kv_cache` asks for it: it does things of its own accord.
    """
    if kv_cache is not None:
        defaults = {"ram_cache_size": 1000 * BLOCK_BYTES, "block_size": BLOCK_SIZE, "prefetch_enabled": False}
        settings = defaults | kv_cache
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KVortexConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=settings,
        )
    replaced = (
        patch.object(WorkerSide, "_open_engine", lambda side, layout: _opened(side, layout, make_engine))
        if make_engine is not None
        else nullcontext()
    )
    assert not has_kv_transfer_group(), "vLLM keeps one connector a process: another engine is still running"
    # What a busy machine takes for a step or a copy must not decide what a test loads and keeps.
    patient = patch.object(gate, "MAX_WAIT_S", 60.0)
    with replaced, patient, patch.object(StepCosts, "saw", lambda *_: None):
        llm = None
        try:
            with _uncollected():
                llm = LLM(model, **arguments_of(num_blocks, **options))
            yield Engine(llm)
        finally:
            with _uncollected():
                if llm is not None:  # a start may have been refused half way
                    llm.llm_engine.engine_core.shutdown()
                ensure_kv_transfer_shutdown()
                cleanup_dist_env_and_memory()
            del llm
            gc.collect()


@contextmanager
def _uncollected() -> Iterator[None]:
    """vLLM goes through all that is imported eight times for each engine, which takes longer than all the rest."""
    names = ("collect", "freeze", "unfreeze")
    nothing = {name: lambda *_: 0 for name in names}
    with patch.multiple(gc, **nothing):
        yield
