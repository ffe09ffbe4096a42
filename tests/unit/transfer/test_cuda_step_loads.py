"""Loads that a step's own kernels read, on streams that run as late as they may: `tests/gpu` has the real ones."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvortex.messages import JobResult, Outcome
from kvortex.transfer import cuda_step_loads
from kvortex.transfer.base import KVLayout
from kvortex.transfer.cuda_driver import CudaDriver, DriverError
from kvortex.transfer.cuda_step_loads import CudaStepLoads, StepLoader
from kvortex.transfer.cuda_stream import CudaFence
from kvortex.transfer.pinned import PinnedSlab
from tests.fakes.cuda_streams import LateEvent, LateStream, MemmoveDriver, use_late_events
from tests.unit.transfer.builders import LOAD, order, packed, strided

PAGE = 4096
NUM_BLOCKS, NUM_SLOTS = 16, 24
STALE = 0xAA


class Registrar:
    def enter_thread(self) -> None: ...

    def enter(self) -> None: ...

    def pin(self, address: int, num_bytes: int) -> None: ...

    def unpin(self, address: int) -> None: ...


class Bench:
    """A loader over slots of random bytes, and a model whose kernels each read one region."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self.slab = PinnedSlab(NUM_SLOTS, layout.block_bytes, Registrar(), piece_bytes=PAGE)
        self.slab.tensor.random_(0, STALE)
        self.step_stream, self.compute = LateStream(1), LateStream(2)
        self.driver = MemmoveDriver(self.step_stream)
        self.loader = StepLoader(self.driver, self.step_stream, layout, self.slab, lambda: 0.0)  # type: ignore[arg-type]
        self.read: dict[int, torch.Tensor] = {}

    def begin(self, *parts: Sequence[tuple[int, int]]) -> CudaStepLoads:
        """An order for each list of pairs of block and slot."""
        orders = [order(job_id, LOAD, pairs) for job_id, pairs in enumerate(parts)]
        return self.loader.begin(orders, CudaFence(self.compute), self.compute)  # type: ignore[arg-type]

    def wipe(self) -> None:
        for region in self.layout.regions:
            region.fill_(STALE)
        self.read = {}

    def run_kernel(self, region: int) -> None:
        """Submits it; it reads in `compute.finish`."""
        self.compute.give(lambda: self.read.update({region: self.layout.regions[region].clone()}))

    def expected(self, region: int, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
        begin = sum(self.layout.fragment_bytes[:region])
        expected = torch.full_like(self.layout.regions[region], STALE)
        for block, slot in pairs:
            expected[block] = self.slab.tensor[slot, begin : begin + expected.shape[1]]
        return expected

    def check(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.compute.finish()
        assert len(self.read) == len(self.layout.regions)
        for region, read in self.read.items():
            assert torch.equal(read, self.expected(region, pairs)), f"region {region}"


@pytest.fixture(autouse=True)
def _late_events(monkeypatch: pytest.MonkeyPatch) -> None:
    use_late_events(monkeypatch)


def halves(num_blocks: int, sizes: Sequence[int]) -> KVLayout:
    """Keys and values of a layer side by side, so that two regions are one row."""
    layers = [torch.zeros(num_blocks, 2 * size, dtype=torch.uint8) for size in sizes]
    return KVLayout(tuple(half for layer in layers for half in layer.split(layer.shape[1] // 2, dim=1)))


def whole_slots(num_blocks: int, sizes: Sequence[int]) -> KVLayout:
    """One row, in which neighbouring blocks touch."""
    return packed(num_blocks, [sum(sizes)])


LAYOUTS: dict[str, Callable[[int, Sequence[int]], KVLayout]] = {
    "packed": packed,
    "strided": strided,
    "halves": halves,
    "whole slots": whole_slots,
}


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), layout_name=st.sampled_from(list(LAYOUTS)), copies_ahead=st.sampled_from([1, 7, 20, 1024]))
def test_each_layers_kernels_read_its_bytes(
    monkeypatch: pytest.MonkeyPatch, data: st.DataObject, layout_name: str, copies_ahead: int
) -> None:
    monkeypatch.setattr(cuda_step_loads, "_COPIES_AHEAD", copies_ahead)
    sizes = data.draw(st.lists(st.integers(1, 5000), min_size=1, max_size=6))
    bench = Bench(LAYOUTS[layout_name](NUM_BLOCKS, sizes))
    num_regions = len(bench.layout.regions)
    for _ in range(3):  # what one step's loads leave behind, the next one's use
        bench.wipe()
        blocks = data.draw(st.permutations(range(NUM_BLOCKS)))[: data.draw(st.integers(0, NUM_BLOCKS))]
        slots = data.draw(st.permutations(range(NUM_SLOTS)))
        if data.draw(st.booleans()):
            blocks, slots = sorted(blocks), sorted(slots)
        pairs = list(zip(blocks, slots, strict=False))
        cut = data.draw(st.integers(0, len(pairs)))
        loads = bench.begin(pairs[:cut], pairs[cut:])
        region = 0
        while region < num_regions:
            together = range(region, min(num_regions, region + data.draw(st.integers(1, 3))))
            loads.hold_kernels(list(together))
            loads.hold_kernels([])
            for region in together:
                bench.run_kernel(region)
            region += 1
        assert loads.end()
        bench.check(pairs)
        bench.step_stream.finish()
        assert [result.num_bytes for result in bench.loader.collect()] == [
            len(part) * bench.layout.block_bytes for part in (pairs[:cut], pairs[cut:])
        ]
    assert all(0 < count <= copies_ahead for count in bench.driver.calls)
    bench.slab.close()


def test_control_kernels_that_are_not_held_read_stale_bytes() -> None:
    bench = Bench(packed(NUM_BLOCKS, [64] * 3))
    bench.wipe()
    loads = bench.begin([(1, 2)])
    for region in range(3):
        bench.run_kernel(region)
    assert not loads.end()
    with pytest.raises(AssertionError, match="region 0"):
        bench.check([(1, 2)])


@pytest.mark.parametrize(("num_blocks", "ahead"), [(1, 9), (4, 2), (5, 2), (6, 1), (16, 1)])
def test_a_bounded_number_of_copies_is_enqueued_ahead_and_a_row_always(
    monkeypatch: pytest.MonkeyPatch, num_blocks: int, ahead: int
) -> None:
    monkeypatch.setattr(cuda_step_loads, "_COPIES_AHEAD", 10)
    bench = Bench(packed(NUM_BLOCKS, [64] * 10))
    calls_a_row = -(-num_blocks // 10)
    loads = bench.begin([(i, i) for i in range(num_blocks)])
    assert bench.driver.calls == []
    for row in range(10):
        loads.hold_kernels([row])
        assert len(bench.driver.calls) == calls_a_row * min(10, row + 1 + ahead)
    assert loads.end()
    assert sum(bench.driver.calls) == 10 * num_blocks


def test_copies_that_a_seam_adds_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_step_loads, "_COPIES_AHEAD", 5)
    bench = Bench(packed(NUM_BLOCKS, [3000] * 4))
    loads = bench.begin([(0, 0), (1, 1)])
    loads.hold_kernels([0])
    assert bench.driver.calls == [3, 4], "the next row is 4 more, and 4 would be within the bound"
    loads.hold_kernels([3])
    assert bench.driver.calls == [3, 4, 4, 2]
    assert loads.end()


@pytest.mark.parametrize("refused", [0, 2, 4])
def test_a_row_that_the_driver_refuses_is_copied_by_torch_and_no_other(
    refused: int, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(packed(NUM_BLOCKS, [64] * 5))
    bench.wipe()
    bench.driver.refuses = {refused}
    pairs = [(3, 2), (1, 7)]
    loads = bench.begin(pairs)
    for region in range(5):
        loads.hold_kernels([region])
        bench.run_kernel(region)
    assert loads.end()
    assert bench.driver.calls == [2] * 5
    assert bench.step_stream.num_given == 1 + 2 * 4, "the fence, and the copies of the other rows"
    assert "copied block by block" in caplog.text
    bench.check(pairs)


@pytest.mark.parametrize("parts", [(), ([],), ([], [])])
def test_loads_of_nothing_end_and_are_answered(parts: tuple[list[tuple[int, int]], ...]) -> None:
    for layout in (packed(NUM_BLOCKS, [64] * 3), packed(NUM_BLOCKS, [64])):
        bench = Bench(layout)
        loads = bench.begin(*parts)
        loads.hold_kernels(range(len(layout.regions)))
        assert loads.end()
        assert bench.driver.calls == []
        bench.compute.finish()
        assert [answer.num_bytes for answer in bench.loader.collect()] == [0] * len(parts)


def test_the_loader_is_busy_until_the_last_byte_is_there() -> None:
    bench = Bench(packed(NUM_BLOCKS, [64] * 3))
    assert not bench.loader.is_busy
    loads = bench.begin([(0, 0)], [(1, 1), (2, 2)])
    assert bench.loader.is_busy
    assert loads.end() is False
    bench.step_stream.run_to(bench.step_stream.num_given - 1)
    assert bench.loader.is_busy
    assert bench.loader.collect() == []
    assert not bench.loader.close(time.monotonic())
    bench.step_stream.finish()
    assert not bench.loader.is_busy
    assert bench.loader.close(time.monotonic())
    assert bench.loader.collect() == [
        JobResult(job_id, LOAD, Outcome.DONE, 0.0, num_bytes)  # type: ignore[arg-type]
        for job_id, num_bytes in ((0, 192), (1, 384))
    ]
    assert bench.loader.collect() == []


def test_the_end_of_a_step_is_not_moved_by_the_next_steps_loads() -> None:
    bench = Bench(packed(NUM_BLOCKS, [64] * 4))
    first = bench.begin([(0, 0)])
    first.hold_kernels(range(4))
    assert first.end()
    given = bench.step_stream.num_given
    second = bench.begin([(1, 1)])
    second.hold_kernels(range(4))
    bench.step_stream.run_to(given)
    assert first.has_ended
    assert not second.has_ended
    assert second.end()
    assert len(bench.loader.collect()) == 1
    assert bench.loader.is_busy
    bench.step_stream.finish()
    assert len(bench.loader.collect()) == 1


def test_a_step_makes_two_events_and_uses_others_again() -> None:
    bench = Bench(packed(NUM_BLOCKS, [64] * 6))
    for step in range(4):
        made = LateEvent.num_made
        loads = bench.begin([(0, 0)])
        for region in range(6):
            loads.hold_kernels([region])
        assert loads.end()
        assert LateEvent.num_made - made == (7 if step == 0 else 2), "the fence, and the end that is asked for later"


def test_rows_that_kernels_wait_for_together_have_one_end() -> None:
    bench = Bench(packed(NUM_BLOCKS, [64] * 6))
    loads = bench.begin([(0, 0)])
    loads.hold_kernels(range(6))
    assert loads.end()
    assert LateEvent.num_made == 2
    assert bench.compute.num_given == 1


class BatchCall:
    """Reads its arrays as the driver's batch call does."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.copies: list[tuple[int, int, int]] = []

    def __call__(self, targets: int, sources: int, sizes: int, count: int, *rest: int) -> int:
        array = ctypes.c_uint64 * count
        self.copies += zip(*(list(array.from_address(at)) for at in (targets, sources, sizes)), strict=True)
        assert len(rest) == 5
        return self.code


class SingleCall:
    """The driver's library, of before the batch call."""

    def __init__(self) -> None:
        self.copies: list[tuple[int | None, ...]] = []

    def cuMemcpyAsync(self, *arguments: ctypes.c_uint64) -> int:
        self.copies.append(tuple(argument.value for argument in arguments[:3]))
        return 0

    def cuGetErrorName(self, code: int, name: object) -> None: ...


def driver_with(batch: BatchCall | None, library: SingleCall) -> CudaDriver:
    driver = CudaDriver.__new__(CudaDriver)
    driver._batch, driver._library, driver._batch_arguments = batch, library, (1, 2, 3)  # type: ignore[assignment]
    return driver


def test_the_driver_is_given_the_parts_of_arrays_that_it_was_told() -> None:
    targets, sources, sizes = (np.arange(9, dtype=np.uint64) + np.uint64(i) for i in (1000, 2000, 1))
    batch, library = BatchCall(), SingleCall()
    part = slice(3, 7)
    expected = list(zip(range(1003, 1007), range(2003, 2007), range(4, 8), strict=True))
    for driver, copies in ((driver_with(batch, library), batch.copies), (driver_with(None, library), library.copies)):
        driver.copy(targets[part], sources[part], sizes[part], 5)
        assert copies == expected
        driver.copy(targets[:0], sources[:0], sizes[:0], 5)
        assert copies == expected
    with pytest.raises(DriverError, match="cuMemcpyBatchAsync"):
        driver_with(BatchCall(code=1), library).copy(targets, sources, sizes, 5)
