"""A stand-in for a model's step on the GPU: matrix products, each behind a small copy of its inputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

_NUM_PRODUCTS: Final = 10
_INPUT_BYTES: Final = 64 << 10
_OUTPUT_BYTES: Final = 64


class ModelStep:
    """Runs steps on a stream of a model's priority, some 15 ms each on a card of 800 TFLOP/s.

    Args:
        size: rows and columns of the matrices, of 2 bytes a value; three of them are taken.
    """

    def __init__(self, device: torch.device, size: int = 8192) -> None:
        self.stream = torch.cuda.Stream(device=device, priority=-1)  # type: ignore[no-untyped-call]
        self._left, self._right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        self._product = torch.empty_like(self._left)
        self._host_inputs = [torch.zeros(_INPUT_BYTES, dtype=torch.uint8).pin_memory() for _ in range(_NUM_PRODUCTS)]
        self._inputs = [torch.empty(_INPUT_BYTES, dtype=torch.uint8, device=device) for _ in range(_NUM_PRODUCTS)]
        self._output = torch.empty(_OUTPUT_BYTES, dtype=torch.uint8).pin_memory()
        torch.cuda.synchronize(device)

    def run(self, meanwhile: Callable[[], object]) -> float:
        """Seconds of one step; `meanwhile` is called once, while the GPU is at it."""
        begin_s = time.perf_counter()
        with torch.cuda.stream(self.stream):
            for host, device in zip(self._host_inputs, self._inputs, strict=True):
                device.copy_(host, non_blocking=True)
                torch.mm(self._left, self._right, out=self._product)
            self._output.copy_(self._inputs[-1][:_OUTPUT_BYTES], non_blocking=True)
            meanwhile()
        self.stream.synchronize()
        return time.perf_counter() - begin_s
