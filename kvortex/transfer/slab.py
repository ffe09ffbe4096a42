"""The host's slots: one anonymous mapping, seen as uint8 [num_slots, slot_bytes]."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import torch

from kvortex.errors import UnfitError


class HostSlab:
    """Host RAM for `num_slots` blocks of `slot_bytes` bytes: exactly that much, taken as it is written.

    The memory is private and has no name: no file, nothing in /dev/shm, so the kernel takes it back however
    the process ends. A forked child does not inherit it.

    Args:
        num_slots: slots, at least 1.
        slot_bytes: bytes of one slot, at least 1.

    Raises:
        UnfitError: the system does not give that much memory.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        assert num_slots > 0, f"{num_slots} slots"
        assert slot_bytes > 0, f"{slot_bytes} bytes a slot"
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._memory: mmap.mmap | None = _map_anonymous(self.num_bytes)
        # numpy holds the mapping open for as long as any view of it lives; torch.frombuffer would not.
        flat = np.frombuffer(self._memory, dtype=np.uint8)
        self._tensor: torch.Tensor | None = torch.from_numpy(flat.reshape(num_slots, slot_bytes))

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 [num_slots, slot_bytes], the memory itself; zeros where never written. Not after `close`."""
        assert self._tensor is not None, f"the slab of {self.num_slots} slots is closed"
        return self._tensor

    def close(self) -> None:
        """Gives the memory back now; may be called again.

        Close the copy engine first: what it holds in the slab is lost here. A view that is still alive
        reads zeros and keeps only the addresses, so a late copy does no harm to other memory.
        """
        if self._memory is None:
            return
        self._memory.madvise(mmap.MADV_DONTNEED)
        self._tensor = None
        self._memory = None  # unmapped here, or with the last view


def _map_anonymous(num_bytes: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise UnfitError(
            f"the system does not give {num_bytes:,} bytes of host RAM for the cache ({error})",
            hint="set kv_cache.ram_cache_size to less than the RAM that `kvortex doctor` shows as free",
        ) from error
    # A kernel may have been built without any of these; the slab is right without them.
    for advice in (
        mmap.MADV_HUGEPAGE,  # fewer page faults and TLB misses in large copies
        mmap.MADV_DONTFORK,  # a fork must neither copy the cache on write nor keep it after its parent
        mmap.MADV_DONTDUMP,  # users' conversations do not belong in a core file
    ):
        with contextlib.suppress(OSError):
            memory.madvise(advice)
    return memory
