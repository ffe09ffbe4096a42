"""The pinned slab with a registrar that is worked by hand: order, refusals, what is given back."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from kvortex.transfer.pinned import TOUCH_BYTES, PinnedSlab, populate

PAGE = 4096


class FakeRegistrar:
    """Notes what is pinned; refuses from the `refused`-th piece on, and waits for `gate` before each."""

    def __init__(self, refused: int | None = None, *, gated: bool = False) -> None:
        self.refused = refused
        self.gate = threading.Semaphore(0 if gated else 10_000)
        self.pinned: dict[int, int] = {}
        self.ever_pinned: list[tuple[int, int]] = []
        self.entered: list[str] = []

    def enter(self) -> None:
        self.entered.append(threading.current_thread().name)

    enter_thread = enter

    def pin(self, address: int, num_bytes: int) -> None:
        assert self.gate.acquire(timeout=60)
        if self.refused is not None and len(self.ever_pinned) >= self.refused:
            raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY (2) from cuMemHostRegister")
        assert address not in self.pinned
        self.pinned[address] = num_bytes
        self.ever_pinned.append((address, num_bytes))

    def unpin(self, address: int) -> None:
        del self.pinned[address]


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def wait_for(slab: PinnedSlab, pinned_bytes: int) -> None:
    waited = threading.Event()
    for _ in range(6000):
        if slab.pinned_bytes == pinned_bytes:
            return
        waited.wait(0.005)
    raise AssertionError(f"{slab.pinned_bytes} bytes pinned, not {pinned_bytes}")


def test_memory_is_pinned_in_ascending_pieces_and_all_of_it(caplog: pytest.LogCaptureFixture) -> None:
    registrar = FakeRegistrar()
    with caplog.at_level(logging.INFO):
        slab = PinnedSlab(7, 3000, registrar, piece_bytes=2 * PAGE)
        assert slab.wait_pinned(60)
    assert "all 21 KB of host RAM are pinned" in caplog.text
    base = slab.address
    assert registrar.ever_pinned == [(base, 8192), (base + 8192, 8192), (base + 16384, 21000 - 16384)]
    assert slab.pinned_bytes == slab.num_bytes == 21000
    assert not slab.is_pinning
    assert registrar.entered == ["kvortex-pin"], "a thread without the GPU's context cannot pin"
    slab.close()


def test_the_slab_is_usable_before_it_is_pinned_and_says_how_far_it_got() -> None:
    registrar = FakeRegistrar(gated=True)
    slab = PinnedSlab(8, 3000, registrar, piece_bytes=2 * PAGE)
    slab.tensor[7] = 9
    assert slab.pinned_bytes == 0
    assert not slab.is_pinned(slots(0))
    registrar.gate.release()
    wait_for(slab, 8192)
    assert slab.is_pinned(slots(1, 0))
    assert not slab.is_pinned(slots(0, 2)), "slot 2 reaches into the second piece"
    assert slab.is_pinning
    registrar.gate.release(10)
    assert slab.wait_pinned(60)
    assert slab.is_pinned(slots(7))
    assert slab.tensor[7, 0] == 9
    slab.close()


def test_a_refused_piece_leaves_the_rest_pageable_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    registrar = FakeRegistrar(refused=2)
    with caplog.at_level(logging.WARNING):
        slab = PinnedSlab(10, PAGE, registrar, piece_bytes=PAGE)
        assert not slab.wait_pinned(60)
    assert slab.pinned_bytes == 2 * PAGE
    assert slab.is_pinned(slots(0, 1))
    assert not slab.is_pinned(slots(2))
    assert not slab.is_pinning
    assert "CUDA_ERROR_OUT_OF_MEMORY" in slab.refusal
    (record,) = caplog.records
    assert "8.192 kB" in record.getMessage() or "8.192 KB" in record.getMessage()
    slab.tensor[9] = 1
    slab.close()
    assert registrar.pinned == {}


def test_memory_that_the_kernel_does_not_give_is_not_registered(caplog: pytest.LogCaptureFixture) -> None:
    def touch(address: int, num_bytes: int) -> None:
        if registrar.ever_pinned:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    registrar = FakeRegistrar()
    slab = PinnedSlab(4, PAGE, registrar, piece_bytes=PAGE, touch=touch)
    assert not slab.wait_pinned(60)
    assert slab.pinned_bytes == PAGE
    assert "Cannot allocate memory" in slab.refusal
    slab.close()


def test_close_unpins_every_piece_before_the_memory_goes() -> None:
    registrar = FakeRegistrar()
    slab = PinnedSlab(5, PAGE, registrar, piece_bytes=PAGE)
    assert slab.wait_pinned(60)
    assert len(registrar.pinned) == 5
    slab.close()
    assert registrar.pinned == {}
    assert slab.pinned_bytes == 0
    slab.close()
    with pytest.raises(AssertionError, match="closed"):
        slab.tensor.fill_(1)


def test_close_stops_pinning_that_is_under_way() -> None:
    registrar = FakeRegistrar(gated=True)
    slab = PinnedSlab(1000, PAGE, registrar, piece_bytes=PAGE)
    registrar.gate.release(2)
    wait_for(slab, 2 * PAGE)
    threading.Timer(0.05, registrar.gate.release, [1]).start()
    slab.close()
    assert len(registrar.ever_pinned) in (2, 3)
    assert registrar.pinned == {}


def test_pages_are_taken_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the kernel takes them, no other thread of the process maps memory."""
    asked: list[tuple[int, int]] = []

    class Libc:
        def madvise(self, address: Any, length: Any, advice: Any) -> int:
            asked.append((address.value, length.value))
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Libc())
    populate(1 << 40, 2 * TOUCH_BYTES + PAGE)
    assert asked == [
        (1 << 40, TOUCH_BYTES),
        ((1 << 40) + TOUCH_BYTES, TOUCH_BYTES),
        ((1 << 40) + 2 * TOUCH_BYTES, PAGE),
    ]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOMEM])
def test_a_kernel_that_does_not_know_how_is_asked_once_and_one_without_memory_says_so(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    calls: list[int] = []

    class Libc:
        def madvise(self, *_: Any) -> int:
            calls.append(number)
            ctypes.set_errno(number)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Libc())
    with nullcontext() if number == errno.EINVAL else pytest.raises(OSError, match=os.strerror(number)):
        populate(1 << 40, 4 * TOUCH_BYTES)
    assert calls == [number]


def test_populating_takes_the_pages_and_leaves_their_contents() -> None:
    memory = torch.zeros(64 * PAGE, dtype=torch.uint8)
    begin = -memory.data_ptr() % PAGE
    memory[begin] = 5
    populate(memory.data_ptr() + begin, 32 * PAGE)
    assert memory[begin] == 5
    assert int(memory.sum()) == 5
