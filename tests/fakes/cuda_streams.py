"""Streams of a GPU that is not there: each runs what it was given in order, as late as it may.

    step stream:     copy, copy, record | copy, copy, record | ...      runs only as far as somebody waits for it
    compute stream:  wait, kernel, wait, kernel, ...                    runs in `finish`

Torch's events and streams cannot be made without a GPU: `use_late_events` puts these in the place of torch.cuda.Event.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from kvortex.transfer.cuda_driver import DriverError


class LateStream:
    """Has the methods of a torch stream that are used."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle
        self.num_given = 0
        self.num_run = 0
        self._given: deque[Callable[[], None]] = deque()

    def give(self, work: Callable[[], None]) -> None:
        self.num_given += 1
        self._given.append(work)

    def run_to(self, point: int) -> None:
        while self.num_run < point:
            self._given.popleft()()
            self.num_run += 1

    def finish(self) -> None:
        self.run_to(self.num_given)

    def wait_event(self, event: LateEvent) -> None:
        stream, point = event.stream, event.point
        assert stream is not None, "nobody recorded it"
        self.give(lambda: stream.run_to(point))


class LateEvent:
    """The place of the last `record`, as CUDA's: who waited before waits for the place of then."""

    num_made = 0

    def __init__(self, *, blocking: bool = False) -> None:
        LateEvent.num_made += 1
        self.stream: LateStream | None = None
        self.point = 0

    def record(self, stream: LateStream) -> None:
        self.stream, self.point = stream, stream.num_given

    def query(self) -> bool:
        assert self.stream is not None
        return self.stream.num_run >= self.point


def use_late_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(LateEvent, "num_made", 0)


class MemmoveDriver:
    """A `CudaDriver` whose copies are done by the CPU, when the stream comes to them."""

    def __init__(self, stream: LateStream) -> None:
        self._stream = stream
        self.calls: list[int] = []
        """How many copies each call was."""
        self.refuses: set[int] = set()
        """Numbers of calls, from 0 on."""

    def copy_at(self, targets: int, sources: int, sizes: int, num_copies: int, stream: int) -> None:
        assert stream == self._stream.cuda_stream
        number = len(self.calls)
        self.calls.append(num_copies)
        if number in self.refuses:
            raise DriverError("cuMemcpyBatchAsync", 1, "CUDA_ERROR_INVALID_VALUE")
        array = ctypes.c_uint64 * num_copies
        for copy in zip(*(list(array.from_address(at)) for at in (targets, sources, sizes)), strict=True):
            self._stream.give(lambda copy=copy: ctypes.memmove(*copy))  # type: ignore[misc]
