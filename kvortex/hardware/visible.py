"""CUDA_VISIBLE_DEVICES, read by CUDA's own rule: entries count until the first one that names no device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_LEADING_INTEGER = re.compile(r"[+-]?\d+")


@dataclass(frozen=True, slots=True)
class MigName:
    """The older name of a slice, `MIG-<GPU uuid>/<GPU instance>/<compute instance>`."""

    parent_uuid: str
    gpu_instance: int
    compute_instance: int

    def __str__(self) -> str:
        return f"MIG-{self.parent_uuid}/{self.gpu_instance}/{self.compute_instance}"


@dataclass(frozen=True, slots=True)
class Selection:
    """
    Attributes:
        positions: into the devices given, in the order CUDA numbers them.
        problem: the entry at which CUDA stopped reading and why; "" when every entry counted.
    """

    positions: tuple[int, ...]
    problem: str


def select(value: str | None, gpus: Sequence[str], slices: Sequence[tuple[str, MigName]]) -> Selection:
    """Which devices a value of CUDA_VISIBLE_DEVICES leaves visible.

    Args:
        value: of the variable; None when it is unset.
        gpus: uuids of the machine's GPUs, in index order.
        slices: MIG slices, each by uuid and older name; their positions follow the GPUs'.
    """
    if value is None:
        return Selection(tuple(range(len(gpus))), "")
    first = value.split(",")[0]
    if first.startswith("MIG-"):
        names = [(len(gpus) + i, (uuid, str(old))) for i, (uuid, old) in enumerate(slices)]
        return _by_name(value, "MIG-", names)
    if first.startswith("GPU-"):
        return _by_name(value, "GPU-", [(i, (uuid,)) for i, uuid in enumerate(gpus)])
    return _by_index(value, len(gpus))


def _by_index(value: str, num_gpus: int) -> Selection:
    positions: list[int] = []
    for position, entry in enumerate(value.split(",")):
        stripped = entry.strip()
        match = _LEADING_INTEGER.match(stripped)
        index = int(match[0]) if match else None
        if index is None:
            # An empty value, and the end of "0,", hide nothing that was asked for.
            is_end = stripped == "" and position == value.count(",")
            return Selection(tuple(positions), "" if is_end else f"{stripped!r} is no index and no uuid")
        if index in positions:
            return Selection((), f"{index} is named twice, and CUDA then shows no GPU at all")
        if index < 0:
            hides_all = position == 0 and value.strip() == "-1"
            return Selection(tuple(positions), "" if hides_all else f"{stripped} ends the list")
        if index >= num_gpus:
            return Selection(tuple(positions), f"there is no GPU {index}: this machine has {num_gpus}")
        positions.append(index)
    return Selection(tuple(positions), "")


def _by_name(value: str, prefix: str, names: Sequence[tuple[int, tuple[str, ...]]]) -> Selection:
    positions: list[int] = []
    for entry in value.split(","):
        stripped = entry.strip()
        if not stripped.startswith(prefix):
            problem = f"{stripped!r} does not start with {prefix} as the first entry does"
            return Selection(tuple(positions), problem)
        found = [position for position, known in names if any(name.startswith(stripped) for name in known)]
        if not found:
            return Selection(tuple(positions), f"no device of this machine is called {stripped}")
        if len(found) > 1:
            return Selection(tuple(positions), f"{stripped} fits {len(found)} devices")
        if found[0] in positions:
            return Selection((), f"{stripped} is named twice, and CUDA then shows no GPU at all")
        positions.append(found[0])
    return Selection(tuple(positions), "")
