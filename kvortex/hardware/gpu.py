"""The GPUs this process may use, asked of the driver's management library: no CUDA context is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvortex.hardware.visible import MigName, select

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU or MIG slice. None is what the driver does not tell.

    Attributes:
        index: of the GPU among all of this machine's, in PCI order.
        memory_bytes: total; of the slice, for a slice.
        free_bytes: of it not in use now.
        compute_capability: (major, minor).
        pcie_gen: fastest generation the card and its slot agree on; at rest the link runs slower.
        pcie_width: lanes in use.
        pcie_max_width: lanes the card has.
        numa_node: host memory nearest to it.
        is_mig_slice: a part of a GPU; the PCIe link is shared with the other parts.
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int | None
    free_bytes: int | None
    compute_capability: tuple[int, int] | None
    pcie_gen: int | None
    pcie_width: int | None
    pcie_max_width: int | None
    numa_node: int | None
    is_mig_slice: bool = False


@dataclass(frozen=True, slots=True)
class Driver:
    """
    Attributes:
        version: of the NVIDIA driver, such as 570.86.15.
        cuda: the newest CUDA it supports, (major, minor).
    """

    version: str
    cuda: tuple[int, int]


@dataclass(frozen=True, slots=True)
class GpuReport:
    """
    Attributes:
        driver: None when none answers; `no_driver` then says why.
        gpus: what CUDA_VISIBLE_DEVICES leaves visible, in CUDA's order.
        present: how many GPUs the driver knows.
        visible_devices: the variable's value; None when unset.
        selection_problem: where and why CUDA stops reading it; "" when every entry counts.
    """

    driver: Driver | None
    no_driver: str
    gpus: tuple[Gpu, ...]
    present: int
    visible_devices: str | None
    selection_problem: str


def read_gpus(nvml: Any = None, environ: Mapping[str, str] | None = None, root: Path = _ROOT) -> GpuReport:
    """Asks the driver; a machine without one, or with a broken one, is an answer and never an error.

    Args:
        nvml: a module with pynvml's functions; pynvml itself when None.
        environ: where CUDA_VISIBLE_DEVICES is read; os.environ when None.
        root: above the /sys that knows the GPUs' NUMA nodes.
    """
    visible = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if nvml is None:
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return GpuReport(None, _why_no_driver(error), (), 0, visible, "")
    try:
        return _read(nvml, visible, root)
    except nvml.NVMLError as error:
        return GpuReport(None, f"the driver answers {error}", (), 0, visible, "")
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any, visible: str | None, root: Path) -> GpuReport:
    cuda = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
    driver = Driver(_text(nvml.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10))
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    gpus = [_gpu(nvml, index, handle, root) for index, handle in enumerate(handles)]
    slices: list[tuple[Gpu, MigName]] = []
    for gpu, handle in zip(gpus, handles, strict=True):
        slices.extend(_slices(nvml, gpu, handle))
    selection = select(visible, [gpu.uuid for gpu in gpus], [(part.uuid, old) for part, old in slices])
    known = gpus + [part for part, _ in slices]
    in_mig_mode = {gpu.index for gpu, handle in zip(gpus, handles, strict=True) if _mig_enabled(nvml, handle)}
    chosen, problem = _as_cuda_runs(
        [known[position] for position in selection.positions], [part for part, _ in slices], in_mig_mode
    )
    return GpuReport(driver, "", chosen, len(gpus), visible, selection.problem or problem)


def _as_cuda_runs(chosen: list[Gpu], slices: list[Gpu], in_mig_mode: set[int]) -> tuple[tuple[Gpu, ...], str]:
    """A GPU in MIG mode is used through its first slice only, and a process uses one slice."""
    usable: list[Gpu] = []
    for gpu in chosen:
        if not gpu.is_mig_slice and gpu.index in in_mig_mode:
            first = next((part for part in slices if part.index == gpu.index), None)
            if first is None:
                return tuple(usable), f"GPU {gpu.index} is in MIG mode and has no slice"
            gpu = first
        usable.append(gpu)
    if len(usable) > 1 and any(gpu.is_mig_slice for gpu in usable):
        whole = tuple(gpu for gpu in usable if not gpu.is_mig_slice)
        return whole or tuple(usable[:1]), "a process uses one MIG slice, and none beside whole GPUs"
    return tuple(usable), ""


def _gpu(nvml: Any, index: int, handle: Any, root: Path) -> Gpu:
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    return Gpu(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total) if memory is not None else None,
        free_bytes=int(memory.free) if memory is not None else None,
        compute_capability=(int(capability[0]), int(capability[1])) if capability is not None else None,
        pcie_gen=_ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_width=_ask(nvml, nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        pcie_max_width=_ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        numa_node=_numa_node(_ask(nvml, nvml.nvmlDeviceGetPciInfo, handle), root),
    )


def _slices(nvml: Any, gpu: Gpu, handle: Any) -> list[tuple[Gpu, MigName]]:
    if not _mig_enabled(nvml, handle):
        return []
    found: list[tuple[Gpu, MigName]] = []
    for index in range(_ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError:
            # Slices are numbered with gaps.
            continue
        memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, part)
        old_name = MigName(
            gpu.uuid,
            int(nvml.nvmlDeviceGetGpuInstanceId(part)),
            int(nvml.nvmlDeviceGetComputeInstanceId(part)),
        )
        slice_ = replace(
            gpu,
            uuid=_text(nvml.nvmlDeviceGetUUID(part)),
            name=_text(nvml.nvmlDeviceGetName(part)),
            memory_bytes=int(memory.total) if memory is not None else None,
            free_bytes=int(memory.free) if memory is not None else None,
            is_mig_slice=True,
        )
        found.append((slice_, old_name))
    return found


def _mig_enabled(nvml: Any, handle: Any) -> bool:
    mode = _ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
    return mode is not None and mode[0] == 1


def _numa_node(pci: Any, root: Path) -> int | None:
    if pci is None:
        return None
    # The driver writes a domain of eight digits, sysfs of four.
    domain, _, rest = _text(pci.busId).lower().partition(":")
    try:
        node = int((root / f"sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _ask(nvml: Any, function: Callable[[Any], Any], handle: Any) -> Any:
    """None where this GPU or driver does not answer that question."""
    try:
        return function(handle)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _why_no_driver(error: Any) -> str:
    match getattr(error, "value", None):
        case 12:
            return "no NVIDIA driver library (libnvidia-ml.so.1) is installed here"
        case 9:
            return "the NVIDIA driver is installed but not loaded"
        case 18:
            return "the NVIDIA driver library and the loaded kernel module have different versions"
        case _:
            return f"the NVIDIA driver answers {error}"
