"""The simulator against models that anybody can check, and the policies on traces with a known answer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvortex.cache.policies import EVICTION_POLICIES
from kvortex.replay.belady import next_uses
from kvortex.replay.simulator import ReplayResult, replay
from kvortex.replay.synthesis import mixed_trace, round_robin
from kvortex.replay.tiers import IndexTier
from kvortex.replay.trace import BLOCK_TOKENS, TracedRequest, load_trace

BLOCK = BLOCK_TOKENS  # bytes, at one byte a token
TRACES = Path(os.environ.get("KVORTEX_TRACES", Path(__file__).parents[4] / "shared" / "traces"))


def asked(*prompts: Sequence[int]) -> list[TracedRequest]:
    """One prompt a second, of whole blocks. The first half is not counted: see `counted`."""
    return [TracedRequest(float(i), BLOCK_TOKENS * len(p), 10, tuple(p)) for i, p in enumerate(prompts)]


def counted(*prompts: Sequence[int]) -> list[TracedRequest]:
    """As many empty prompts before, so that all of these count."""
    return asked(*[()] * len(prompts), *prompts)


def play(requests: Sequence[TracedRequest], policy: str, ram: int, vram: int = 0) -> ReplayResult:
    return replay(requests, policy, ram_bytes=ram * BLOCK, vram_bytes=vram * BLOCK, token_bytes=1)


def hits(requests: Sequence[TracedRequest], policy: str, ram: int, vram: int = 0) -> int:
    """Blocks."""
    return play(requests, policy, ram, vram).hit_tokens // BLOCK_TOKENS


# ---- conventions

ALL = [*EVICTION_POLICIES, "belady", "default"]


@pytest.mark.parametrize("policy", ALL)
def test_with_room_for_all_every_block_hits_from_its_second_use(policy: str) -> None:
    requests = counted([0, 1, 2], [0, 1, 3], [0, 1, 2])
    assert hits(requests, policy, 100) == 2 + 3


@pytest.mark.parametrize("policy", ALL)
def test_only_the_last_half_of_the_requests_counts(policy: str) -> None:
    result = play(asked([0, 1], [0, 1], [0, 1], [0]), policy, 100)
    assert (result.requests, result.hit_tokens, result.queried_tokens) == (2, 3 * BLOCK_TOKENS, 3 * BLOCK_TOKENS)
    assert result.hit_rate == 1.0


@pytest.mark.parametrize("policy", ALL)
def test_a_prompt_larger_than_the_tier_leaves_its_head(policy: str) -> None:
    assert hits(counted([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), policy, 3) == 3


@pytest.mark.parametrize("policy", ALL)
def test_a_partial_block_hits_no_more_tokens_than_there_are(policy: str) -> None:
    request = TracedRequest(0.0, BLOCK_TOKENS + 10, 1, (0, 1))
    result = play([request] * 4, policy, 10)
    assert result.hit_tokens == 2 * (BLOCK_TOKENS + 10)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_a_hole_ends_a_prefix(policy: str) -> None:
    tier = IndexTier(policy, 10)
    prompt = asked([0, 1, 2, 3])[0]
    tier.play(prompt, 0)
    assert tier.play(prompt, 0).loaded == 4
    tier.index.discard([tier.index.match(tier.keys_of([0, 1, 2]))[1]])
    assert tier.play(prompt, 0) == (1, 1)
    assert tier.play(prompt, 0).loaded == 4


@pytest.mark.parametrize("policy", ALL)
def test_vram_comes_first_and_ram_continues_it(policy: str) -> None:
    result = play(counted([0, 1, 2], [0, 1, 2]), policy, 10, vram=2)
    assert result.vram_hit_tokens == 2 * BLOCK_TOKENS
    assert result.ram_hit_tokens == 1 * BLOCK_TOKENS
    assert result.bytes_loaded == 1 * BLOCK


def test_what_is_moved_is_counted_in_bytes() -> None:
    result = play(counted([0, 1], [0, 1, 2]), "lru", 10)
    assert (result.bytes_stored, result.bytes_loaded) == (3 * BLOCK, 2 * BLOCK)


@pytest.mark.parametrize("policy", ALL)
def test_an_answers_blocks_are_held_and_hit_at_the_next_turn(policy: str) -> None:
    first = TracedRequest(0.0, 2 * BLOCK_TOKENS, 600, (0, 1), (2,))
    second = TracedRequest(60.0, 4 * BLOCK_TOKENS, 10, (0, 1, 2, 3))
    for vram in (0, 10):
        result = play([TracedRequest(0.0, 0, 0, ()), first, second], policy, 10, vram)
        assert result.hit_tokens == 3 * BLOCK_TOKENS
        assert result.vram_hit_tokens == (3 * BLOCK_TOKENS if vram else 0)


def test_the_size_of_a_block_is_the_traces() -> None:
    requests = [TracedRequest(float(n), 64, 10, (0, 1), (), 32) for n in range(4)]
    result = replay(requests, "lru", ram_bytes=3 * 32, vram_bytes=0, token_bytes=1)
    assert (result.ram_blocks, result.hit_tokens, result.bytes_loaded) == (3, 2 * 64, 2 * 64)


def test_the_warm_up_is_played_and_not_counted() -> None:
    requests = asked([0], [0], [0], [0])
    for warm_up, counted_requests, blocks in ((0.0, 4, 3), (0.25, 3, 3), (0.75, 1, 1)):
        result = replay(requests, "lru", ram_bytes=4 * BLOCK, vram_bytes=0, token_bytes=1, warm_up=warm_up)
        assert (result.requests, result.hit_tokens) == (counted_requests, blocks * BLOCK_TOKENS)


# ---- Belady


def test_belady_gives_up_the_farthest_future_use() -> None:
    requests = counted([1], [2], [3], [2], [1], [3])
    # Two slots: at 3, of {1, 2, 3} the one needed last is 3 itself.
    assert hits(requests, "belady", 2) == 2
    assert hits(requests, "lru", 2) == 1


def test_next_uses_are_places_in_the_row_of_all_blocks() -> None:
    never = next_uses(asked([7]))[0][0]
    assert next_uses(asked([1, 2], [3, 1])) == [[3, never], [never, never]]


# ---- against brute force

PROMPTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 4)).map(lambda p: tuple(10 * p[0] + i for i in range(p[1]))),
    min_size=2,
    max_size=12,
)


def lru_by_brute_force(prompts: Sequence[Sequence[int]], room: int) -> int:
    held: list[int] = []  # the longest unused first
    total = 0
    for number, prompt in enumerate(prompts):
        prefix = next((i for i, block in enumerate(prompt) if block not in held), len(prompt))
        total += prefix if number >= len(prompts) // 2 else 0
        held = [block for block in held if block not in prompt] + list(reversed(prompt))
        held = held[-room:]
    return total


@settings(deadline=None)
@given(prompts=PROMPTS, room=st.integers(4, 10))
def test_lru_is_the_lru_of_a_list(prompts: list[tuple[int, ...]], room: int) -> None:
    assert hits(asked(*prompts), "lru", room) == lru_by_brute_force(prompts, room)


def best_by_brute_force(stream: Sequence[int], room: int) -> int:
    """Hits of the best of all ways to hold single blocks."""
    ways: dict[frozenset[int], int] = {frozenset(): 0}
    for block in stream:
        following: dict[frozenset[int], int] = {}
        for held, found in ways.items():
            found += block in held
            for after in {held, *(held | {block} - {gone} for gone in held), held | {block}}:
                for kept in (after, *(after - {gone} for gone in after)):
                    if len(kept) <= room:
                        following[kept] = max(following.get(kept, 0), found)
        ways = following
    return max(ways.values())


@settings(deadline=None, max_examples=50)
@given(stream=st.lists(st.integers(0, 4), min_size=1, max_size=9), room=st.integers(1, 3))
def test_belady_of_single_blocks_is_the_best_of_all_ways(stream: list[int], room: int) -> None:
    requests = counted(*[(block,) for block in stream])
    assert hits(requests, "belady", room) == best_by_brute_force(stream, room)


@settings(deadline=None)
@given(prompts=PROMPTS, room=st.integers(1, 10), policy=st.sampled_from(EVICTION_POLICIES))
def test_no_policy_hits_what_was_not_asked_for_before(prompts: list[tuple[int, ...]], room: int, policy: str) -> None:
    seen: set[int] = set()
    most = 0
    for number, prompt in enumerate(prompts):
        most += len(seen.intersection(prompt)) if number >= len(prompts) // 2 else 0
        seen.update(prompt)
    assert hits(asked(*prompts), policy, room) <= most


# ---- what the adaptive policy is for


@pytest.mark.parametrize("ratio", [1.0, 1.1, 1.2, 1.3])
def test_a_working_set_larger_than_ram_hits_at_least_half_of_what_fits(ratio: float) -> None:
    blocks_each = 20
    requests = round_robin(conversations=round(40 * ratio), blocks_each=blocks_each, rounds=10)
    ram = 40 * blocks_each
    fits = ram / (round(40 * ratio) * blocks_each)
    assert play(requests, "adaptive", ram).hit_rate >= fits / 2
    if ratio > 1:
        assert play(requests, "lru", ram).hit_rate == 0


@pytest.mark.parametrize("ratio", [1.0, 1.1, 1.2, 1.3])
def test_a_working_set_larger_than_vram_and_ram_hits_at_least_half_of_what_fits_both(ratio: float) -> None:
    blocks_each, vram, ram = 20, 16 * 20, 20 * 20
    conversations = round(36 * ratio)
    requests = round_robin(conversations=conversations, blocks_each=blocks_each, rounds=10)
    fits = (vram + ram) / (conversations * blocks_each)
    assert play(requests, "adaptive", ram, vram).hit_rate >= (fits / 2 if ratio > 1 else 0.9)
    if ratio > 1:
        assert play(requests, "lru", ram, vram).hit_rate == 0


def test_a_block_in_vram_gives_up_its_place_in_ram_and_is_stored_again_once_a_visit() -> None:
    """Sixteen conversations in VRAM, twenty in RAM, in turn: each visit is a load and a store, no more."""
    requests = round_robin(conversations=34, blocks_each=20, rounds=10)
    result = play(requests, "lru", 20 * 20, 16 * 20)
    assert result.hit_rate == 1.0
    assert result.bytes_stored <= result.queried_tokens


@pytest.mark.parametrize("vram", [0, 300])
@pytest.mark.parametrize("policy", ALL)
def test_ram_without_end_is_as_good_as_ram_for_all_and_is_not_laid_out(policy: str, vram: int) -> None:
    """Nobody has memory for the slots of the second one."""
    requests = mixed_trace(5, seconds=60)
    blocks = sum(len(request.all_blocks) for request in requests)
    for_all, endless = (play(requests, policy, ram, vram) for ram in (2 * blocks, 10**12))
    assert endless.ram_blocks == 10**12
    size = {"ram_bytes": 0, "ram_blocks": 0, "seconds": 0.0}
    assert replace(endless, **size) == replace(for_all, **size)


def test_one_off_prompts_do_not_flush_conversations() -> None:
    talks = round_robin(conversations=10, blocks_each=10, rounds=30, pause_s=6.0)
    one_offs = [
        TracedRequest(3.0 + 6.0 * i, 30 * BLOCK_TOKENS, 20, tuple(range(10**6 + 30 * i, 10**6 + 30 * i + 30)))
        for i in range(len(talks))
    ]
    requests = sorted([*talks, *one_offs], key=lambda request: request.arrival_s)
    asked_again = sum(r.input_tokens for r in requests[len(requests) // 2 :] if r.blocks[0] < 10**6)
    assert play(requests, "adaptive", 150).hit_tokens >= 0.9 * asked_again
    assert play(requests, "lru", 150).hit_tokens == 0


@pytest.mark.parametrize(("seed", "shares"), [(1, (0.5, 0.1, 0.4)), (2, (0.2, 0.02, 0.78)), (3, (1.0, 0.0, 0.0))])
def test_it_is_never_half_a_point_worse_than_lru(seed: int, shares: tuple[float, float, float]) -> None:
    chats, agents, documents = shares
    requests = mixed_trace(seed, seconds=500, chats=chats, agents=agents, documents=documents)
    for ram in (512, 4096):
        adaptive, lru, bound = (play(requests, policy, ram).hit_rate for policy in ("adaptive", "lru", "belady"))
        assert adaptive >= lru - 0.005, ram
        assert adaptive <= bound + 0.002, ram


@pytest.mark.timeout(40)
@pytest.mark.skipif(not TRACES.is_dir(), reason=f"the Mooncake traces are not at {TRACES}")
def test_lru_and_belady_agree_with_a_public_simulator() -> None:
    requests = load_trace(TRACES / "mooncake_conversation.jsonl.gz")
    for policy, published in (("lru", 0.056), ("belady", 0.268)):
        result = replay(requests, policy, ram_bytes=128 << 30, vram_bytes=0, token_bytes=131072)
        assert result.hit_rate == pytest.approx(published, abs=0.005)


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_no_policy_finds_more_than_the_bound_with_vram_in_front(policy: str) -> None:
    requests = mixed_trace(3, seconds=600)
    sizes = {"ram_bytes": 400 * BLOCK_TOKENS, "vram_bytes": 300 * BLOCK_TOKENS, "token_bytes": 1}
    bound, found = replay(requests, "belady", **sizes), replay(requests, policy, **sizes)
    assert 0 < found.hit_rate <= bound.hit_rate
