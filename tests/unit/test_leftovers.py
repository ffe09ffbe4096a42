"""What a killed server left is removed; what anybody may still use, or what is not vLLM's, is not."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvortex import leftovers
from kvortex.leftovers import Removed, remove_leftovers

QUEUE = 160 * 2**20 + 20
"""Of one reader, as vLLM makes it."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Its path is short: a socket's may have 107 bytes."""
    with TemporaryDirectory() as name:
        yield Path(name)


def make_old(path: Path) -> Path:
    hour_ago = time.time() - 3600
    os.utime(path, (hour_ago, hour_ago))
    return path


def queue(folder: Path, name: str = "psm_0123abcd", size: int = QUEUE) -> Path:
    path = folder / name
    with path.open("wb") as file:
        file.truncate(size)  # no byte of it is written
    return make_old(path)


@pytest.fixture(autouse=True)
def on_the_machine_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a container, wherever the tests run."""
    monkeypatch.setattr(leftovers, "_INITIAL_NAMESPACE", Path("/proc/self/ns/pid").stat().st_ino)


def remove(folder: Path) -> Removed:
    return remove_leftovers({"VLLM_RPC_BASE_PATH": str(folder)}, shared=folder)


def test_in_a_container_queues_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = queue(folder)
    monkeypatch.setattr(leftovers, "_INITIAL_NAMESPACE", 1)
    assert remove(folder) == Removed()
    assert path.exists()


@pytest.mark.parametrize("size", [QUEUE, 240 * 2**20 + 20, 160 * 2**20 + 90])
def test_a_queue_that_nobody_has_mapped_is_removed(folder: Path, size: int) -> None:
    path = queue(folder, size=size)
    assert remove(folder) == Removed(1, size)
    assert not path.exists()
    assert remove(folder) == Removed()


def test_a_queue_that_a_process_has_mapped_stays(folder: Path) -> None:
    path = queue(folder)
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 4096)
    assert remove(folder) == Removed()
    memory.close()
    assert remove(folder).files == 1


def test_a_semaphore_goes_with_the_last_process_that_has_it(folder: Path) -> None:
    """A real one, where Python makes them."""
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    path = Path("/dev/shm", f"sem.{semaphore._semlock.name.lstrip('/')}")
    make_old(path)
    found = leftovers._dead_memory(path.parent, Path("/proc"))
    assert path not in [one for one, _ in found]
    # What SIGKILL leaves: the file, and nobody who has it.
    copy = folder / path.name
    copy.write_bytes(path.read_bytes())
    make_old(copy)
    assert remove(folder) == Removed(1, 0)
    assert not copy.exists()


def test_a_queue_that_was_just_made_stays(folder: Path) -> None:
    path = queue(folder)
    os.utime(path)
    assert remove(folder) == Removed()
    assert path.exists()


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("sem.mp-0123abcd", 33),
        ("sem.loky-0123abcd", 32),
        ("psm_0123abcd", 32),
        ("psm_0123abcd", 160 * 2**20),
        ("psm_0123abcd", 4096),
        ("psm_0123abcd", 20),
        ("other", QUEUE),
        ("psm_x", QUEUE),
    ],
)
def test_what_is_not_vllms_stays(folder: Path, name: str, size: int) -> None:
    path = queue(folder, name, size)
    assert remove(folder) == Removed()
    assert path.exists()


def test_sockets_that_nobody_listens_on_are_removed(folder: Path) -> None:
    live, dead, other = folder / str(uuid.uuid4()), folder / str(uuid.uuid4()), folder / "other"
    listeners = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for path, listener in zip((live, dead, other), listeners, strict=True):
        listener.bind(str(path))
        listener.listen()
        make_old(path)
    listeners[1].close()
    listeners[2].close()
    plain = make_old(queue(folder, str(uuid.uuid4()), 0))
    assert remove(folder) == Removed(1, 0)
    assert live.exists()
    assert other.exists()
    assert plain.exists()
    assert not dead.exists()
    listeners[0].close()


def test_where_nothing_can_be_seen_nothing_is_removed(folder: Path, tmp_path: Path) -> None:
    path = queue(folder)
    empty = tmp_path / "proc"
    empty.mkdir()
    assert remove_leftovers({"VLLM_RPC_BASE_PATH": str(folder)}, shared=folder, proc=empty) == Removed()
    assert path.exists()
