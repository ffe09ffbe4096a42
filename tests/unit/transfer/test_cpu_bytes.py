"""The CPU engine moves exactly the bytes it was told to, in every layout, and no others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvortex.messages import Direction, Outcome
from kvortex.transfer.base import KVLayout
from kvortex.transfer.cpu import CpuCopyEngine, HostMover
from kvortex.transfer.slab import HostSlab
from tests.fakes.copy_engines import SkippingMover, ZeroLoadEngine
from tests.unit.transfer.builders import (
    LOAD,
    STORE,
    block_contents,
    check_round_trip,
    order,
    packed,
    set_block,
    strided,
    wait_answers,
)

KIB, MIB = 1 << 10, 1 << 20


def keys_and_values_apart(num_blocks: int) -> KVLayout:
    """A layer is bf16 [2, num_blocks, 4 tokens, 3 heads, 8]: keys and values are two regions of each."""
    layers = [torch.zeros(2, num_blocks, 4, 3, 8, dtype=torch.bfloat16) for _ in range(3)]
    return KVLayout(
        tuple(half.reshape(num_blocks, -1).view(torch.uint8) for layer in layers for half in layer.unbind(0))
    )


def keys_and_values_interleaved(num_blocks: int) -> KVLayout:
    """A layer is bf16 [num_blocks, 2, ...]: keys and values are views whose rows are two halves apart."""
    layers = [torch.zeros(num_blocks, 2, 4 * 3 * 8, dtype=torch.bfloat16) for _ in range(3)]
    return KVLayout(tuple(layer[:, i].view(torch.uint8) for layer in layers for i in range(2)))


def layers_interleaved(num_blocks: int) -> KVLayout:
    """All layers of a block lie together in one tensor [num_blocks, layers, fragment]."""
    whole = torch.zeros(num_blocks, 5, 640, dtype=torch.uint8)
    return KVLayout(tuple(whole[:, layer] for layer in range(5)))


LAYOUTS: dict[str, Callable[[], KVLayout]] = {
    "one region": lambda: packed(50, [4096]),
    "one block": lambda: packed(1, [4096, 17]),
    "one byte": lambda: packed(300, [1]),
    "one byte, 60 regions": lambda: packed(40, [1] * 60),
    "60 regions": lambda: packed(40, [1536] * 60),
    "odd and unequal fragments": lambda: packed(33, [1, 3, 131, 4097, 24 * KIB + 5, 7]),
    "fragments of 24 KiB": lambda: packed(200, [24 * KIB] * 2),
    "just under the direct copy": lambda: packed(12, [256 * KIB - 1] * 2),
    "fragments of 512 KiB": lambda: packed(10, [512 * KIB] * 3),
    "fragments of 1 MiB": lambda: packed(6, [MIB, MIB]),
    "a block larger than a piece": lambda: packed(2, [3 * MIB] * 3),
    "strided": lambda: strided(50, [4096, 131, 1]),
    "strided, large": lambda: strided(5, [512 * KIB, MIB], gap=64),
    "keys and values apart": lambda: keys_and_values_apart(60),
    "keys and values interleaved": lambda: keys_and_values_interleaved(60),
    "layers interleaved": lambda: layers_interleaved(60),
}


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("build", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_byte_comes_back_in_every_layout(build: Callable[[], KVLayout], num_threads: int) -> None:
    layout = build()
    slab = HostSlab(layout.num_blocks + 3, layout.block_bytes)
    engine = CpuCopyEngine(layout, slab, num_threads)
    check_round_trip(engine, layout, slab.num_slots)
    assert engine.close(30)
    slab.close()


@pytest.mark.parametrize("build", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_the_round_trip_check_sees_an_engine_that_loads_zeros(build: Callable[[], KVLayout]) -> None:
    layout = build()
    slab = HostSlab(layout.num_blocks + 3, layout.block_bytes)
    engine = ZeroLoadEngine(layout, slab, 2)
    with pytest.raises(AssertionError, match="came back wrong"):
        check_round_trip(engine, layout, slab.num_slots)
    assert engine.close(30)


def test_the_round_trip_check_sees_a_single_block_that_was_not_copied() -> None:
    layout = packed(64, [512, 33])
    slab = HostSlab(64, layout.block_bytes)
    mover = SkippingMover(HostMover(layout, slab), [17])
    engine = CpuCopyEngine(layout, slab, 2, mover=mover, piece_bytes=1)
    with pytest.raises(AssertionError, match="came back wrong"):
        check_round_trip(engine, layout, slab.num_slots)
    assert engine.close(30)


def test_a_copy_touches_no_other_block_slot_or_gap() -> None:
    num_blocks, gap = 20, 7
    wide = torch.full((num_blocks, 1000 + 2 * gap), 0xAA, dtype=torch.uint8)
    layout = KVLayout((wide[:, gap:-gap],))
    slab = HostSlab(num_blocks, layout.block_bytes + 24)  # slots with room to spare
    slab.tensor.fill_(0xBB)
    layout.regions[0].fill_(0xCC)
    engine = CpuCopyEngine(layout, slab, 2)
    engine.submit([order(1, STORE, [(3, 5), (4, 9)])])
    wait_answers(engine, 1)
    stored = torch.full_like(slab.tensor, 0xBB)
    stored[[5, 9], :1000] = 0xCC
    assert torch.equal(slab.tensor, stored)

    slab.tensor[5, :1000] = 0xDD
    engine.submit([order(2, LOAD, [(11, 5)])])
    wait_answers(engine, 1)
    assert (wide[:, :gap] == 0xAA).all()
    assert (wide[:, -gap:] == 0xAA).all()
    loaded = torch.full((num_blocks, 1000), 0xCC, dtype=torch.uint8)
    loaded[11] = 0xDD
    assert torch.equal(layout.regions[0], loaded)
    assert engine.close(30)


def test_a_slot_holds_the_fragments_one_after_the_other() -> None:
    layout = packed(4, [3, 5, 2])
    for value, region in enumerate(layout.regions, start=1):
        region[2] = value
    slab = HostSlab(4, layout.block_bytes)
    engine = CpuCopyEngine(layout, slab, 1)
    engine.submit([order(1, STORE, [(2, 3)])])
    wait_answers(engine, 1)
    assert slab.tensor[3].tolist() == [1, 1, 1, 2, 2, 2, 2, 2, 3, 3]
    assert engine.close(30)


def test_a_slab_whose_slots_are_too_small_is_our_bug() -> None:
    layout = packed(4, [100, 100])
    slab = HostSlab(4, 199)
    with pytest.raises(AssertionError, match="199"):
        CpuCopyEngine(layout, slab, 1)


NUM_BLOCKS, NUM_SLOTS = 7, 5

copies = st.tuples(
    st.sampled_from(Direction),
    st.permutations(range(NUM_BLOCKS)),
    st.permutations(range(NUM_SLOTS)),
    st.integers(0, NUM_SLOTS),
)
writes = st.tuples(st.integers(0, NUM_BLOCKS - 1), st.binary(min_size=13, max_size=13))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(copies, writes), max_size=25), st.sampled_from([1, 3]), st.sampled_from([1, 26, 4096]))
def test_any_sequence_of_stores_loads_and_writes_equals_a_dict(
    steps: list[tuple[Direction, list[int], list[int], int] | tuple[int, bytes]],
    num_threads: int,
    piece_bytes: int,
) -> None:
    layout = strided(NUM_BLOCKS, [1, 8, 4])
    slab = HostSlab(NUM_SLOTS, layout.block_bytes)
    engine = CpuCopyEngine(layout, slab, num_threads, piece_bytes=piece_bytes)
    device = {block: block_contents(layout, block) for block in range(NUM_BLOCKS)}
    host = {slot: bytes(13) for slot in range(NUM_SLOTS)}
    for job_id, step in enumerate(steps):
        if len(step) == 2:
            block, contents = step
            set_block(layout, block, contents)
            device[block] = contents
            continue
        direction, blocks, slots, num_pairs = step
        pairs = list(zip(blocks, slots, strict=False))[:num_pairs]
        engine.submit([order(job_id, direction, pairs)])
        (answer,) = wait_answers(engine, 1)
        assert answer.outcome is Outcome.DONE, answer
        for block, slot in pairs:
            if direction is STORE:
                host[slot] = device[block]
            else:
                device[block] = host[slot]
    assert {block: block_contents(layout, block) for block in device} == device
    assert {slot: slab.tensor[slot].numpy().tobytes() for slot in host} == host
    assert engine.close(30)
    slab.close()


@pytest.mark.parametrize("num_threads", [1, 2, 8])
def test_foreign_data_never_appears_with_many_orders_at_once(num_threads: int) -> None:
    """Blocks carry their key in every eight bytes; stores and loads of many keys run side by side."""
    words, half = 96, 128
    layout = packed(2 * half, [8 * words, 8 * words, 8])
    slab = HostSlab(2 * half, layout.block_bytes)
    engine = CpuCopyEngine(layout, slab, num_threads, piece_bytes=3 * layout.block_bytes)
    rng = np.random.default_rng(num_threads)
    tags = [region.view(torch.int64) for region in layout.regions]
    job_id, next_key = 0, 1
    key_of_slot: dict[int, int] = {}
    for _ in range(12):
        free = np.array([slot for slot in range(2 * half) if slot not in key_of_slot])
        to_store = rng.permutation(free)[:half]
        blocks = rng.permutation(2 * half)
        keys = np.arange(next_key, next_key + len(to_store))
        next_key += len(to_store)
        for tag in tags:
            tag[torch.from_numpy(blocks[:half])] = torch.from_numpy(keys)[:, None]
        to_load = rng.permutation(np.array(list(key_of_slot), dtype=np.int64))[:half]
        stores = list(zip(blocks[:half], to_store, strict=True))
        loads = list(zip(blocks[half:], to_load, strict=False))
        orders = []
        while stores or loads:  # orders of 1 to 9 blocks, both ways mixed
            for direction, pairs in ((STORE, stores), (LOAD, loads)):
                num_pairs = int(rng.integers(1, 10))
                if pairs[:num_pairs]:
                    orders.append(order(job_id, direction, pairs[:num_pairs]))
                    job_id += 1
                del pairs[:num_pairs]
        engine.submit(orders)
        answers = wait_answers(engine, len(orders))
        assert {answer.outcome for answer in answers} == {Outcome.DONE}
        for block, slot in zip(blocks[half:], to_load, strict=False):
            expected = key_of_slot[int(slot)]
            for tag in tags:
                assert (tag[int(block)] == expected).all(), (block, slot, expected, tag[int(block)])
        key_of_slot |= dict(zip(to_store.tolist(), keys.tolist(), strict=True))
        for slot in to_load.tolist():
            del key_of_slot[slot]
    assert engine.close(30)
