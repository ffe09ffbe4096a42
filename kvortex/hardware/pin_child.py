"""Pins memory and copies it, in a process of its own that takes its CUDA context with it when it ends.

Run as `python -m kvortex.hardware.pin_child '{"sizes": [...], "gpus": 1}'`. Writes one JSON line for each
thing tried, as soon as it is known: where pinning gets the process killed, the lines before tell how far it
went.
Uses the driver library alone, so it says the truth about the driver where torch is missing or broken.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PAGE_BYTES = mmap.PAGESIZE
_PORTABLE = 1
_COPY_REPEATS = 16


class CudaError(Exception):
    """A driver call failed; `code` and `name` as the driver gives them."""

    def __init__(self, code: int, name: str) -> None:
        super().__init__(f"{name} ({code})")
        self.code = code
        self.name = name


class Cuda:
    """The few driver calls needed here; each raises CudaError when it fails."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(name))
            raise CudaError(code, name.value.decode() if name.value else "CUDA error")

    def enter(self, ordinal: int) -> None:
        """Makes the ordinal's primary context current."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def pin(self, address: int, num_bytes: int) -> None:
        self.call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _PORTABLE)

    def unpin(self, address: int) -> None:
        self.call("cuMemHostUnregister", ctypes.c_void_p(address))

    def measure_copies(self, address: int, num_bytes: int) -> tuple[float, float]:
        """Bytes a second (to the GPU, from the GPU) of pinned memory, on the current context."""
        device, host, size = ctypes.c_uint64(), ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)
        self.call("cuMemAlloc_v2", ctypes.byref(device), size)
        try:
            to_gpu = self._rate(num_bytes, "cuMemcpyHtoD_v2", device, host, size)
            from_gpu = self._rate(num_bytes, "cuMemcpyDtoH_v2", host, device, size)
        finally:
            self.call("cuMemFree_v2", device)
        return to_gpu, from_gpu

    def _rate(self, num_bytes: int, *call: Any) -> float:
        self.call(*call)
        begin = time.perf_counter()
        for _ in range(_COPY_REPEATS):
            self.call(*call)
        self.call("cuCtxSynchronize")
        return _COPY_REPEATS * num_bytes / (time.perf_counter() - begin)


class Buffer:
    """Private memory of this process, every page of it really there."""

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map[::_PAGE_BYTES] = b"\1" * (num_bytes // _PAGE_BYTES)
        self.num_bytes = num_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


def run(sizes: Sequence[int], num_gpus: int) -> None:
    """Tries each size in turn up to the first that fails, then copies to and from each GPU."""
    try:
        cuda = Cuda()
    except OSError as error:
        _tell(event="init", error=str(error), code=0, library="")
        return
    try:
        cuda.call("cuInit", 0)
        cuda.enter(0)
    except CudaError as error:
        _tell(event="init", error=str(error), code=error.code, library=_library_path())
        return
    _tell(event="init", error="", code=0, library=_library_path())
    # The first buffer stays pinned, for the copies; each larger one is given back before the next.
    first: Buffer | None = None
    for num_bytes in sizes:
        begin = time.perf_counter()
        try:
            buffer = Buffer(num_bytes)
            cuda.pin(buffer.address, num_bytes)
        except (CudaError, OSError) as error:
            _tell(event="pin", bytes=num_bytes, error=str(error), seconds=time.perf_counter() - begin)
            break
        _tell(event="pin", bytes=num_bytes, error="", seconds=time.perf_counter() - begin)
        if first is None:
            first = buffer
        else:
            cuda.unpin(buffer.address)
    if first is None:
        return
    for ordinal in range(num_gpus):
        try:
            cuda.enter(ordinal)
            to_gpu, from_gpu = cuda.measure_copies(first.address, first.num_bytes)
        except CudaError as error:
            _tell(event="copy", gpu=ordinal, error=str(error), to_gpu=0.0, from_gpu=0.0)
        else:
            _tell(event="copy", gpu=ordinal, error="", to_gpu=to_gpu, from_gpu=from_gpu)


def _library_path() -> str:
    """Which libcuda was loaded: a container's compat copy and the host's own fail in different ways."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if "libcuda.so" in line:
            return line.split(maxsplit=5)[-1]
    return ""


def _tell(**fact: object) -> None:
    print(json.dumps(fact), flush=True)


if __name__ == "__main__":
    wanted = json.loads(sys.argv[1])
    run(wanted["sizes"], wanted["gpus"])
