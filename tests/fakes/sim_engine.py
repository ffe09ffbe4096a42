"""vLLM's own scheduler, block pool and KVortex's connector in both roles, over devices that hold tags.

Nothing of vLLM or KVortex is replaced but what computes and what copies: `TagDevice`. One call schedules a step, one
takes a step's outputs; with `overlap` the next step is scheduled before the last one's outputs are in, as vLLM does.
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import numpy as np

from tests.fakes.clock import FakeClock
from tests.fakes.tag_device import LAYERS, POISON, StreamPoint, TagDevice, Tags

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

    from kvortex.cache.policies import make_deferred
    from kvortex.keys import BlockKey
    from kvortex.messages import StepPlan
    from kvortex.vllm_plugin import compat
    from kvortex.vllm_plugin import connector as connector_module
    from kvortex.vllm_plugin.connector import KVortexConnector, KVortexMetadata
    from kvortex.vllm_plugin.layer_waits import LayerWaits
    from kvortex.vllm_plugin.scheduler import SchedulerSide

BLOCK_SIZE: Final = 8
BLOCK_BYTES: Final = 2 * LAYERS * BLOCK_SIZE * 2
HASH: Final = "sha256"
STEP_TOKENS: Final = 64
"""A longer prompt takes several steps."""


def tags(tokens: Sequence[int], salt: int) -> list[int]:
    """What each position of this sequence leaves in the KV of a layer 0 on rank 0."""
    found, last = [], salt
    for token in tokens:
        last = hash((last, token)) & 0xFFFFFFFFFFFF
        found.append(last)
    return found


@cache
def _config_folder(folder: Path) -> str:
    from transformers import LlamaConfig

    shape = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = LlamaConfig(**shape, num_hidden_layers=LAYERS, vocab_size=512, max_position_embeddings=4096)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


def vllm_config(folder: Path, *, overlap: bool, max_running: int) -> VllmConfig:
    """Made once for a run of tests: it takes a while."""
    arguments = EngineArgs(
        model=_config_folder(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=512,
        block_size=16,
        enforce_eager=True,
        enable_prefix_caching=True,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=max_running,
        async_scheduling=overlap,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVortexConnector", kv_role="kv_both", kv_load_failure_policy="recompute"
        ),
    )
    config = arguments.create_engine_config()
    config.scheduler_config.async_scheduling = overlap  # vLLM's CPU build turns it off
    return config


class Wish:
    """A request as the test wants it, and what the right answer is."""

    def __init__(self, name: str, prompt: list[int], max_tokens: int, salt: int) -> None:
        self.name = name
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.said: list[int] = []
        self.gone = False
        self.ended = False
        self.sequence = list(prompt)
        self.tags = tags(prompt, salt)
        for _ in range(max_tokens + 2):
            self.sequence.append(3 + self.tags[-1] % 500)
            self.tags.append(hash((self.tags[-1], self.sequence[-1])) & 0xFFFFFFFFFFFF)


@dataclass(frozen=True)
class _InFlight:
    """A step whose outputs vLLM has not taken; its kernels are in each device's stream before `ends`."""

    scheduled: SchedulerOutput
    rank_outputs: list[ModelRunnerOutput]
    ends: list[int]


