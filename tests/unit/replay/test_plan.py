"""Which size pays, on traces where anybody can tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvortex.kv_shape import KVKind, KVShape
from kvortex.replay.conversations import find_conversations
from kvortex.replay.models import ReplayedModel, read_model
from kvortex.replay.plan import Plan, PlannedSize, Planner, recommend, usual_sizes
from kvortex.replay.prefill import SUSTAINED_FLOPS, cost_of_shape, cost_of_speed, parameters_read
from kvortex.replay.simulator import replay
from kvortex.replay.synthesis import round_robin
from kvortex.replay.trace import BLOCK_TOKENS, TracedRequest

SHAPE = KVShape("llama", KVKind.HEADS, 1, 0, 0, 1, 1, 1, 1)  # two bytes a token
BLOCK_BYTES = 2 * BLOCK_TOKENS
GB = 10**9


def planned(requests: Sequence[TracedRequest], *sizes: int, machine: int = 10**15, vram: int = 0) -> Plan:
    said: list[str] = []
    planner = Planner(requests, ReplayedModel("m", SHAPE, None), vram, machine, None, 0.5, said.append)
    plan = planner.plan(sizes)
    assert len(said) == len(plan.sizes)
    return plan


# ---- which size


def sizes(*rates: tuple[int, float], vram: float = 0.0, endless: float = 1.0) -> tuple[list[PlannedSize], Any]:
    """PlannedSizes of (bytes, the default policy's hit rate), and the endless one."""
    played = replay(
        round_robin(conversations=1, blocks_each=1, rounds=2), "lru", ram_bytes=1024, vram_bytes=0, token_bytes=2
    )

    def found(rate: float) -> Any:
        return replace(played, hit_rate=rate, queried_tokens=10**6, vram_hit_tokens=int(vram * 10**6))

    return [PlannedSize(size, True, 1, found(r), found(r), found(r)) for size, r in rates], found(endless)


def test_the_size_is_that_beyond_which_no_doubling_gains_a_point() -> None:
    tried, endless = sizes((128 * GB, 0.10), (256 * GB, 0.13), (512 * GB, 0.18), (1000 * GB, 0.185), (2000 * GB, 0.19))
    chosen = recommend(tried, endless)
    assert chosen.ram_bytes == 512 * GB
    assert "from 256 GB to 512 GB gains 5.0 points" in chosen.reason
    assert "beyond, each doubling gains less than 1 point (1.0" not in chosen.reason
    assert "18.0% of the prompt tokens are found" in chosen.reason


def test_a_flat_stretch_before_a_step_is_not_the_end() -> None:
    """A loop over a working set: nothing until all fits."""
    tried, endless = sizes((1 * GB, 0.05), (2 * GB, 0.05), (4 * GB, 0.05), (8 * GB, 0.95))
    assert recommend(tried, endless).ram_bytes == 8 * GB


def test_where_no_size_pays_it_is_told_whether_prompts_repeat() -> None:
    tried, endless = sizes((1 * GB, 0.001), (2 * GB, 0.004), endless=0.02)
    chosen = recommend(tried, endless)
    assert chosen.ram_bytes is None
    assert "too little RAM: 2 GB adds 0.4 of the 2.0 points there are" in chosen.reason
    tried, endless = sizes((1 * GB, 0.201), (2 * GB, 0.204), vram=0.2, endless=0.209)
    chosen = recommend(tried, endless)
    assert chosen.ram_bytes is None
    assert "no size pays: prompts hardly repeat" in chosen.reason
    assert "RAM" not in chosen.reason.replace("VRAM", "")


def test_a_machine_with_too_little_ram_is_not_told_that_prompts_do_not_repeat() -> None:
    tried, endless = sizes((20 * GB, 0.04), vram=0.035, endless=0.211)
    chosen = recommend(tried, endless)
    assert chosen.ram_bytes is None
    assert "too little RAM: 20 GB adds 0.5 of the 17.6 points there are" in chosen.reason
    assert "hardly repeat" not in chosen.reason
    tried, endless = sizes((20 * GB, 0.03), vram=0.035, endless=0.211)
    assert "adds 0.0 of the" in recommend(tried, endless).reason


def test_lru_is_named_where_it_finds_a_point_more_with_less_ram() -> None:
    """A trace too short for the default policy: what it found with 1 TB, lru has with 512 GB."""
    tried, endless = sizes((256 * GB, 0.16), (512 * GB, 0.18), (1000 * GB, 0.211), endless=0.211)
    plan = planned(round_robin(conversations=1, blocks_each=1, rounds=2), 1024)

    def with_lru(*rates: float) -> Plan:
        better = [replace(s, lru=replace(s.lru, hit_rate=rate)) for s, rate in zip(tried, rates, strict=True)]
        return replace(plan, sizes=tuple(better), recommended=recommend(better, endless))

    instead = with_lru(0.17, 0.206, 0.211).lru_instead
    assert instead is not None
    assert (instead.ram_bytes, instead.lru.hit_rate) == (512 * GB, 0.206)
    assert with_lru(0.16, 0.189, 0.25).lru_instead is None, "less than a point, and at the recommended size"
    even = with_lru(0.206, 0.206, 0.211).lru_instead
    assert even is not None
    assert even.ram_bytes == 256 * GB, "no more RAM than it takes"


def test_what_vram_finds_by_itself_does_not_count_for_ram() -> None:
    tried, endless = sizes((1 * GB, 0.905), (2 * GB, 0.907), vram=0.9)
    assert recommend(tried, endless).ram_bytes is None


def test_steps_that_are_no_doublings_are_measured_in_doublings() -> None:
    """1.5 points over a factor of 8 are half a point a doubling."""
    tried, endless = sizes((1 * GB, 0.5), (8 * GB, 0.515))
    assert recommend(tried, endless).ram_bytes == 1 * GB


# ---- a whole plan


def test_a_loop_pays_from_where_all_of_it_fits() -> None:
    """16 conversations of 10 blocks in turn; the default policy finds half of what fits, LRU nothing before."""
    requests = round_robin(conversations=16, blocks_each=10, rounds=20)
    plan = planned(requests, *(share * 10 * BLOCK_BYTES for share in (4, 8, 16, 32)))
    assert plan.working_set_bytes == 160 * BLOCK_BYTES
    assert plan.recommended.ram_bytes == 160 * BLOCK_BYTES
    assert [size.lru.hit_rate for size in plan.sizes] == [0, 0, 1, 1]
    assert all(size.lru.hit_rate <= size.default.hit_rate <= size.bound.hit_rate + 0.01 for size in plan.sizes)
    assert [size.fit_conversations for size in plan.sizes] == [3, 7, 15, 30]  # 5,320 tokens with the answer
    assert plan.endless.hit_rate == 1


def test_without_sizes_they_go_from_little_to_all_that_can_be_found() -> None:
    plan = planned(round_robin(conversations=16, blocks_each=10, rounds=20))
    tried = [size.ram_bytes for size in plan.sizes]
    assert tried == sorted(tried)
    assert tried[0] < plan.working_set_bytes / 32
    assert plan.sizes[-1].lru.hit_rate == plan.endless.hit_rate
    assert plan.sizes[-2].lru.hit_rate < plan.endless.hit_rate


def test_what_this_machine_has_is_a_size_and_what_it_has_not_is_marked() -> None:
    plan = planned(round_robin(conversations=16, blocks_each=10, rounds=20), machine=100_001)
    within = {size.ram_bytes: size.is_within_machine for size in plan.sizes}
    assert within[100_001] is True
    assert within[128_000] is False
    assert plan.recommended_here.ram_bytes is not None
    assert plan.recommended_here.ram_bytes <= 100_001 < (plan.recommended.ram_bytes or 0)


def test_a_machine_without_room_for_a_block_has_nothing_to_recommend() -> None:
    plan = planned(round_robin(conversations=4, blocks_each=10, rounds=4), machine=10)
    assert plan.recommended_here.ram_bytes is None
    assert plan.recommended.ram_bytes is not None


@pytest.mark.parametrize("working_set", [1, 5000, 12 * 10**9, 10**13])
def test_usual_sizes_are_round_and_reach_the_working_set(working_set: int) -> None:
    chosen = list(usual_sizes(working_set, 1000, 0))
    assert 1000 <= chosen[0] <= max(1000, working_set / 32)
    assert chosen[-1] >= working_set
    assert len(chosen) <= 10
    assert all(size <= working_set for size in chosen[:-1])


def test_vram_in_front_is_told_apart() -> None:
    requests = round_robin(conversations=2, blocks_each=10, rounds=8)
    plan = planned(requests, 40 * BLOCK_BYTES, vram=40 * BLOCK_BYTES)
    assert plan.vram_hit_rate == 1
    assert plan.recommended.ram_bytes is None
    assert plan.fit_vram == 3


# ---- conversations


def asked(at_s: float, tokens: int, *blocks: int, output: tuple[int, ...] = ()) -> TracedRequest:
    return TracedRequest(at_s, tokens, 100, blocks, output)


def test_a_prompt_that_goes_on_where_another_ended_is_its_conversation() -> None:
    """Two conversations share their first block; one goes on twice, through its answer's block."""
    found = find_conversations(
        [
            asked(0, 1100, 1, 2, 3, output=(4,)),
            asked(1, 1100, 1, 12, 13),
            asked(2, 2100, 1, 2, 4, 5, 6),
            asked(3, 3100, 1, 2, 4, 5, 7, 8, 9),
        ]
    )
    assert (found.number, found.mean_turns, found.at_once) == (2, 2, 2)
    assert (found.median_tokens, found.p95_tokens) == (3200, 3200)


def test_a_conversation_that_is_asked_again_as_it_was_is_the_same_one() -> None:
    found = find_conversations(round_robin(conversations=5, blocks_each=3, rounds=4))
    assert (found.number, found.mean_turns, found.at_once) == (5, 4, 5)


def test_one_end_is_gone_on_from_once() -> None:
    """Of two prompts behind the shared system prompt, the first is taken for one that had it alone."""
    assert find_conversations([asked(0, 512, 1), asked(1, 1024, 1, 2), asked(2, 1024, 1, 3)]).number == 2


def test_a_prompt_shorter_than_a_block_is_a_conversation_of_its_own() -> None:
    assert find_conversations([asked(0, 10), asked(1, 10)]).number == 2


# ---- prefill


def test_prefill_is_weights_and_attention() -> None:
    """Llama-3.1-8B: 6.98 billion weights in its layers; behind 8,192 tokens, 640 take 13 TFLOP."""
    model = read_model("llama-3.1-8b")
    assert model.parameters == 32 * (2 * 4096 * 128 * (32 + 8) + 3 * 4096 * 14336)
    cost = cost_of_shape(model.shape, model.parameters)
    flops = 2 * model.parameters * 640 + 4 * 32 * 32 * 128 * (8832**2 - 8192**2) / 2
    assert cost.seconds(8192, 8832) == pytest.approx(flops / SUSTAINED_FLOPS)
    assert cost.seconds(0, 8192) + cost.seconds(8192, 8832) == pytest.approx(cost.seconds(0, 8832))
    assert 0.025 < cost.seconds(8192, 8832) < 0.040  # measured on an H200


def test_a_measured_speed_is_tokens_by_time() -> None:
    assert cost_of_speed(5000).seconds(1000, 2000) == pytest.approx(0.2)


def test_weights_of_experts_are_not_guessed() -> None:
    config = {"hidden_size": 4096, "intermediate_size": 14336}
    assert parameters_read(config, SHAPE) is not None
    assert parameters_read({**config, "num_local_experts": 8}, SHAPE) is None
    assert parameters_read({"hidden_size": 4096}, SHAPE) is None
    assert parameters_read({"hidden_size": 8}, replace(SHAPE, model_type="gpt_neox")) == 2 * 8 * 2 + 2 * 8 * 32


def test_a_replay_counts_the_prefill_of_what_ram_gave() -> None:
    requests = [asked(float(n), 1024, 1, 2) for n in range(4)]
    played = replay(
        requests, "lru", ram_bytes=4096, vram_bytes=1024, token_bytes=2, prefill=cost_of_speed(1000), warm_up=0.25
    )
    assert played.requests == 3
    assert played.prefill_s == pytest.approx(3 * 1.024)
    assert played.prefill_saved_s == pytest.approx(3 * 0.512)  # VRAM has the first block


def test_an_eight_bit_cache_takes_half() -> None:
    assert read_model("mistral-7b", kv_cache_dtype="fp8").token_bytes * 2 == read_model("mistral-7b").token_bytes
