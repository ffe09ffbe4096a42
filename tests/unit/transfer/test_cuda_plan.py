"""What the GPU engine would give the driver to copy: addresses, checked by copying with them in plain memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvortex.transfer.addresses import AddressTable, Copies, Row, address_of, rows_of
from kvortex.transfer.base import KVLayout

SEAM = 4096


def blocks_of(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def table(
    rows: Sequence[Row],
    slot_bytes: int,
    host_address: int = 1 << 40,
    max_copy_bytes: int = SEAM,
    seam_bytes: int = SEAM,
) -> AddressTable:
    return AddressTable(rows, host_address, slot_bytes, max_copy_bytes=max_copy_bytes, seam_bytes=seam_bytes)


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def triples(copies: Copies) -> list[tuple[int, int, int]]:
    return list(zip(copies.device.tolist(), copies.host.tolist(), copies.num_bytes.tolist(), strict=True))


def test_a_blocks_copies_go_row_by_row_to_consecutive_places_of_its_slot() -> None:
    rows = [Row(1000, 64, 16, 0), Row(5000, 100, 32, 16)]
    copies = table(rows, slot_bytes=48, host_address=0).copies(ids(2, 0), ids(1, 3))
    assert triples(copies) == [(1128, 48, 16), (5200, 64, 32), (1000, 144, 16), (5000, 160, 32)]


def test_keys_and_values_side_by_side_in_a_row_are_one_copy() -> None:
    memory = blocks_of(8, 2, 32)
    apart = KVLayout((memory[:, 0], memory[:, 1]))
    assert [(row.num_bytes, row.stride) for row in rows_of(apart)] == [(64, 64)]


def test_keys_and_values_one_after_the_other_stay_two() -> None:
    memory = blocks_of(2, 8, 32)
    assert [row.num_bytes for row in rows_of(KVLayout((memory[0], memory[1])))] == [32, 32]


def test_neighbouring_blocks_of_one_row_in_neighbouring_slots_are_one_copy() -> None:
    copies = table([Row(0, 64, 64, 0)], slot_bytes=64, host_address=0).copies(ids(3, 4, 5, 9), ids(1, 2, 3, 4))
    assert triples(copies) == [(192, 64, 192), (576, 256, 64)]


def test_neighbouring_blocks_are_not_joined_where_foreign_bytes_lie_between() -> None:
    assert len(table([Row(0, 80, 64, 0)], 64, 0).copies(ids(3, 4), ids(1, 2)).host) == 2
    assert len(table([Row(0, 64, 64, 0)], 80, 0).copies(ids(3, 4), ids(1, 2)).host) == 2


def test_no_copy_crosses_a_seam_of_the_pinned_memory() -> None:
    copies = table([Row(0, 3000, 3000, 0)], slot_bytes=3000, host_address=7).copies(ids(5, 8), ids(0, 1))
    assert triples(copies) == [(15000, 7, 3000), (24000, 3007, 1096), (25096, 4103, 1904)]


def test_a_run_of_blocks_is_cut_at_a_seam_between_two_of_them() -> None:
    copies = table([Row(0, 1024, 1024, 0)], slot_bytes=1024, host_address=0).copies(ids(5, 6), ids(3, 4))
    assert triples(copies) == [(5120, 3072, 1024), (6144, 4096, 1024)]


def test_a_block_longer_than_a_batch_is_cut() -> None:
    copies = table([Row(0, 2500, 2500, 0)], 2500, 0, max_copy_bytes=1000, seam_bytes=1 << 20).copies(ids(1), ids(0))
    assert triples(copies) == [(2500, 0, 1000), (3500, 1000, 1000), (4500, 2000, 500)]


@pytest.mark.parametrize("batch_bytes", [1, 64, 100, 128, 1000, 10**9])
def test_batches_hold_every_copy_in_order_and_keep_their_bound(batch_bytes: int) -> None:
    rows = [Row(i * 10_000, 64, 64, i * 64) for i in range(5)]
    copies = table(rows, 320).copies(np.arange(7), np.arange(7))
    batches = list(copies.batches(batch_bytes, 1000))
    assert all(len(batch.host) == 1 or int(batch.num_bytes.sum()) <= batch_bytes for batch in batches)
    assert [entry for batch in batches for entry in triples(batch)] == triples(copies)
    longest = max(64, batch_bytes // 64 * 64)
    assert len(batches) == -(-35 * 64 // longest), "each batch is as long as it may be"


def test_small_copies_are_counted_too_since_each_takes_the_copy_engine_its_time() -> None:
    copies = table([Row(0, 16, 16, 0), Row(9000, 16, 16, 16)], 32).copies(np.arange(5), np.arange(5))
    assert [len(batch.host) for batch in copies.batches(10**9, 4)] == [4, 4, 2]


def test_no_copies_are_no_batches() -> None:
    nothing = np.array([], np.uint64)
    assert list(Copies(nothing, nothing, nothing).batches(10, 10)) == []


def one_row_plainly(
    row: Row, is_only_row: bool, slot_bytes: int, max_copy_bytes: int, pairs: Sequence[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """What the driver is given of one row, from a host that begins at 0."""
    runs: list[tuple[int, int, int]] = []
    for block, slot in pairs:
        device, host, size = row.address + block * row.stride, slot * slot_bytes + row.slot_offset, row.num_bytes
        if is_only_row and runs and runs[-1][0] + runs[-1][2] == device and runs[-1][1] + runs[-1][2] == host:
            device, host, size = runs[-1][0], runs[-1][1], runs[-1][2] + size
            runs.pop()
        runs.append((device, host, size))
    pieces: list[tuple[int, int, int]] = []
    for device, host, size in runs:
        done = 0
        while done < size:
            begin = host + done
            to_seam = SEAM - begin % SEAM
            # The seam is no end of a piece of at most `max_copy_bytes`: what is left of that piece comes next.
            left = min(max_copy_bytes - done % max_copy_bytes, size - done)
            pieces.append((device + done, begin, min(left, to_seam)))
            done += min(left, to_seam)
    return pieces


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=5),
    gap=st.sampled_from([0, 5]),
    slot_gap=st.sampled_from([0, 3]),
    max_copy_bytes=st.one_of(st.just(SEAM), st.integers(40, SEAM)),
    pairs=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=9),
    runs=st.booleans(),
)
def test_row_by_row_the_copies_are_those_of_a_table_of_that_row_alone(
    sizes: list[int], gap: int, slot_gap: int, max_copy_bytes: int, pairs: list[tuple[int, int]], runs: bool
) -> None:
    if runs:
        pairs = [(block + i, slot + i) for block, slot in pairs[:3] for i in range(3)]
    offsets = np.cumsum([0, *sizes]).tolist()
    rows = [Row((i + 1) << 32, size + gap, size, offsets[i]) for i, size in enumerate(sizes)]
    slot_bytes = offsets[-1] + slot_gap
    blocks, slots = ids(*(block for block, _ in pairs)), ids(*(slot for _, slot in pairs))

    copies, begins = table(rows, slot_bytes, 0, max_copy_bytes).copies_by_row(blocks, slots)
    assert len(begins) == len(rows) + 1
    assert (begins[0], begins[-1]) == (0, len(copies.host))
    for i, row in enumerate(rows):
        of_row = slice(begins[i], begins[i + 1])
        got = triples(Copies(*(numbers[of_row] for numbers in copies)))
        assert got == triples(table([row], slot_bytes, 0, max_copy_bytes).copies(blocks, slots))
        is_only_row = len(rows) == 1 and row.stride == row.num_bytes == slot_bytes
        assert got == one_row_plainly(row, is_only_row, slot_bytes, max_copy_bytes, pairs)


def test_the_rows_of_no_blocks_are_empty() -> None:
    for rows in ([Row(0, 64, 64, 0)], [Row(0, 16, 16, 0), Row(900, 16, 16, 16)]):
        copies, begins = table(rows, 64).copies_by_row(ids(), ids())
        assert len(copies.host) == 0
        assert begins == [0] * (len(rows) + 1)


def test_the_address_of_a_part_is_that_of_its_first_number() -> None:
    numbers = np.arange(9, dtype=np.uint64)
    assert address_of(numbers) == numbers.ctypes.data
    assert address_of(numbers[4:]) == numbers.ctypes.data + 32


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=4),
    gap=st.sampled_from([0, 3]),
    side_by_side=st.booleans(),
    max_copy_bytes=st.integers(1, SEAM),
    seed=st.integers(0, 1000),
)
def test_copying_by_these_addresses_moves_every_byte_of_every_block_and_no_other(
    sizes: list[int], gap: int, side_by_side: bool, max_copy_bytes: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    num_blocks, num_slots = 9, 40
    if side_by_side:
        wide = blocks_of(num_blocks, sum(sizes) + gap)
        begins = np.cumsum([0, *sizes])
        regions = [wide[:, int(begins[i]) : int(begins[i + 1])] for i in range(len(sizes))]
    else:
        regions = [blocks_of(num_blocks, size + gap)[:, :size] for size in sizes]
    for region in regions:
        region.copy_(torch.from_numpy(rng.integers(0, 256, region.shape, dtype=np.uint8)))
    layout = KVLayout(tuple(regions))
    slot_bytes = layout.block_bytes
    host = blocks_of(num_slots * slot_bytes)
    blocks, slots = rng.permutation(num_blocks)[:6], rng.permutation(num_slots)[:6]
    blocks.sort()  # neighbours, so that runs are joined

    addresses = table(rows_of(layout), slot_bytes, int(host.data_ptr()), max_copy_bytes)
    copies = addresses.copies(blocks, slots)
    import ctypes

    for device_address, host_address, num_bytes in triples(copies):
        assert 0 < num_bytes <= max_copy_bytes
        begin = host_address - int(host.data_ptr())
        assert begin // SEAM == (begin + num_bytes - 1) // SEAM, "crosses a seam"
        ctypes.memmove(host_address, device_address, num_bytes)

    expected = blocks_of(num_slots, slot_bytes)
    for block, slot in zip(blocks.tolist(), slots.tolist(), strict=True):
        expected[slot] = torch.cat([region[block] for region in layout.regions])
    assert torch.equal(host.view(num_slots, slot_bytes), expected)
