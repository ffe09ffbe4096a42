"""The RAM this process may really use: what is free on the machine and what every cgroup above it allows."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
# cgroup v1 has no word for "no limit": it shows the largest page-aligned number instead.
_V1_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class CgroupLimit:
    """One cgroup's memory limit.

    Attributes:
        cgroup: its directory.
        limit_bytes: the lower of the hard limit and the one from which the kernel throttles.
        used_bytes: counted against it now, less the inactive page cache, which is given back on demand.
    """

    cgroup: str
    limit_bytes: int
    used_bytes: int

    @property
    def headroom_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True, slots=True)
class Ram:
    """Host memory in bytes, now.

    Attributes:
        total_bytes: of the machine.
        available_bytes: what the kernel can hand out without swapping (MemAvailable).
        cgroups: the limits on this process, its own cgroup first.
    """

    total_bytes: int
    available_bytes: int
    cgroups: tuple[CgroupLimit, ...]

    @property
    def tightest(self) -> CgroupLimit | None:
        """The cgroup that leaves least, when it leaves less than the machine does."""
        limit = min(self.cgroups, key=lambda cgroup: cgroup.headroom_bytes, default=None)
        return limit if limit is not None and limit.headroom_bytes < self.available_bytes else None

    @property
    def usable_bytes(self) -> int:
        tightest = self.tightest
        return self.available_bytes if tightest is None else tightest.headroom_bytes

    @property
    def allowed_bytes(self) -> int:
        """What this process could ever have: the machine's total or the lowest cgroup limit."""
        return min([self.total_bytes, *(cgroup.limit_bytes for cgroup in self.cgroups)])


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """`/dev/shm`, through which vLLM's processes talk to each other."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class LockLimit:
    """RLIMIT_MEMLOCK in bytes; None is unlimited."""

    soft_bytes: int | None
    hard_bytes: int | None


def usable_ram_bytes(root: Path = _ROOT) -> int:
    """Bytes of RAM this process may use now, at least 0."""
    return read_ram(root).usable_bytes


def read_ram(root: Path = _ROOT) -> Ram:
    """Reads meminfo and the cgroups, v1 and v2, from the /proc and /sys below `root`."""
    meminfo = _fields(root / "proc/meminfo")
    if "MemTotal:" not in meminfo:
        import psutil

        memory = psutil.virtual_memory()
        return Ram(memory.total, memory.available, ())
    available = meminfo.get("MemAvailable:", meminfo.get("MemFree:", 0))
    return Ram(meminfo["MemTotal:"] * 1024, available * 1024, tuple(_cgroup_limits(root)))


def read_shared_memory(path: Path = Path("/dev/shm")) -> SharedMemory | None:
    """None where there is no such directory."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return SharedMemory(usage.total, usage.free)


def read_lock_limit() -> LockLimit:
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_MEMLOCK)
    )
    return LockLimit(soft, hard)


def read_oom_kills(root: Path = _ROOT) -> int:
    """How many processes the kernel has ended for lack of memory: in this process's cgroup and below, where that is
    counted, else on the machine."""
    for directory, is_v2 in _memory_cgroups(root):
        kills = _fields(directory / ("memory.events" if is_v2 else "memory.oom_control")).get("oom_kill")
        if kills is not None:
            return kills
    return _fields(root / "proc/vmstat").get("oom_kill", 0)


def _cgroup_limits(root: Path) -> Iterator[CgroupLimit]:
    for directory, is_v2 in _memory_cgroups(root):
        stat = _fields(directory / "memory.stat")
        if is_v2:
            limits = [_number(directory / name) for name in ("memory.max", "memory.high")]
            used = _number(directory / "memory.current")
            reclaimable = stat.get("inactive_file", 0)
        else:
            limits = [_number(directory / "memory.limit_in_bytes")]
            used = _number(directory / "memory.usage_in_bytes")
            reclaimable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        limited = [limit for limit in limits if limit is not None and limit < _V1_UNLIMITED_BYTES]
        if limited and used is not None:
            yield CgroupLimit(str(directory), min(limited), max(0, used - reclaimable))


def _memory_cgroups(root: Path) -> Iterator[tuple[Path, bool]]:
    """This process's memory cgroups, each followed by those above it, and whether it is v2."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        is_v2 = controllers == ""
        if not is_v2 and "memory" not in controllers.split(","):
            continue
        for mounted, mount_point in _mounts(root, is_v2):
            # In a container the hierarchy is often mounted from this very cgroup, whose path is the host's.
            below = Path(path).relative_to(mounted) if Path(path).is_relative_to(mounted) else Path()
            directory = mount_point / below
            while True:
                yield directory, is_v2
                if directory == mount_point:
                    break
                directory = directory.parent


def _mounts(root: Path, is_v2: bool) -> Iterator[tuple[str, Path]]:
    """(path inside the hierarchy, where it is mounted) of the hierarchies that limit memory."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        mount, kind = before.split(), after.split()
        wanted = kind[:1] == ["cgroup2"] if is_v2 else kind[:1] == ["cgroup"] and "memory" in kind[-1].split(",")
        if wanted:
            yield mount[3], root / mount[4].lstrip("/")


def _fields(path: Path) -> dict[str, int]:
    """`name number` lines."""
    pairs = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) >= 2 and pair[1].isdigit()}


def _number(path: Path) -> int | None:
    """None where the file is not there or says "max"."""
    text = "".join(_lines(path))
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
