"""What this machine is: the RAM this process may use, GPUs, PCIe, NUMA, and whether memory can be pinned."""

from kvortex.hardware.gpu import Driver, Gpu, GpuReport, read_gpus
from kvortex.hardware.host import Host, read_host
from kvortex.hardware.memory import Ram, read_ram, usable_ram_bytes

__all__ = [
    "Driver",
    "Gpu",
    "GpuReport",
    "Host",
    "Ram",
    "read_gpus",
    "read_host",
    "read_ram",
    "usable_ram_bytes",
]
