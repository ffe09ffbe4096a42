"""CUDA_VISIBLE_DEVICES by CUDA's rule, and GPUs as a made-up driver library tells of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvortex.hardware.gpu import GpuReport, read_gpus

GB = 10**9
A = "GPU-aaaa1111-2222-3333-4444-555566667777"
B = "GPU-aaab1111-2222-3333-4444-555566667777"
SLICE_0 = "MIG-c0c0c0c0-0000-0000-0000-000000000000"
SLICE_1 = "MIG-c0c1c0c0-0000-0000-0000-000000000001"


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclass
class FakeDevice:
    uuid: str
    name: str = "NVIDIA H200"
    total: int = 141 * GB
    bus: str = "00000000:17:00.0"
    slices: list[FakeDevice] = field(default_factory=list)
    instance: int = 0


class FakeNvml:
    """The part of pynvml that is used; `unknown` names questions this driver does not answer."""

    NVMLError = NVMLError

    def __init__(self, *devices: FakeDevice, init_error: int = 0, unknown: tuple[str, ...] = ()) -> None:
        self.devices = devices
        self.init_error = init_error
        self.open = 0
        for name in unknown:
            setattr(self, name, self._refuse)

    def _refuse(self, *_: Any) -> Any:
        raise NVMLError(3)

    def nvmlInit(self) -> None:
        if self.init_error:
            raise NVMLError(self.init_error)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.86.15"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12080

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeDevice:
        return self.devices[index]

    def nvmlDeviceGetUUID(self, device: FakeDevice) -> str:
        return device.uuid

    def nvmlDeviceGetName(self, device: FakeDevice) -> str:
        return device.name

    def nvmlDeviceGetMemoryInfo(self, device: FakeDevice) -> Any:
        return SimpleNamespace(total=device.total, free=device.total - GB)

    def nvmlDeviceGetCudaComputeCapability(self, device: FakeDevice) -> tuple[int, int]:
        return (9, 0)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, device: FakeDevice) -> int:
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, device: FakeDevice) -> int:
        return 16

    nvmlDeviceGetMaxPcieLinkWidth = nvmlDeviceGetCurrPcieLinkWidth

    def nvmlDeviceGetPciInfo(self, device: FakeDevice) -> Any:
        return SimpleNamespace(busId=device.bus)

    def nvmlDeviceGetMigMode(self, device: FakeDevice) -> tuple[int, int]:
        if not device.slices:
            raise NVMLError(3)
        return (1, 1)

    def nvmlDeviceGetMaxMigDeviceCount(self, device: FakeDevice) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: FakeDevice, index: int) -> FakeDevice:
        # Numbered with gaps, as they are after one was destroyed.
        if index % 2 or index // 2 >= len(device.slices):
            raise NVMLError(6)
        return device.slices[index // 2]

    def nvmlDeviceGetGpuInstanceId(self, device: FakeDevice) -> int:
        return device.instance

    def nvmlDeviceGetComputeInstanceId(self, device: FakeDevice) -> int:
        return 0


def two_gpus() -> FakeNvml:
    return FakeNvml(FakeDevice(A), FakeDevice(B, bus="00000000:65:00.0"))


def with_slices() -> FakeNvml:
    slices = [
        FakeDevice(SLICE_0, name="NVIDIA H200 MIG 1g.18gb", total=16 * GB, instance=7),
        FakeDevice(SLICE_1, name="NVIDIA H200 MIG 1g.18gb", total=16 * GB, instance=9),
    ]
    return FakeNvml(FakeDevice(A, slices=slices), FakeDevice(B))


def read(nvml: FakeNvml, visible: str | None = None, root: Path = Path("/nowhere")) -> GpuReport:
    report = read_gpus(nvml, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, root)
    assert nvml.open == 0, "the library was left open"
    return report


@pytest.mark.parametrize(
    ("visible", "seen", "problem"),
    [
        (None, [A, B], ""),
        ("0", [A], ""),
        ("1,0", [B, A], ""),
        ("0,", [A], ""),
        ("", [], ""),
        ("-1", [], ""),
        (" 0", [A], ""),
        ("0,-1,1", [A], "-1 ends the list"),
        ("0,0", [], "named twice"),
        ("99", [], "no GPU 99"),
        ("1,99,0", [B], "no GPU 99"),
        ("abc", [], "'abc' is no index"),
        ("0,,1", [A], "'' is no index"),
        ("1gpu", [B], ""),
        (A, [A], ""),
        (f"{B},{A}", [B, A], ""),
        ("GPU-aaaa", [A], ""),
        ("GPU-aaa", [], "fits 2 devices"),
        ("GPU-ffff", [], "no device"),
        (f"{A},1", [A], "does not start with GPU-"),
        (f"{A},{A}", [], "named twice"),
        (f"0,{B}", [A], "is no index"),
        ("MIG-none", [], "no device"),
    ],
)
def test_visible_devices_follow_cuda_s_rule(visible: str | None, seen: list[str], problem: str) -> None:
    report = read(two_gpus(), visible)
    assert [gpu.uuid for gpu in report.gpus] == seen
    assert report.present == 2
    assert problem in report.selection_problem
    assert bool(problem) == bool(report.selection_problem)


@pytest.mark.parametrize("visible", [SLICE_1, "MIG-c0c1", f"MIG-{A}/9/0"])
def test_a_slice_is_shown_with_its_own_memory_not_its_gpu_s(visible: str) -> None:
    (gpu,) = read(with_slices(), visible).gpus
    assert (gpu.uuid, gpu.memory_bytes, gpu.is_mig_slice, gpu.index) == (SLICE_1, 16 * GB, True, 0)


def test_a_gpu_in_mig_mode_is_used_through_its_first_slice() -> None:
    (gpu,) = read(with_slices(), "0").gpus
    assert gpu.uuid == SLICE_0


def test_a_second_slice_is_not_counted_on() -> None:
    report = read(with_slices(), f"{SLICE_0},{SLICE_1}")
    assert [gpu.uuid for gpu in report.gpus] == [SLICE_0]
    assert "one MIG slice" in report.selection_problem


def test_what_the_driver_tells_of_a_gpu(tmp_path: Path) -> None:
    node = tmp_path / "sys/bus/pci/devices/0000:17:00.0/numa_node"
    node.parent.mkdir(parents=True)
    node.write_text("1\n")
    report = read(two_gpus(), root=tmp_path)
    first, second = report.gpus
    assert (first.name, first.memory_bytes, first.compute_capability) == ("NVIDIA H200", 141 * GB, (9, 0))
    assert (first.pcie_gen, first.pcie_width, first.numa_node, second.numa_node) == (5, 16, 1, None)
    assert report.driver is not None
    assert (report.driver.version, report.driver.cuda) == ("570.86.15", (12, 8))


def test_a_numa_node_of_minus_one_is_unknown(tmp_path: Path) -> None:
    node = tmp_path / "sys/bus/pci/devices/0000:17:00.0/numa_node"
    node.parent.mkdir(parents=True)
    node.write_text("-1\n")
    assert read(two_gpus(), root=tmp_path).gpus[0].numa_node is None


def test_what_the_driver_does_not_answer_is_none_and_no_error() -> None:
    nvml = FakeNvml(
        FakeDevice(A),
        unknown=("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetPciInfo"),
    )
    (gpu,) = read(nvml).gpus
    assert (gpu.memory_bytes, gpu.pcie_gen, gpu.numa_node) == (None, None, None)


@pytest.mark.parametrize(("code", "why"), [(12, "libnvidia-ml"), (9, "not loaded"), (18, "different versions")])
def test_no_driver_is_an_answer_with_its_reason(code: int, why: str) -> None:
    report = read(FakeNvml(FakeDevice(A), init_error=code))
    assert report.driver is None
    assert report.gpus == ()
    assert why in report.no_driver


def test_a_driver_that_fails_half_way_is_an_answer() -> None:
    report = read(FakeNvml(FakeDevice(A), unknown=("nvmlDeviceGetCount",)))
    assert report.driver is None
    assert "NVML error 3" in report.no_driver


def test_this_machine_answers_whatever_it_has() -> None:
    report = read_gpus(environ={})
    assert (report.driver is None) == bool(report.no_driver)
