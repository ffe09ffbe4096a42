"""What the card at hand does: how fast bytes go between its memory and the host's, by the way they are copied."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Final

import numpy as np
import torch

from kvortex.messages import Direction
from kvortex.transfer.addresses import AddressTable, Row
from kvortex.transfer.cuda_driver import CudaDriver
from kvortex.transfer.cuda_stream import StreamTimer, borrowed_stream
from kvortex.transfer.pinned import PinnedSlab

PROBE_BYTES: Final = 64 << 20
"""On the GPU and on the host each, while a probe is open; one piece of pinned memory."""

_REPEATS: Final = 3
_LARGE_COPIES: Final = 32
_PIN_TIMEOUT_S: Final = 10.0
_NUM_ROWS: Final = 8
_FRAGMENTS: Final = 8192


class LinkProbe:
    """Scratch memory on both sides and a stream of its own; a context manager that gives all of it back.

    Raises:
        RuntimeError: no memory for it, on either side.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._device = torch.device("cuda", driver.index)
        self._slab = PinnedSlab(1, PROBE_BYTES, driver)
        try:
            if not self._slab.wait_pinned(_PIN_TIMEOUT_S):
                raise RuntimeError(f"{PROBE_BYTES} bytes could not be pinned: {self._slab.refusal or 'too slow'}")
            self._memory = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=self._device)
            self._handles = [driver.create_stream(), driver.create_stream()]
        except RuntimeError:
            self._slab.close()
            raise
        self._stream, self._other = (borrowed_stream(handle, self._device) for handle in self._handles)

    def __enter__(self) -> LinkProbe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.synchronize()
        for handle in self._handles:
            self._driver.destroy_stream(handle)
        del self._memory
        # The caching allocator would keep what the model could use.
        torch.cuda.empty_cache()
        self._slab.close()

    def bandwidth(self, *directions: Direction) -> float:
        """Bytes a second of large copies one after the other, in one direction or in two at once."""
        half = PROBE_BYTES // 2
        size = np.array([half], np.uint64)

        def enqueue() -> None:
            begun = torch.cuda.Event()  # type: ignore[no-untyped-call]
            begun.record(self._stream)
            self._other.wait_event(begun)
            for _ in range(_LARGE_COPIES):
                for direction in directions:
                    # Each direction has a half and a stream of its own.
                    offset = np.uint64(0 if direction is Direction.LOAD else half)
                    to = np.array([self._memory.data_ptr()], np.uint64) + offset
                    at = np.array([self._slab.address], np.uint64) + offset
                    if direction is Direction.LOAD:
                        self._driver.copy(to, at, size, self._stream.cuda_stream)
                    else:
                        self._driver.copy(at, to, size, self._other.cuda_stream)
            begun.record(self._other)
            self._stream.wait_event(begun)

        return len(directions) * _LARGE_COPIES * half / self._seconds(enqueue)

    def copy_rate(self, fragment_bytes: int) -> float:
        """Bytes a second of a load by the copy engine, of scattered fragments."""
        rows, blocks, slots = self._scattered(fragment_bytes)
        table = AddressTable(
            rows,
            self._slab.address,
            fragment_bytes * _NUM_ROWS,
            max_copy_bytes=PROBE_BYTES,
            seam_bytes=self._slab.seam_bytes,
        )
        copies = table.copies(blocks, slots)
        num_bytes = int(copies.num_bytes.sum())
        return num_bytes / self._seconds(
            lambda: self._driver.copy(copies.device, copies.host, copies.num_bytes, self._stream.cuda_stream)
        )

    def gather_rate(self, fragment_bytes: int, num_ctas: int) -> float:
        """Bytes a second of the same load by the kernel.

        Raises:
            ImportError: there is no triton.
        """
        from kvortex.transfer.gather import GatherKernel

        rows, blocks, slots = self._scattered(fragment_bytes)
        slot_bytes = fragment_bytes * _NUM_ROWS
        num_slots = PROBE_BYTES // slot_bytes
        host = self._slab.tensor.view(-1)[: num_slots * slot_bytes].view(num_slots, slot_bytes)
        kernel = GatherKernel(rows, self._memory, host, num_ctas)
        even = len(blocks) // 2 * 2
        ids = torch.from_numpy(np.stack([blocks[:even], slots[:even]])).to(self._device)
        return even * slot_bytes / self._seconds(lambda: kernel.load(ids, even, self._stream))

    def _scattered(
        self, fragment_bytes: int
    ) -> tuple[list[Row], np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """Rows over the scratch memory, and pairs of block and slot in no order."""
        num_blocks = min(PROBE_BYTES, _FRAGMENTS * fragment_bytes) // (fragment_bytes * _NUM_ROWS)
        assert num_blocks >= 2, f"fragments of {fragment_bytes} bytes"
        base = int(self._memory.data_ptr())
        rows = [
            Row(base + i * num_blocks * fragment_bytes, fragment_bytes, fragment_bytes, i * fragment_bytes)
            for i in range(_NUM_ROWS)
        ]
        rng = np.random.default_rng(0)
        return rows, rng.permutation(num_blocks), rng.permutation(num_blocks)

    def _seconds(self, enqueue: Callable[[], None]) -> float:
        """The shortest of some runs, the first of which only warms up."""
        self._stream.synchronize()
        torch.cuda.synchronize(self._device)
        seconds: list[float] = []
        for _ in range(_REPEATS + 1):
            timer = StreamTimer(self._stream)
            enqueue()
            seconds.append(timer.seconds())
        return min(seconds[1:])
