"""An engine on the GPU at hand, and what its blocks and slots hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from kvortex.messages import CopyOrder, Direction, IntArray, JobId
from kvortex.transfer.base import KVLayout
from kvortex.transfer.cuda import CudaCopyEngine
from kvortex.transfer.cuda_driver import CudaDriver
from kvortex.transfer.pinned import PIECE_BYTES, PinnedSlab
from kvortex.transfer.tuning import TransferTuning

if TYPE_CHECKING:
    from collections.abc import Iterator

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU that torch can use"),
]

COPY_ENGINE_ONLY = TransferTuning(load_bandwidth=50e9, store_bandwidth=50e9)
SPIN_MS = float(os.environ.get("KVORTEX_TEST_SPIN_MS", "50"))
_CYCLES_A_MS = 2_000_000


def spin(milliseconds: float = SPIN_MS) -> None:
    """Keeps the current stream busy for about that long, and no copy engine."""
    torch.cuda._sleep(int(milliseconds * _CYCLES_A_MS))


def packed(num_blocks: int, sizes: Sequence[int]) -> KVLayout:
    """One contiguous region for each size."""
    return KVLayout(tuple(torch.zeros(num_blocks, n, dtype=torch.uint8, device="cuda") for n in sizes))


def strided(num_blocks: int, sizes: Sequence[int], gap: int = 16) -> KVLayout:
    """Rows with `gap` foreign bytes before and after them."""
    wide = [torch.full((num_blocks, n + 2 * gap), 0xAA, dtype=torch.uint8, device="cuda") for n in sizes]
    return KVLayout(tuple(region[:, gap:-gap] for region in wide))


def key_value_halves(num_blocks: int, sizes: Sequence[int]) -> KVLayout:
    """FlashAttention's [2, num_blocks, ...]: a layer's keys of all blocks, then its values."""
    layers = [torch.zeros(2, num_blocks, n, dtype=torch.uint8, device="cuda") for n in sizes]
    return KVLayout(tuple(half for layer in layers for half in layer))


def interleaved(num_blocks: int, sizes: Sequence[int]) -> KVLayout:
    """A block's layers side by side in one allocation."""
    memory = torch.zeros(num_blocks, sum(sizes), dtype=torch.uint8, device="cuda")
    return KVLayout(tuple(memory.split(list(sizes), dim=1)))


LAYOUTS: dict[str, Callable[[int, Sequence[int]], KVLayout]] = {
    "packed": packed,
    "strided": strided,
    "halves": key_value_halves,
    "interleaved": interleaved,
}


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")


def fill_random(layout: KVLayout) -> None:
    for region in layout.regions:
        region.copy_(random_bytes(*region.shape))


def contents(layout: KVLayout) -> torch.Tensor:
    """uint8 [num_blocks, block_bytes] on the host, as a slot holds it."""
    return torch.cat([region.cpu() for region in layout.regions], dim=1)


def order(
    job_id: int,
    direction: Direction,
    blocks: Sequence[int] | IntArray,
    slots: Sequence[int] | IntArray,
    late_s: float = 60,
) -> CopyOrder:
    return CopyOrder(JobId(job_id), direction, np.asarray(blocks, np.int64), np.asarray(slots, np.int64), late_s)


@contextmanager
def engine_for(
    layout: KVLayout,
    num_slots: int,
    *,
    num_streams: int = 4,
    tuning: TransferTuning = COPY_ENGINE_ONLY,
    kind: type[CudaCopyEngine] = CudaCopyEngine,
    driver: CudaDriver | None = None,
    piece_bytes: int = PIECE_BYTES,
    pinned: bool = True,
    clock: Callable[[], float] | None = None,
) -> Iterator[tuple[CudaCopyEngine, PinnedSlab]]:
    """An engine over a slab of which every byte is 0xEE."""
    driver = driver or CudaDriver(0)
    slab = PinnedSlab(num_slots, layout.block_bytes, driver if pinned else RefusingDriver(0), piece_bytes=piece_bytes)
    slab.wait_pinned(60)
    slab.tensor.fill_(0xEE)
    torch.cuda.synchronize()
    engine = kind(layout, slab, num_streams, driver, tuning, **({} if clock is None else {"clock": clock}))
    try:
        yield engine, slab
    finally:
        assert engine.close(60)
        slab.close()


class RefusingDriver(CudaDriver):
    """Pins nothing."""

    def pin(self, address: int, num_bytes: int) -> None:
        raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY (2) from cuMemHostRegister")
