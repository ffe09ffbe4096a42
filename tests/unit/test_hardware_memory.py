"""What a process may really use of the RAM, from made-up /proc and /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvortex.hardware.memory import read_lock_limit, read_ram, read_shared_memory, usable_ram_bytes

GIB = 1 << 30
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def write(root: Path, files: dict[str, str | int]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """256 GiB, of which 200 GiB are available, and no cgroup."""
    kib = GIB // 1024
    meminfo = f"MemTotal: {256 * kib} kB\nMemFree: 1 kB\nMemAvailable: {200 * kib} kB"
    write(tmp_path, {"proc/meminfo": meminfo})
    return tmp_path


def test_without_cgroups_it_is_what_the_kernel_calls_available(machine: Path) -> None:
    ram = read_ram(machine)
    assert (ram.total_bytes, ram.usable_bytes, ram.tightest) == (256 * GIB, 200 * GIB, None)


def test_a_v2_limit_counts_less_what_is_used(machine: Path) -> None:
    write(
        machine,
        {
            "proc/self/cgroup": "0::/pod/server",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/pod/server/memory.max": 64 * GIB,
            "sys/fs/cgroup/pod/server/memory.current": 10 * GIB,
        },
    )
    assert usable_ram_bytes(machine) == 54 * GIB
    assert read_ram(machine).allowed_bytes == 64 * GIB


def test_inactive_page_cache_is_given_back_and_does_not_count(machine: Path) -> None:
    write(
        machine,
        {
            "proc/self/cgroup": "0::/a",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/a/memory.max": 64 * GIB,
            "sys/fs/cgroup/a/memory.current": 60 * GIB,
            "sys/fs/cgroup/a/memory.stat": f"anon {8 * GIB}\ninactive_file {50 * GIB}\nactive_file {2 * GIB}",
        },
    )
    assert usable_ram_bytes(machine) == 54 * GIB


def test_the_tightest_cgroup_on_the_way_up_decides(machine: Path) -> None:
    write(
        machine,
        {
            "proc/self/cgroup": "0::/pod/server",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/pod/server/memory.max": "max",
            "sys/fs/cgroup/pod/server/memory.current": GIB,
            "sys/fs/cgroup/pod/memory.max": 32 * GIB,
            "sys/fs/cgroup/pod/memory.current": 20 * GIB,
        },
    )
    ram = read_ram(machine)
    assert ram.usable_bytes == 12 * GIB
    assert ram.tightest is not None
    assert ram.tightest.cgroup.endswith("/pod")


def test_the_throttling_limit_counts_as_one(machine: Path) -> None:
    write(
        machine,
        {
            "proc/self/cgroup": "0::/a",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/a/memory.max": 64 * GIB,
            "sys/fs/cgroup/a/memory.high": 16 * GIB,
            "sys/fs/cgroup/a/memory.current": 0,
        },
    )
    assert usable_ram_bytes(machine) == 16 * GIB


def test_a_v1_limit_counts_with_its_whole_subtree_s_page_cache(machine: Path) -> None:
    write(
        machine,
        {
            "proc/self/cgroup": "8:pids:/x\n4:memory:/docker/abc\n0::/",
            "proc/self/mountinfo": V1_MOUNT.format(root="/"),
            "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": 64 * GIB,
            "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": 30 * GIB,
            "sys/fs/cgroup/memory/docker/abc/memory.stat": f"inactive_file 1\ntotal_inactive_file {20 * GIB}",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 90 * GIB,
        },
    )
    assert usable_ram_bytes(machine) == 54 * GIB


def test_a_container_s_hierarchy_is_mounted_from_its_own_cgroup(machine: Path) -> None:
    write(
        machine,
        {
            "proc/self/cgroup": "4:memory:/docker/abc",
            "proc/self/mountinfo": V1_MOUNT.format(root="/docker/abc"),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 8 * GIB,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": GIB,
        },
    )
    assert usable_ram_bytes(machine) == 7 * GIB


def test_a_cgroup_outside_of_what_is_mounted_is_taken_for_the_mounted_one(machine: Path) -> None:
    write(
        machine,
        {
            "proc/self/cgroup": "0::/",
            "proc/self/mountinfo": V2_MOUNT.format(root="/../.."),
            "sys/fs/cgroup/memory.max": 8 * GIB,
            "sys/fs/cgroup/memory.current": GIB,
        },
    )
    assert usable_ram_bytes(machine) == 7 * GIB


def test_no_limit_is_no_limit(machine: Path) -> None:
    write(
        machine,
        {
            "proc/self/cgroup": "4:memory:/\n0::/",
            "proc/self/mountinfo": V1_MOUNT.format(root="/") + V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": GIB,
            "sys/fs/cgroup/memory.max": "max",
        },
    )
    assert read_ram(machine).cgroups == ()


def test_a_cgroup_over_its_limit_leaves_nothing_and_not_less(machine: Path) -> None:
    write(
        machine,
        {
            "proc/self/cgroup": "0::/a",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/a/memory.max": GIB,
            "sys/fs/cgroup/a/memory.current": 2 * GIB,
        },
    )
    assert usable_ram_bytes(machine) == 0


def test_a_free_machine_bounds_a_generous_limit(machine: Path) -> None:
    write(
        machine,
        {
            "proc/self/cgroup": "0::/a",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/a/memory.max": 1000 * GIB,
            "sys/fs/cgroup/a/memory.current": 0,
        },
    )
    ram = read_ram(machine)
    assert (ram.usable_bytes, ram.tightest) == (200 * GIB, None)


def test_this_machine_answers() -> None:
    assert 0 < usable_ram_bytes() <= read_ram().total_bytes
    limit = read_lock_limit()
    assert limit.soft_bytes is None or limit.soft_bytes >= 0


def test_no_shared_memory_is_an_answer(tmp_path: Path) -> None:
    assert read_shared_memory(tmp_path / "nowhere") is None
    there = read_shared_memory(tmp_path)
    assert there is not None
    assert 0 <= there.free_bytes <= there.total_bytes
