"""What kind of host this is: kernel, WSL2, container, NUMA nodes and whether memory may be bound to them."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_WSL2_RELEASE = re.compile(r"microsoft.*wsl2", re.IGNORECASE)
_SET_MEMPOLICY_SYSCALL = {"x86_64": 238, "aarch64": 237}
_MPOL_BIND = 2
_NVIDIA_VENDOR = "0x10de"
_DISPLAY_CLASS = "0x03"


@dataclass(frozen=True, slots=True)
class Host:
    """
    Attributes:
        kernel: release, as `uname -r`.
        is_wsl2: runs in Windows' Linux subsystem, which limits pinned memory.
        container: what says that this is a container; "" when nothing does.
        numa_nodes: nodes of the machine.
        allowed_nodes: nodes this process may take memory from.
        nvidia_pci: PCI addresses of NVIDIA GPUs, whether or not a driver serves them.
    """

    kernel: str
    is_wsl2: bool
    container: str
    numa_nodes: tuple[int, ...]
    allowed_nodes: tuple[int, ...]
    nvidia_pci: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BindAttempt:
    """A real try to take memory from one NUMA node only; `cause` is "" when it was allowed."""

    allowed: bool
    cause: str


def read_host(root: Path = _ROOT, environ: Mapping[str, str] | None = None) -> Host:
    environ = os.environ if environ is None else environ
    # Not /proc/version: it also names the machine that built the kernel, which may be called anything.
    kernel = _text(root / "proc/sys/kernel/osrelease") or platform.release()
    nodes = _ranges(_text(root / "sys/devices/system/node/online"))
    allowed = re.search(r"^Mems_allowed_list:\s*(\S+)", _text(root / "proc/self/status"), re.MULTILINE)
    return Host(
        kernel=kernel,
        is_wsl2=_WSL2_RELEASE.search(kernel) is not None,
        container=_container(root, environ),
        numa_nodes=nodes,
        allowed_nodes=tuple(node for node in _ranges(allowed[1] if allowed else "") if node in nodes),
        nvidia_pci=_nvidia_pci(root),
    )


def try_numa_binding(node: int) -> BindAttempt:
    """Asks the kernel to bind a short-lived thread of its own to a node; the process is left as it was."""
    number = _SET_MEMPOLICY_SYSCALL.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        return BindAttempt(False, f"not known how to ask on {platform.system()} {platform.machine()}")
    attempts: list[BindAttempt] = []

    def bind() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        mask = (ctypes.c_ulong * (node // 64 + 1))()
        mask[node // 64] = 1 << node % 64
        # The kernel reads one bit less than it is told of.
        failed = libc.syscall(number, _MPOL_BIND, mask, ctypes.c_ulong(len(mask) * 64 + 1))
        attempts.append(BindAttempt(failed == 0, os.strerror(ctypes.get_errno()) if failed else ""))

    # A memory policy belongs to a thread, and ends with it.
    thread = threading.Thread(target=bind)
    thread.start()
    thread.join()
    return attempts[0]


def _container(root: Path, environ: Mapping[str, str]) -> str:
    for mark in (".dockerenv", "run/.containerenv"):
        if (root / mark).exists():
            return f"/{mark}"
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "KUBERNETES_SERVICE_HOST is set"
    found = re.search(r"docker|kubepods|containerd|lxc", _text(root / "proc/1/cgroup"))
    return f"/proc/1/cgroup names {found[0]}" if found else ""


def _nvidia_pci(root: Path) -> tuple[str, ...]:
    devices = root / "sys/bus/pci/devices"
    if not devices.is_dir():
        return ()
    return tuple(
        sorted(
            device.name
            for device in devices.iterdir()
            if _text(device / "vendor") == _NVIDIA_VENDOR and _text(device / "class").startswith(_DISPLAY_CLASS)
        )
    )


def _ranges(text: str) -> tuple[int, ...]:
    """`0-1,4` is 0, 1, 4."""
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
