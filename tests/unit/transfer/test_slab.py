"""The host slab: exactly what was asked, taken lazily, given back at once, nothing left anywhere."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from kvortex.errors import UnfitError
from kvortex.transfer.slab import HostSlab

MIB = 1 << 20


def held_bytes() -> int:
    """Memory of this process that no file is behind, in RAM or swapped out."""
    gc.collect()
    # Not the counters of /proc/self/status: a kernel with many processors has them right to some MiB only.
    lines = [line.split() for line in Path("/proc/self/smaps").read_text().splitlines()]
    return sum(int(kib) * 1024 for name, kib, *_ in lines if name in ("Anonymous:", "Swap:"))


def mapping_line(address: int) -> str | None:
    """The line of /proc/self/maps that covers the address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return line
    return None


def vm_flags(address: int) -> set[str]:
    """The kernel's flags of the mapping that covers the address, see proc_pid_smaps(5)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(part, 16) for part in head.split("-"))
            inside = begin <= address < end
        elif inside and head == "VmFlags:":
            return set(line.split()[1:])
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(1, 1), (3, 4097), (1000, 24 * 1024), (7, 131)])
def test_the_slab_is_exactly_slots_times_slot_bytes(num_slots: int, slot_bytes: int) -> None:
    slab = HostSlab(num_slots, slot_bytes)
    assert slab.num_bytes == num_slots * slot_bytes
    assert slab.tensor.shape == (num_slots, slot_bytes)
    assert slab.tensor.dtype is torch.uint8
    assert slab.tensor.is_contiguous()
    assert not slab.tensor.any(), "never written, so zeros"
    slab.close()


def test_the_tensor_is_the_memory_itself_and_not_a_copy() -> None:
    slab = HostSlab(4, 8)
    slab.tensor[3, 7] = 42
    assert slab.tensor[3, 7] == 42
    assert slab.tensor.data_ptr() == slab.tensor[0].data_ptr()
    slab.close()


def test_memory_is_taken_only_as_it_is_written_and_given_back_by_close() -> None:
    before = held_bytes()
    slab = HostSlab(64, 4 * MIB)
    assert held_bytes() - before < 16 * MIB, "nothing is written yet"
    slab.tensor.fill_(1)
    taken = held_bytes() - before
    assert 0.95 * slab.num_bytes <= taken <= 1.05 * slab.num_bytes
    address = slab.tensor.data_ptr()
    slab.close()
    assert held_bytes() - before < 16 * MIB
    assert mapping_line(address) is None, "the addresses are given back too"


def test_a_view_that_outlives_the_slab_holds_no_memory_and_reads_zeros() -> None:
    before = held_bytes()
    slab = HostSlab(64, MIB)
    view = slab.tensor[10:20]
    slab.tensor.fill_(7)
    slab.close()
    assert held_bytes() - before < 16 * MIB
    assert not view.any()
    view[0, 0] = 1  # a late write is harmless
    del view


def test_close_may_be_called_again_and_the_tensor_is_gone() -> None:
    slab = HostSlab(2, 10)
    slab.close()
    slab.close()
    with pytest.raises(AssertionError, match="closed"):
        _ = slab.tensor


@pytest.mark.parametrize("slot_bytes", [1 << 47, 1 << 70])
def test_more_than_the_system_gives_is_refused_with_the_size_and_a_way_out(slot_bytes: int) -> None:
    with pytest.raises(UnfitError) as caught:
        HostSlab(1, slot_bytes)
    assert f"{slot_bytes:,} bytes" in caught.value.message
    assert caught.value.hint is not None
    assert "ram_cache_size" in caught.value.hint


def test_the_memory_has_no_name_so_nothing_is_left_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    slab = HostSlab(16, MIB)
    slab.tensor.fill_(1)
    line = mapping_line(slab.tensor.data_ptr())
    assert line is not None
    _, permissions, _, _, inode, *name = line.split()
    assert (permissions, inode) == ("rw-p", "0"), line
    assert name in ([], ["[anon]"]), line
    assert not any(tmp_path.iterdir())
    slab.close()


def test_neither_a_forked_child_nor_a_core_file_gets_the_slab() -> None:
    slab = HostSlab(16, MIB)
    assert {"dc", "dd"} <= vm_flags(slab.tensor.data_ptr()), "dc: no copy on fork, dd: no dump"
    slab.close()


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(0, 10), (10, 0), (-1, 10)])
def test_an_empty_slab_is_our_bug(num_slots: int, slot_bytes: int) -> None:
    with pytest.raises(AssertionError):
        HostSlab(num_slots, slot_bytes)
