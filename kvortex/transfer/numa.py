"""Host memory near a GPU: which NUMA node that is, and asking the kernel for it."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Final

_MBIND_SYSCALL: Final = {"x86_64": 237, "aarch64": 235}
_PREFERRED: Final = 1


def nearest_node(gpu_uuid: str) -> int | None:
    """The NUMA node of a GPU; None where the machine has one node only or does not tell."""
    from kvortex.hardware import read_gpus, read_host

    if len(read_host().numa_nodes) < 2:
        return None
    return next((gpu.numa_node for gpu in read_gpus().gpus if _bare(gpu.uuid) == _bare(gpu_uuid)), None)


def _bare(uuid: str) -> str:
    """Without what kind of device it is of: the driver and NVML differ there over a MIG slice."""
    return uuid.partition("-")[2]


def prefer_node(address: int, num_bytes: int, node: int) -> str:
    """Asks that pages of this memory, none of them touched yet, come from a node while it has any.

    Preferred and not bound: a cache larger than the node's free memory must not get the process killed.

    Args:
        address: of a page.

    Returns:
        Why the kernel refused; "" when it did not.
    """
    number = _MBIND_SYSCALL.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        return f"not known how to ask on {platform.system()} {platform.machine()}"
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than it is told of.
    bits = ctypes.c_ulong(len(mask) * 64 + 1)
    begin, length = ctypes.c_void_p(address), ctypes.c_ulong(num_bytes)
    failed = libc.syscall(ctypes.c_long(number), begin, length, ctypes.c_int(_PREFERRED), mask, bits, ctypes.c_uint(0))
    return os.strerror(ctypes.get_errno()) if failed else ""
