"""vLLM's features answer as without KVortex, from blocks that were stored, evicted and loaded. One engine for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

from kvortex.transfer.cpu import CpuCopyEngine
from tests.e2e.engine import BLOCK_SIZE, WRITE_THROUGH, Engine, engine, greedy, prompt
from tests.e2e.tiny_models import save_lora
from tests.fakes.copy_engines import ZeroLoadMover

STEP_TOKENS = 256
OPTIONS = {
    "enable_lora": True,
    "max_lora_rank": 8,
    "max_num_batched_tokens": STEP_TOKENS,
    "skip_tokenizer_init": False,
}
LONG = prompt(1, 600)
SHORT = prompt(2, 80)
"""Three of them fit into a step: vLLM's CPU build cannot sample with a seed after a prefill in chunks."""
CROWD = [prompt(seed, 200) for seed in range(10, 16)]
"""Seven blocks each, and an eighth after 24 tokens: six of them do not fit into 39 blocks."""


@dataclass(frozen=True)
class Asked:
    """An engine with what the questions below need."""

    vllm: Engine
    adapter: LoRARequest
    mover: ZeroLoadMover | None = None

    def outputs(self, tokens: list[int], params: SamplingParams, salt: str | None = None, **options: Any) -> list[Any]:
        question = {"prompt_token_ids": tokens} | ({"cache_salt": salt} if salt else {})
        (answer,) = self.vllm.llm.generate([question], params, use_tqdm=False, **options)
        return answer.outputs

    def loaded_bytes(self) -> int:
        return self.vllm.stats()["load"]["bytes"]


def chunked(asked: Asked) -> Any:
    """The first is computed in three steps; of the second two are left behind what the first left in the cache."""
    assert len(LONG) > 2 * STEP_TOKENS
    return asked.vllm.ask(LONG), asked.vllm.ask(LONG + prompt(3, 400))


def lora(asked: Asked) -> Any:
    with_it = asked.outputs(LONG, greedy(), lora_request=asked.adapter)
    without = asked.outputs(LONG, greedy())
    assert with_it[0].token_ids != without[0].token_ids
    return with_it[0].token_ids, without[0].token_ids


def several(asked: Asked) -> Any:
    params = SamplingParams(n=3, temperature=1, seed=7, max_tokens=8, ignore_eos=True)
    texts = [tuple(output.token_ids) for output in asked.outputs(SHORT, params)]
    assert len(set(texts)) == 3
    return texts


def beam(asked: Asked) -> Any:
    params = BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True)
    (found,) = asked.vllm.llm.beam_search([{"prompt_token_ids": LONG}], params)
    return [(beam.tokens[len(LONG) :], beam.cum_logprob) for beam in found.sequences]


def structured(asked: Asked) -> Any:
    grammar = StructuredOutputsParams(regex=r"( ?w[1-4][0-9]){6}")
    (output,) = asked.outputs(LONG, SamplingParams(temperature=0, max_tokens=6, structured_outputs=grammar))
    assert all(word[1:].isdigit() and 10 <= int(word[1:]) < 50 for word in output.text.split())
    assert len(output.text.split()) == 6
    return output.text


def salted(asked: Asked) -> Any:
    return [asked.outputs(LONG, greedy(), salt=salt)[0].token_ids for salt in ("one tenant", "another")]


def crowded(asked: Asked) -> Any:
    scheduler = asked.vllm.scheduler
    with patch.object(scheduler, "_preempt_request", wraps=scheduler._preempt_request) as preempt:
        answers = asked.vllm.ask_all(CROWD, greedy(40))
    assert preempt.called
    return [text for text, _ in answers]


QUESTIONS: dict[str, Callable[[Asked], Any]] = {
    ask.__name__: ask for ask in (chunked, lora, several, beam, structured, salted, crowded)
}