class SimEngine:
    """One engine: `add`, `schedule`, `take_output`, `abort`, `reset`, and the devices to be worked."""

    def __init__(
        self,
        config: VllmConfig,
        *,
        num_blocks: int = 24,
        num_slots: int = 40,
        num_ranks: int = 1,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.overlap = bool(config.scheduler_config.async_scheduling)
        self._num_ranks = num_ranks
        transfer = config.kv_transfer_config
        assert transfer is not None
        transfer.kv_connector_extra_config = {
            "ram_cache_size": num_slots * BLOCK_BYTES * num_ranks,
            "offload_batch": 4 * BLOCK_BYTES * num_ranks,
            **(settings or {}),
        }
        config.cache_config.num_gpu_blocks = num_blocks
        config.cache_config.block_size = BLOCK_SIZE
        config.cache_config.prefix_caching_hash_algo = HASH
        page = BLOCK_BYTES // LAYERS
        layers = [f"layer.{i}" for i in range(LAYERS)]
        kv = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[KVCacheTensor(num_blocks * BLOCK_BYTES, layers, num_blocks * page, page)],
            kv_cache_groups=[
                KVCacheGroupSpec(
                    layers, FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.bfloat16)
                )
            ],
        )
        self._layers = layers
        init_none_hash(get_hash_fn_by_name(HASH))
        self._hasher = get_request_block_hasher(BLOCK_SIZE, get_hash_fn_by_name(HASH))
        self._config = config
        with ExitStack() as stack:
            stack.enter_context(patch.object(config.parallel_config, "world_size", num_ranks))
            # One rank's part of a block is what a device of the test holds; nothing listens and nobody watches here.
            stack.enter_context(patch.dict(SchedulerSide.__init__.__kwdefaults__ or {}, clock=self.clock))
            stack.enter_context(
                patch.object(connector_module, "make_deferred", partial(make_deferred, clock=self.clock))
            )
            stack.enter_context(patch.object(connector_module, "StatsServer", _NoServer))
            stack.enter_context(patch.object(connector_module, "end_with_parent", lambda: None))
            make = AsyncScheduler if self.overlap else Scheduler
            self.scheduler = make(config, kv, StructuredOutputManager(config), block_size=BLOCK_SIZE)
            self.workers: list[KVortexConnector] = []
            self.devices: list[TagDevice] = []
            for rank in range(num_ranks):
                with patch.object(config.parallel_config, "rank", rank):
                    worker = KVortexConnector(config, KVConnectorRole.WORKER, kv)
                device = TagDevice(num_blocks, num_slots, BLOCK_SIZE)
                side = worker._worker_side
                side._engine = device
                side._layer_waits = LayerWaits({name: (i,) for i, name in enumerate(layers)})
                side._num_regions = LAYERS
                self.workers.append(worker)
                self.devices.append(device)
            connector = self.scheduler.connector
            assert isinstance(connector, KVortexConnector)
            self.connector = connector
            self._aggregator = KVOutputAggregator.from_connector(connector, num_ranks)
        self.side = connector._scheduler_side
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free_at_start = self.pool.get_num_free_blocks()
        self.wishes: dict[str, Wish] = {}
        self.content_of: dict[BlockKey, list[int]] = {}
        self.in_flight: deque[_InFlight] = deque()
        self.ordered = Counter[str]()
        self.steps = 0

    # ---- requests

    def add(
        self, name: str, prompt: list[int], *, max_tokens: int = 2, salt: str | None = None, session: str | None = None
    ) -> Wish:
        wish = Wish(name, prompt, max_tokens, 0 if salt is None else hash(salt))
        self.wishes[name] = wish
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=_sampling(max_tokens, session),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return wish

    def abort(self, name: str) -> None:
        wish = self.wishes[name]
        wish.gone = wish.ended = True
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def live(self) -> list[str]:
        return [name for name, wish in self.wishes.items() if not wish.ended]

    # ---- steps

    @property
    def may_schedule(self) -> bool:
        return len(self.in_flight) < (2 if self.overlap else 1)

    def schedule(self) -> SchedulerOutput:
        """Schedules a step and submits it to the devices; kernels and copies run when the test says, or at the latest
        when the step's output is taken."""
        output = self.scheduler.schedule()
        self._learn_keys()
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, KVortexMetadata)
        self._count(metadata.plan)
        work = self._work(output)
        rank_outputs = [self._run_worker(rank, output, work) for rank in range(self._num_ranks)]
        self.in_flight.append(_InFlight(output, rank_outputs, [device.submitted for device in self.devices]))
        self.steps += 1
        return output

    def _count(self, plan: StepPlan) -> None:
        for store in plan.stores:
            self.ordered["stores"] += len(store.slots)
        for load in [*plan.loads, *plan.step_loads, *plan.refused]:
            self.ordered["loads"] += len(load.gpu_blocks)
        for load in plan.prefetches:
            self.ordered["prefetches"] += len(load.gpu_blocks)

    def take_output(self) -> None:
        """The oldest step's output: its kernels have run."""
        step = self.in_flight.popleft()
        for device, end in zip(self.devices, step.ends, strict=True):
            device.run(end)
        output = self._aggregator.aggregate(list(step.rank_outputs))
        assert output is not None
        made = self.scheduler.update_from_output(step.scheduled, output)
        for outputs in made.values():
            for one in outputs.outputs:
                wish = self.wishes[one.request_id]
                wish.said.extend(one.new_token_ids)
                if one.finish_reason is not None:
                    wish.ended = True
                    assert one.finish_reason.name == "LENGTH", (one.request_id, one.finish_reason)
        for wish in self.wishes.values():
            right = wish.sequence[len(wish.prompt) :][: len(wish.said)]
            assert wish.said == right, f"{wish.name} said {wish.said}, not {right}"
        self._learn_keys()

    def _work(self, output: SchedulerOutput) -> list[tuple[Wish, list[int], int, int]]:
        """(request, its blocks, first token computed, behind the last) of the step."""
        begins = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        begins.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        work = []
        for name, count in output.num_scheduled_tokens.items():
            (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            work.append((self.wishes[name], list(blocks), begins[name], begins[name] + count))
        return work

    def _run_worker(self, rank: int, output: SchedulerOutput, work: list[Any]) -> ModelRunnerOutput:
        """As vLLM's model runner calls a connector, see its `KVConnectorModelRunnerMixin`."""
        worker, device = self.workers[rank], self.devices[rank]
        assert output.kv_connector_metadata is not None
        worker.bind_connector_metadata(output.kv_connector_metadata)
        context: Any = SimpleNamespace(
            attn_metadata={"any": 1} if work else None, cudagraph_runtime_mode=SimpleNamespace(name="NONE")
        )
        loads_first = output.has_sync_kv_loads
        if loads_first:
            worker.start_load_kv(context)
        if work:
            for layer, name in enumerate(self._layers):
                worker.wait_for_layer_load(name)
                device.launch(self._kernel(rank, layer, work))
        if not loads_first:
            worker.start_load_kv(context)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        answer = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        names = [wish.name for wish, *_ in work]
        sampled = []
        for wish, _, _, end in work:
            request = self.scheduler.requests[wish.name]
            sampled.append([wish.sequence[end]] if end >= request.num_tokens else [])
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=None if answer.is_empty() else answer,
        )

    def _kernel(self, rank: int, layer: int, work: list[Any]) -> Callable[[], None]:
        """One layer of one step: what is computed is written, then each request reads all of its own so far. In this
        order, as attention does: a request may find in VRAM what another one computes in the same step."""
        vram = self.devices[rank].vram[layer]
        mark = self.mark(rank, layer)

        def run() -> None:
            for wish, blocks, begin, end in work:
                for position in range(begin, end):
                    vram[blocks[position // BLOCK_SIZE], position % BLOCK_SIZE] = wish.tags[position] + mark
            for wish, blocks, _, end in work:
                expected = np.array(wish.tags[:end], dtype=np.int64) + mark
                wrong = np.flatnonzero(vram[blocks].reshape(-1)[:end] != expected)
                assert not wrong.size, (
                    f"{wish.name} reads what is not its own at {wrong[:4].tolist()} of {end}, "
                    f"layer {layer}, rank {rank}, block {blocks[int(wrong[0]) // BLOCK_SIZE]}"
                )

        return run

    @staticmethod
    def mark(rank: int, layer: int) -> int:
        return (rank * LAYERS + layer) << 50

    # ---- what each key stands for

    def _learn_keys(self) -> None:
        for name, request in self.scheduler.requests.items():
            wish = self.wishes[name]
            for i, block_hash in enumerate(request.block_hashes):
                key = BlockKey(block_hash + (0).to_bytes(4, "big"))
                self.content_of.setdefault(key, wish.tags[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE])

    def keys_of(self, tokens: list[int], salt: str | None = None) -> list[BlockKey]:
        """The keys of a prompt's complete blocks."""
        return compat.prompt_keys(tokens, salt, self.side._groups[0], BLOCK_SIZE, HASH)

    def expected(self, key: BlockKey, rank: int, layer: int) -> Tags:
        return np.array(self.content_of[key], dtype=np.int64) + self.mark(rank, layer)

    # ---- forgetting

    def reset_vram(self, *, running: bool = False) -> bool:
        """vLLM's reset of its prefix cache; `running`: with the requests that run preempted."""
        return bool(self.scheduler.reset_prefix_cache(reset_running_requests=running))

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()


def _sampling(max_tokens: int, session: str | None) -> SamplingParams:
    extra = None if session is None else {"kv_transfer_params": {"session_id": session}}
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)


class _NoServer:
    def __init__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


__all__ = ["BLOCK_SIZE", "POISON", "SimEngine", "StreamPoint", "Wish", "vllm_config"]
