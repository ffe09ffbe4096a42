"""What a vLLM server leaves on this machine when SIGKILL ends all of its processes at once; removed at the next start.

Shared memory for messages between its processes, some 400 MB a server, the files of its sockets, and, where it was
killed while it started, semaphores of Python's. A server that ends in any other way removes them itself; KVortex's own
memory and socket have no name in any file system.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SHARED: Final = re.compile(r"psm_[0-9a-f]{8}|sem\.mp-[a-z0-9_]{8}")
_SOCKET: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
_CHUNKS: Final = 10
"""Of vLLM's message queue; each is a whole number of MiB, and has a byte for its writer and one for each reader."""
_MOST_READERS: Final = 128
_SEMAPHORE_BYTES: Final = 32
"""Of the C library's, on a 64-bit machine. Whoever may still give one to another process has it mapped. One that nobody
has may be another Python program's as well: it is of no use to it either, and is not told of as vLLM's."""
_LEAST_AGE_S: Final = 60.0
"""What is younger may be waiting for the process that it was made for."""

_INITIAL_NAMESPACE: Final = 0xEFFFFFFC
"""The machine's own namespace of processes, from which all are seen (include/linux/proc_ns.h, PROC_PID_INIT_INO)."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Files that were removed; bytes of memory that queues among them held."""

    files: int = 0
    shared_bytes: int = 0


def remove_leftovers(
    environment: Mapping[str, str],
    *,
    shared: Path = Path("/dev/shm"),
    proc: Path = Path("/proc"),
) -> Removed:
    """Removes this user's queues, semaphores and sockets that no process has any more.

    In a container only sockets are: `/dev/shm` may be another's too, whose processes cannot be seen from there.
    """
    folder = Path(environment.get("VLLM_RPC_BASE_PATH", tempfile.gettempdir()))
    dead = [*(_dead_memory(shared, proc) if _sees_all(proc) else []), *_dead_sockets(folder)]
    files = shared_bytes = 0
    for path, num_bytes in dead:
        try:
            path.unlink()
        except OSError:
            continue  # another start was quicker, or the folder is not ours to change
        files += 1
        shared_bytes += num_bytes
    return Removed(files, shared_bytes)


def _old_ones(folder: Path, name: re.Pattern[str]) -> Iterator[tuple[Path, os.stat_result]]:
    """This user's files of this name that are not new."""
    try:
        found = [path for path in folder.iterdir() if name.fullmatch(path.name)]
    except OSError:
        return
    for path in found:
        try:
            status = path.lstat()
        except OSError:
            continue
        if status.st_uid == os.getuid() and time.time() - status.st_mtime > _LEAST_AGE_S:
            yield path, status


def _sees_all(proc: Path) -> bool:
    try:
        return (proc / "self" / "ns" / "pid").stat().st_ino == _INITIAL_NAMESPACE
    except OSError:
        return False


def _dead_memory(shared: Path, proc: Path) -> list[tuple[Path, int]]:
    found = [
        (path, status)
        for path, status in _old_ones(shared, _SHARED)
        if stat.S_ISREG(status.st_mode) and _is_servers(path, status.st_size)
    ]
    if not found:
        return []
    mapped = _mapped(proc)
    return [
        (path, 0 if _is_semaphore(path) else status.st_size)
        for path, status in found
        if mapped and (status.st_dev, status.st_ino) not in mapped
    ]


def _is_servers(path: Path, num_bytes: int) -> bool:
    return num_bytes == _SEMAPHORE_BYTES if _is_semaphore(path) else _is_queue(num_bytes)


def _is_semaphore(path: Path) -> bool:
    return path.name.startswith("sem.")


def _is_queue(num_bytes: int) -> bool:
    """Whether it has the size of one of vLLM's queues, which few other things have."""
    flags = num_bytes % (_CHUNKS << 20)
    return num_bytes > flags and flags % _CHUNKS == 0 and 2 * _CHUNKS <= flags <= (1 + _MOST_READERS) * _CHUNKS


def _mapped(proc: Path) -> set[tuple[int, int]]:
    """Files that processes have mapped, of those that may be looked into: devices and inodes.

    By name a semaphore would not be found: it is mapped before it gets its own.
    """
    found: set[tuple[int, int]] = set()
    for maps in proc.glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(errors="replace").splitlines()
        except OSError:
            continue  # it has ended, or is another's
        for line in lines:
            _, _, _, device, inode, *_ = line.split(maxsplit=5)
            if inode != "0":
                major, minor = (int(part, 16) for part in device.split(":"))
                found.add((os.makedev(major, minor), int(inode)))
    return found


def _dead_sockets(folder: Path) -> list[tuple[Path, int]]:
    return [
        (path, 0) for path, status in _old_ones(folder, _SOCKET) if stat.S_ISSOCK(status.st_mode) and _refuses(path)
    ]


def _refuses(path: Path) -> bool:
    """Whether nobody listens there, in whatever container."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False  # too busy to answer, or not ours to ask
    return False
