"""Checks of the host: Python, operating system, RAM, /dev/shm, locked memory, NUMA, WSL2."""

from __future__ import annotations

import platform
import sys

from kvortex.hardware.gpu import Gpu
from kvortex.hardware.host import BindAttempt, Host
from kvortex.hardware.memory import LockLimit, Ram, SharedMemory
from kvortex.hardware.pinning import PinReport
from kvortex.sizes import format_bytes
from kvortex_cli.checks.finding import Finding, fail, ok, warn

RECOMMENDED_RAM_BYTES = 64 * 10**9
_SHM_BYTES = 10**9
RAISE_MEMLOCK = (
    "raise the locked-memory limit: `ulimit -l unlimited`, docker --ulimit memlock=-1, "
    "or LimitMEMLOCK=infinity for containerd"
)


def check_python(version: tuple[int, int, int] = sys.version_info[:3]) -> Finding:
    shown = ".".join(str(part) for part in version)
    if version < (3, 11):
        return fail("python", shown, "install Python 3.11 or newer")
    return ok("python", shown)


def check_os(host: Host, system: str = platform.system()) -> Finding:
    where = f", in a container ({host.container})" if host.container else ""
    shown = f"{system} {host.kernel} {platform.machine()}{where}"
    if system != "Linux":
        return fail("os", shown, "KVortex and vLLM run on Linux; on Windows inside WSL2")
    return ok("os", shown)


def check_ram(ram: Ram) -> Finding:
    shown = f"{format_bytes(ram.usable_bytes)} usable of {format_bytes(ram.total_bytes)}"
    if ram.tightest is not None:
        limit = format_bytes(ram.tightest.limit_bytes)
        shown += f"; cgroup {ram.tightest.cgroup} allows {limit}, {format_bytes(ram.tightest.used_bytes)} taken"
    if ram.usable_bytes < RECOMMENDED_RAM_BYTES:
        recommended = format_bytes(RECOMMENDED_RAM_BYTES)
        fix = f"{recommended} is recommended: with less, the cache keeps fewer conversations"
        if ram.tightest is not None and ram.total_bytes >= RECOMMENDED_RAM_BYTES:
            fix += "; the container's memory limit can be raised (docker --memory, Kubernetes resources.limits)"
        return warn("ram", shown, fix)
    return ok("ram", shown)


def check_shared_memory(shm: SharedMemory | None) -> Finding:
    fix = (
        "vLLM's processes and NCCL talk through it: docker --shm-size=8g or --ipc=host, "
        "in Kubernetes an emptyDir of medium Memory at /dev/shm"
    )
    if shm is None:
        return warn("/dev/shm", "there is none", fix)
    shown = f"{format_bytes(shm.free_bytes)} free of {format_bytes(shm.total_bytes)}"
    if shm.free_bytes >= _SHM_BYTES:
        return ok("/dev/shm", shown)
    # KVortex's own memory is not in it, whatever ram_cache_size is.
    return warn("/dev/shm", f"{shown}; {format_bytes(_SHM_BYTES)} is enough", fix)


def check_lock_limit(limit: LockLimit, pins: PinReport | None) -> Finding:
    """The number alone proves nothing: the driver may pin beyond it. The verdict is the real attempt's."""
    shown = f"soft {_limit(limit.soft_bytes)}, hard {_limit(limit.hard_bytes)}"
    if limit.soft_bytes is None:
        return ok("memlock", shown)
    if pins is None or pins.cuda_error:
        return ok("memlock", f"{shown}; says nothing by itself, and pinning could not be tried")
    if pins.pinned_bytes > limit.soft_bytes:
        return ok("memlock", f"{shown}; {format_bytes(pins.pinned_bytes)} were pinned all the same")
    if any(attempt.error for attempt in pins.attempts):
        return warn("memlock", f"{shown}; pinning failed", RAISE_MEMLOCK)
    return ok("memlock", shown)


def check_numa(host: Host, gpus: tuple[Gpu, ...], binding: BindAttempt | None) -> Finding:
    nodes, allowed = host.numa_nodes, host.allowed_nodes
    shown = f"{len(nodes) or 1} node{'s' if len(nodes) > 1 else ''}"
    if len(nodes) <= 1:
        return ok("numa", shown)
    shown += f", memory allowed from {', '.join(map(str, allowed))}"
    far = [gpu for gpu in gpus if gpu.numa_node is not None and gpu.numa_node not in allowed]
    if far:
        named = ", ".join(f"GPU {gpu.index} (node {gpu.numa_node})" for gpu in far)
        fix = "allow the GPU's node: docker --cpuset-mems, or the cpuset of the scheduler"
        return warn("numa", f"{shown}; not the node of {named}", fix)
    if binding is not None and not binding.allowed:
        fix = "allow it, or copies may cross sockets: docker --cap-add SYS_NICE, or a laxer seccomp profile"
        return warn("numa", f"{shown}; binding to a node is refused: {binding.cause}", fix)
    return ok("numa", f"{shown}; binding to a node is allowed" if binding is not None else shown)


def check_wsl2(host: Host, pins: PinReport | None) -> list[Finding]:
    """A finding on WSL2 only."""
    if not host.is_wsl2:
        return []
    shown = f"this is WSL2 ({host.kernel}), which limits pinned memory"
    if pins is not None and pins.attempts:
        shown += f"; {format_bytes(pins.pinned_bytes)} could be pinned"
        failed = next((attempt for attempt in pins.attempts if attempt.error), None)
        if failed is not None:
            shown += f", {format_bytes(failed.num_bytes)} could not"
    fix = "keep ram_cache_size below what can be pinned, and raise `memory` in .wslconfig if RAM is short"
    return [warn("wsl2", shown, fix)]


def _limit(num_bytes: int | None) -> str:
    return "unlimited" if num_bytes is None else format_bytes(num_bytes)