def prompt_logprobs(asked: Asked) -> list[float]:
    question = {"prompt_token_ids": LONG}
    (answer,) = asked.vllm.llm.generate([question], greedy(2, prompt_logprobs=0), use_tqdm=False)
    return [next(iter(position.values())).logprob for position in answer.prompt_logprobs[1:]]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> LoRARequest:
    return LoRARequest("adapter", 1, str(save_lora(tmp_path_factory.mktemp("lora") / "adapter")))


@pytest.fixture(scope="module")
def expected(tiny_llama, adapter) -> dict[str, Any]:
    """Plain vLLM's answers, each computed from nothing."""
    answers = {}
    with engine(tiny_llama, None, **OPTIONS) as plain:
        asked = Asked(plain, adapter)
        for name, ask in [*QUESTIONS.items(), ("prompt_logprobs", prompt_logprobs)]:
            assert plain.llm.reset_prefix_cache()
            answers[name] = ask(asked)
    return answers


@pytest.fixture(scope="module")
def asked(tiny_llama, adapter, expected) -> Iterator[Asked]:
    movers: list[ZeroLoadMover] = []

    def make_engine(layout, slab):
        movers.append(ZeroLoadMover(layout, slab, zeros=False))
        return CpuCopyEngine(layout, slab, 2, mover=movers[0])

    with engine(tiny_llama, WRITE_THROUGH, make_engine=make_engine, **OPTIONS) as vllm:
        yield Asked(vllm, adapter, movers[0])


@pytest.mark.parametrize("name", QUESTIONS)
def test_answers_are_equal_through_eviction_and_load(expected, asked, name):
    """And are others where loads bring zeros, so they do come from what is loaded."""
    ask = QUESTIONS[name]
    assert asked.vllm.llm.reset_prefix_cache()
    assert ask(asked) == expected[name]
    asked.vllm.evict_vram()
    before = asked.loaded_bytes()
    assert ask(asked) == expected[name]
    assert asked.loaded_bytes() > before
    asked.vllm.evict_vram()
    asked.mover.zeros = True
    try:
        assert ask(asked) != expected[name]
    finally:
        asked.mover.zeros = False


@pytest.mark.parametrize("name", ["lora", "salted"])
def test_the_same_tokens_have_blocks_of_their_own(asked, name):
    """Adapter or none, one salt or another: as many blocks are in RAM as for two prompts."""
    assert asked.vllm.llm.reset_prefix_cache()
    before = asked.vllm.stats()
    QUESTIONS[name](asked)
    asked.vllm.settle()
    after = asked.vllm.stats()
    assert after["tokens"]["computed"] - before["tokens"]["computed"] == 2 * len(LONG)
    assert after["tiers"]["ram"]["used_blocks"] == 2 * (len(LONG) // BLOCK_SIZE)


def test_prompt_log_probabilities_are_complete_and_equal(expected, asked):
    assert asked.vllm.llm.reset_prefix_cache()
    asked.vllm.ask(LONG)
    asked.vllm.evict_vram()
    before = asked.loaded_bytes()
    assert len(expected["prompt_logprobs"]) == len(LONG) - 1
    with asked.vllm.matches() as matches:
        assert prompt_logprobs(asked) == expected["prompt_logprobs"]
    assert matches == [(0, False)], "vLLM 0.32 would not take more"
    assert asked.loaded_bytes() == before


def test_sleep_forgets_what_ram_holds(expected, asked):
    """vLLM discards its KV, maybe for other weights: what RAM has is as old."""
    assert chunked(asked) == expected["chunked"]
    asked.vllm.settle()
    assert asked.vllm.stats()["tiers"]["ram"]["used_blocks"] > 0
    asked.vllm.llm.sleep(level=1)
    asked.vllm.llm.wake_up()
    assert asked.vllm.stats()["tiers"]["ram"]["used_blocks"] == 0
    before = asked.vllm.stats()["tokens"]
    assert asked.vllm.ask(LONG) == expected["chunked"][0]
    assert asked.vllm.stats()["tokens"]["computed"] - before["computed"] == len(LONG)
