"""Why prompt tokens were computed: one reason each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvortex.cache.index import BlockIndex
from kvortex.cache.losses import LossRecord
from kvortex.cache.misses import FORGOTTEN_IN_A_ROW, Explanation, Miss, MissExplainer
from kvortex.cache.policies import make_policy
from kvortex.cache.prefix import GroupShape
from kvortex.cache.stats import Ledger
from kvortex.keys import BlockKey

FULL = GroupShape(0, 16)
SLIDING = GroupShape(1, 16, window=33)


def key(block: int, group: GroupShape = FULL) -> BlockKey:
    return BlockKey(bytes([block + 1]) * 32 + group.group_id.to_bytes(4, "big"))


class Cache:
    """Blocks of one prompt, each put where a test wants it."""

    def __init__(self, groups: Sequence[GroupShape] = (FULL,)) -> None:
        self.index = BlockIndex(200, make_policy("lru", 200))
        self.losses = LossRecord(200)
        self.vram: set[BlockKey] = set()
        self.explainer = MissExplainer(groups, self.index, self.losses, self.vram.__contains__)

    def ram(self, *blocks: int, group: GroupShape = FULL) -> None:
        self.index.publish(self.index.reserve([key(block, group) for block in blocks]).slots)

    def evicted(self, *blocks: int, group: GroupShape = FULL) -> None:
        self.losses.evicted([key(block, group) for block in blocks])

    def explain(self, num_tokens: int, hit_tokens: int, **options: object) -> Explanation:
        def keys_of(group: GroupShape) -> list[BlockKey]:
            return [key(block, group) for block in range(num_tokens // group.block_size)]

        return self.explainer.explain(keys_of, num_tokens, hit_tokens, **options)


def test_a_prompt_that_begins_with_a_new_block_is_new():
    told = Cache().explain(100, 0)
    assert told.missed == {Miss.NEW_PROMPT: 96, Miss.LAST_BLOCK: 4}
    assert told.seen_tokens == 0


def test_a_new_prompt_with_a_salt_is_told_apart():
    assert Cache().explain(100, 0, salted=True).missed == {Miss.SALT: 96, Miss.LAST_BLOCK: 4}


def test_what_follows_a_hit_is_a_new_tail_salt_or_not():
    cache = Cache()
    cache.ram(0, 1)
    told = cache.explain(100, 32, salted=True)
    assert told.missed == {Miss.NEW_TAIL: 64, Miss.LAST_BLOCK: 4}
    assert told.seen_tokens == 32


def test_the_block_of_the_last_token_is_always_computed():
    cache = Cache()
    cache.ram(0, 1)
    assert cache.explain(32, 16).missed == {Miss.LAST_BLOCK: 16}
    assert cache.explain(33, 32).missed == {Miss.LAST_BLOCK: 1}
    assert cache.explain(5, 0).missed == {Miss.LAST_BLOCK: 5}


def test_blocks_that_ram_gave_up_and_those_that_vram_lost():
    cache = Cache()
    cache.ram(0)
    cache.evicted(1, 2)
    cache.losses.not_stored(key(3))
    told = cache.explain(100, 16)
    assert told.missed == {Miss.EVICTED: 32, Miss.NOT_STORED: 16, Miss.NEW_TAIL: 32, Miss.LAST_BLOCK: 4}
    assert told.seen_tokens == 64


def test_a_block_whose_copy_is_under_way_is_not_stored():
    cache = Cache()
    cache.index.reserve([key(0)])
    assert cache.explain(20, 0).missed == {Miss.NOT_STORED: 16, Miss.LAST_BLOCK: 4}


def test_held_blocks_behind_a_gap_are_unusable():
    cache = Cache()
    cache.evicted(0)
    cache.ram(1)
    cache.vram.add(key(2))
    told = cache.explain(100, 0)
    assert told.missed == {Miss.EVICTED: 16, Miss.UNUSABLE: 32, Miss.NEW_TAIL: 48, Miss.LAST_BLOCK: 4}


def test_a_block_whose_loss_was_forgotten_shares_the_fate_of_the_next_that_is_known():
    cache = Cache()
    cache.losses.not_stored(key(1))
    cache.evicted(4)
    told = cache.explain(100, 0)
    assert told.missed == {Miss.NOT_STORED: 32, Miss.EVICTED: 48, Miss.NEW_TAIL: 16, Miss.LAST_BLOCK: 4}
    assert told.seen_tokens == 80


def test_a_long_new_prompt_is_not_searched_to_its_end():
    cache = Cache()
    asked: list[BlockKey] = []
    cache.losses.of = asked.append
    assert cache.explain(3201, 0).missed == {Miss.NEW_PROMPT: 3200, Miss.LAST_BLOCK: 1}
    assert len(asked) == FORGOTTEN_IN_A_ROW + 1


def test_a_load_that_was_not_worth_it():
    cache = Cache()
    cache.ram(0, 1, 2)
    told = cache.explain(100, 16, declined_tokens=32)
    assert told.missed == {Miss.QUICKER_COMPUTED: 32, Miss.NEW_TAIL: 48, Miss.LAST_BLOCK: 4}
    assert told.seen_tokens == 48


@pytest.mark.parametrize("groups", [(FULL, SLIDING), (SLIDING, FULL)])
def test_a_block_that_only_full_attention_holds_is_explained_by_the_other_group(groups):
    cache = Cache(groups)
    cache.ram(0, 1, 2)
    cache.ram(0, group=SLIDING)
    cache.evicted(1, group=SLIDING)
    told = cache.explain(50, 0)
    assert told.missed == {Miss.UNUSABLE: 32, Miss.EVICTED: 16, Miss.LAST_BLOCK: 2}


def test_explanations_that_do_not_fit_are_not_used():
    told = Explanation(missed=Counter({Miss.EVICTED: 10}))
    assert told.settled(10, load_failed=3) == {Miss.EVICTED: 10, Miss.LOAD_FAILED: 3}
    assert told.settled(11)[Miss.UNUSABLE] == 11
    assert told.settled(11, otherwise=Miss.NOT_ASKED).total() == 11
    assert told.missed == {Miss.EVICTED: 10}, "unchanged"


STATES = st.lists(st.sampled_from(["ram", "vram", "writing", "evicted", "not_stored", "never"]), max_size=12)


@given(STATES, st.integers(1, 200), st.integers(0, 12), st.integers(0, 3), st.booleans())
def test_reasons_sum_to_what_is_computed_wherever_blocks_are(states, num_tokens, hit_blocks, not_worth, salted):
    cache = Cache()
    for block, state in enumerate(states):
        _put(cache, block, state)
    last = (num_tokens - 1) // 16
    hit_blocks = min(hit_blocks, last)
    not_worth = min(not_worth, last - hit_blocks)
    told = cache.explain(num_tokens, hit_blocks * 16, salted=salted, declined_tokens=not_worth * 16)
    assert told.missed.total() == num_tokens - hit_blocks * 16
    assert min(told.missed.values()) > 0
    assert hit_blocks * 16 <= told.seen_tokens <= num_tokens
    ledger = Ledger()
    ledger.count_tokens(vram_hit=hit_blocks * 16, ram_hit=0, missed=told.missed, seen_tokens=told.seen_tokens)
    counted = ledger.as_dict()
    assert sum(counted["missed"].values()) == counted["tokens"]["computed"]
    assert counted["tokens"]["queried"] == num_tokens


def _put(cache: Cache, block: int, state: str) -> None:
    if state == "ram":
        cache.ram(block)
    elif state == "vram":
        cache.vram.add(key(block))
    elif state == "writing":
        cache.index.reserve([key(block)])
    elif state == "evicted":
        cache.evicted(block)
    elif state == "not_stored":
        cache.losses.not_stored(key(block))


def test_every_reason_is_in_the_document():
    assert list(Ledger().as_dict()["missed"]) == [miss.value for miss in Miss]


def test_prompts_that_begin_like_no_other_are_counted():
    ledger = Ledger()
    for seen in (0, 32, 64):
        ledger.count_tokens(vram_hit=0, ram_hit=seen, missed={Miss.LAST_BLOCK: 1}, seen_tokens=seen)
    assert ledger.as_dict()["prompts"] == {"counted": 3, "new": 1, "seen_tokens": 96}
