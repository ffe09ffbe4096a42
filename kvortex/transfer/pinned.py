"""The host's slots, pinned for a GPU by a thread in the background: usable from the start, fast as it gets on.

touched (the kernel gives the pages)  ->  registered (the driver pins them)  ->  pinned_bytes grows
piece after piece, in ascending order of address; a refusal ends it and leaves the rest pageable
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from kvortex.messages import IntArray
from kvortex.sizes import format_bytes
from kvortex.transfer import numa
from kvortex.transfer.slab import HostSlab

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 64 << 20
"""Bytes registered in one call. Nothing is launched on the GPU meanwhile: on an H200 1.5 ms for pages that
are there already, and a hundred times that for pages that are not."""

TOUCH_BYTES: Final = 2 << 20
"""Bytes of pages taken in one call, a huge page. The kernel keeps other threads of the process from mapping memory, or
giving it back, meanwhile, and the model's thread does both."""

_CLOSE_TIMEOUT_S: Final = 30.0
_POPULATE_WRITE: Final = 23
"""madvise's MADV_POPULATE_WRITE, of Linux 5.14; Python's mmap does not name it."""


class Registrar(Protocol):
    """What pins memory: `CudaDriver`. Raises RuntimeError for what it refuses."""

    def enter_thread(self) -> None: ...

    def enter(self) -> None: ...

    def pin(self, address: int, num_bytes: int) -> None: ...

    def unpin(self, address: int) -> None: ...


class PinnedSlab(HostSlab):
    """A `HostSlab` whose memory is being pinned; every method may be called from any thread, `close` from one.

    Args:
        num_slots: slots, at least 1.
        slot_bytes: bytes of one slot.
        registrar: pins the memory; used until `close`.
        node: NUMA node the pages should come from; None leaves it to the kernel.
        piece_bytes: bytes registered at once, of whole pages.
        touch: gives the kernel's pages to [address, address + bytes) and raises OSError where it does not.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        registrar: Registrar,
        *,
        node: int | None = None,
        piece_bytes: int = PIECE_BYTES,
        touch: Callable[[int, int], None] | None = None,
    ) -> None:
        assert piece_bytes > 0, piece_bytes
        assert piece_bytes % os.sysconf("SC_PAGE_SIZE") == 0, f"pieces of {piece_bytes} bytes"
        super().__init__(num_slots, slot_bytes)
        self.seam_bytes = piece_bytes
        self.address = int(self.tensor.data_ptr())
        self._registrar = registrar
        self._touch = populate if touch is None else touch
        self._pieces: list[int] = []
        self._pinned_bytes = 0
        self._refusal = ""
        self._stops = threading.Event()
        if node is not None and (cause := numa.prefer_node(self.address, self.num_bytes, node)):
            logger.warning("host memory is not taken from the GPU's NUMA node %d: %s", node, cause)
        self._thread = threading.Thread(target=self._pin_all, name="kvortex-pin", daemon=True)
        self._thread.start()

    @property
    def pinned_bytes(self) -> int:
        """Bytes pinned now, from slot 0 on."""
        return self._pinned_bytes

    @property
    def refusal(self) -> str:
        """Why the rest will never be pinned; "" while nothing was refused."""
        return self._refusal

    @property
    def is_pinning(self) -> bool:
        """Whether `pinned_bytes` may still grow."""
        return self._thread.is_alive()

    def is_pinned(self, slots: IntArray) -> bool:
        """Whether all of these slots are pinned.

        Args:
            slots: int64 [n], n >= 1, within the slab.
        """
        return (int(slots.max()) + 1) * self.slot_bytes <= self._pinned_bytes

    def wait_pinned(self, timeout_s: float) -> bool:
        """Waits until pinning has ended. True when all of it is pinned."""
        self._thread.join(timeout_s)
        return self._pinned_bytes == self.num_bytes

    def close(self) -> None:
        """Unpins the memory and gives it back; may be called again. Close the copy engine first."""
        self._stops.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            # Memory that the driver may be pinning must stay where it is.
            logger.warning("the host slab stays: pinning has not ended for %.0f s", _CLOSE_TIMEOUT_S)
            return
        if self._pieces:
            self._registrar.enter()
        while self._pieces:
            try:
                self._registrar.unpin(self._pieces.pop())
            except RuntimeError as error:  # a GPU that is lost has unpinned it already
                logger.warning("a piece of the host slab was not unpinned: %s", error)
        self._pinned_bytes = 0
        super().close()

    def _pin_all(self) -> None:
        """The pinning thread's life."""
        begin_s = time.monotonic()
        try:
            self._registrar.enter_thread()
            for begin in range(0, self.num_bytes, self.seam_bytes):
                if self._stops.is_set():
                    return
                self._pin(self.address + begin, min(self.seam_bytes, self.num_bytes - begin))
            logger.info(
                "all %s of host RAM are pinned, %.1f s on", format_bytes(self.num_bytes), time.monotonic() - begin_s
            )
        except (OSError, RuntimeError) as error:
            self._refusal = str(error)
            logger.warning(
                "only %s of %s of host memory could be pinned, the rest copies slowly: %s; `kvortex doctor` tells more",
                format_bytes(self._pinned_bytes),
                format_bytes(self.num_bytes),
                error,
            )

    def _pin(self, address: int, num_bytes: int) -> None:
        self._touch(address, num_bytes)
        self._registrar.pin(address, num_bytes)
        self._pieces.append(address)
        self._pinned_bytes += num_bytes


def populate(address: int, num_bytes: int) -> None:
    """Takes the pages of private memory now, without the interpreter lock and without touching the GPU.

    On a kernel that does not know how, nothing happens: registering takes the pages then.

    Raises:
        OSError: the kernel has no memory for them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for begin in range(0, num_bytes, TOUCH_BYTES):
        length = ctypes.c_size_t(min(TOUCH_BYTES, num_bytes - begin))
        if libc.madvise(ctypes.c_void_p(address + begin), length, ctypes.c_int(_POPULATE_WRITE)):
            number = ctypes.get_errno()
            if number == errno.EINVAL:
                return
            raise OSError(number, os.strerror(number))
