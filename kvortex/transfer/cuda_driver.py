"""The driver calls that copying needs, through ctypes: many copies in one call, pauses between them, pinning.

torch has none of these. Every call gives up the interpreter lock while it runs.
"""

from __future__ import annotations

import ctypes
import uuid
from typing import Any, Final

from kvortex.errors import UnfitError
from kvortex.transfer.addresses import Addresses, address_of

_BATCH_CALL: Final = b"cuMemcpyBatchAsync"
_BATCH_SINCE: Final = 12080
_IN_STREAM_ORDER: Final = 1
_NON_BLOCKING: Final = 1
_PORTABLE: Final = 1
_RELAXED: Final = 2
_READS_HOST_POINTERS: Final = 91


class DriverError(RuntimeError):
    """A driver call failed; `name` is the driver's, such as CUDA_ERROR_INVALID_VALUE."""

    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__(f"{name} ({code}) from {function}")
        self.code = code
        self.name = name


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("source_access_order", ctypes.c_uint),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class CudaDriver:
    """One GPU's driver. Its context is the one torch uses.

    Args:
        index: CUDA's number of the GPU, as in torch's `cuda:0`.

    Raises:
        UnfitError: there is no driver, or it cannot use that GPU.
    """

    def __init__(self, index: int) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise UnfitError(f"no NVIDIA driver: {error}", hint="run `kvortex doctor`") from error
        self.index = index
        self._device, self._context = ctypes.c_int(), ctypes.c_void_p()
        try:
            self._call("cuInit", ctypes.c_uint(0))
            self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(index))
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
            self.enter()
            self._pause_word = ctypes.c_uint64()
            self._call("cuMemAlloc_v2", ctypes.byref(self._pause_word), ctypes.c_size_t(4))
        except DriverError as error:
            raise UnfitError(
                f"the NVIDIA driver cannot use GPU {index}: {error}", hint="run `kvortex doctor`"
            ) from error
        self._batch = self._batch_call()
        self._attributes = _CopyAttributes(source_access_order=_IN_STREAM_ORDER)
        self._first_index, self._failed_at = ctypes.c_size_t(0), ctypes.c_size_t(0)
        # Nobody reads what failed, so that all threads' calls may write it to one place.
        self._batch_arguments = tuple(map(ctypes.addressof, (self._attributes, self._first_index, self._failed_at)))
        self._has_stream_writes = self._try_stream_write()

    @property
    def has_batches(self) -> bool:
        """Whether many copies are one call: CUDA 12.8 and later."""
        return self._batch is not None

    @property
    def reads_host_pointers(self) -> bool:
        """Whether a kernel reads pinned memory at the address that the process has for it."""
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(_READS_HOST_POINTERS), self._device)
        return bool(value.value)

    @property
    def gpu_uuid(self) -> str:
        """As NVML writes a GPU's: GPU-00000000-...; of a MIG slice, for which NVML writes MIG-, with GPU- too."""
        raw = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", raw, self._device)
        return f"GPU-{uuid.UUID(bytes=bytes(raw))}"

    def enter(self) -> None:
        """Makes the GPU's context the calling thread's, as every other call here wants it."""
        self._call("cuCtxSetCurrent", self._context)

    def enter_thread(self) -> None:
        """`enter` for a thread of our own, beside one that may be capturing a CUDA graph.

        Without the relaxed mode a call such as pinning would break that capture.
        """
        self.enter()
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_RELAXED)))

    def create_stream(self) -> int:
        """A stream of the lowest priority that no one else has; torch hands its own out again and again."""
        lowest, stream = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuCtxGetStreamPriorityRange", ctypes.byref(lowest), None)
        self._call("cuStreamCreateWithPriority", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING), lowest)
        assert stream.value is not None
        return stream.value

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def copy(self, target: Addresses, source: Addresses, num_bytes: Addresses, stream: int) -> None:
        """Enqueues copies of `num_bytes[i]` bytes from `source[i]` to `target[i]`, all in stream order.

        Host memory may be pageable; the call then returns only when its bytes have been moved.

        Raises:
            DriverError: some of the copies may have been enqueued.
        """
        assert len(target) == len(source) == len(num_bytes), (len(target), len(source), len(num_bytes))
        self.copy_at(address_of(target), address_of(source), address_of(num_bytes), len(num_bytes), stream)

    def copy_at(self, targets: int, sources: int, sizes: int, num_copies: int, stream: int) -> None:
        """`copy` by the addresses of its three arrays, which are read before it returns, from their first element on.

        Raises:
            DriverError: some of the copies may have been enqueued.
        """
        if self._batch is None:
            self._copy_singly(targets, sources, sizes, num_copies, stream)
            return
        attributes, first, failed_at = self._batch_arguments
        code = self._batch(targets, sources, sizes, num_copies, attributes, first, 1, failed_at, stream)
        if code:
            self._check(_BATCH_CALL.decode(), code)

    def _copy_singly(self, targets: int, sources: int, sizes: int, num_copies: int, stream: int) -> None:
        call = self._library.cuMemcpyAsync
        array = ctypes.c_uint64 * num_copies
        for to, at, size in zip(*map(array.from_address, (targets, sources, sizes)), strict=True):
            code = call(ctypes.c_uint64(to), ctypes.c_uint64(at), ctypes.c_size_t(size), ctypes.c_void_p(stream))
            self._check("cuMemcpyAsync", code)

    def pause(self, stream: int) -> None:
        """Enqueues a moment in which the copy engine is idle, some microseconds, and serves other streams.

        Between two copies of one stream it never is, and a model's own small copies then wait for all of them.
        """
        handle = ctypes.c_void_p(stream)
        if self._has_stream_writes:
            code = self._library.cuStreamWriteValue32_v2(handle, self._pause_word, ctypes.c_uint32(0), ctypes.c_uint(0))
            self._check("cuStreamWriteValue32", code)
        else:
            self._call("cuMemsetD32Async", self._pause_word, ctypes.c_uint32(0), ctypes.c_size_t(1), handle)

    def pin(self, address: int, num_bytes: int) -> None:
        """Registers host memory. While it runs, nothing is launched on this GPU from any thread."""
        pointer, size = ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)
        self._call("cuMemHostRegister_v2", pointer, size, ctypes.c_uint(_PORTABLE))

    def unpin(self, address: int) -> None:
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def _batch_call(self) -> Any:
        """The batch call with the signature of CUDA 12.8, which later drivers keep; None where there is none."""
        function, status = ctypes.c_void_p(), ctypes.c_int()
        code = self._library.cuGetProcAddress_v2(
            _BATCH_CALL,
            ctypes.byref(function),
            ctypes.c_int(_BATCH_SINCE),
            ctypes.c_uint64(0),
            ctypes.byref(status),
        )
        if code or not function.value:
            return None
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        prototype = ctypes.CFUNCTYPE(
            ctypes.c_uint, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
        )
        return prototype(function.value)

    def _try_stream_write(self) -> bool:
        stream = self.create_stream()
        try:
            self._has_stream_writes = True
            self.pause(stream)
            self._call("cuStreamSynchronize", ctypes.c_void_p(stream))
        except DriverError:
            return False
        finally:
            self.destroy_stream(stream)
        return True

    def _call(self, function: str, *arguments: Any) -> None:
        self._check(function, getattr(self._library, function)(*arguments))

    def _check(self, function: str, code: int) -> None:
        if code:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(name))
            raise DriverError(function, code, name.value.decode() if name.value else "CUDA error")
