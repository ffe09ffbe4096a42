"""Everything `kvortex doctor` knows of this machine, and the findings that follow from it alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvortex.config.machine import MachineFacts
from kvortex.config.vllm_install import VllmInstall, installed_vllm
from kvortex.errors import UnfitError
from kvortex.hardware.gpu import GpuReport, read_gpus
from kvortex.hardware.host import BindAttempt, Host, read_host, try_numa_binding
from kvortex.hardware.memory import (
    LockLimit,
    Ram,
    SharedMemory,
    read_lock_limit,
    read_ram,
    read_shared_memory,
)
from kvortex.hardware.pinning import PinReport, sizes_to_try, try_pinning
from kvortex_cli.checks import gpu, host, software
from kvortex_cli.checks.finding import Finding
from kvortex_cli.checks.software import Torch


@dataclass(frozen=True, slots=True)
class Facts:
    """
    Attributes:
        vllm_conflict: what is wrong with there being two vLLMs; None when there are not.
        pins: None where pinning was not tried: without a GPU.
        binding: None where it was not tried: with one NUMA node.
    """

    environ: Mapping[str, str]
    host: Host
    ram: Ram
    shared_memory: SharedMemory | None
    lock_limit: LockLimit
    gpus: GpuReport
    torch: Torch | None
    vllm: VllmInstall | None
    vllm_conflict: UnfitError | None = None
    pins: PinReport | None = None
    binding: BindAttempt | None = None

    @property
    def for_config(self) -> MachineFacts:
        """What the configuration's own checks ask of the machine."""
        counted = self.gpus.gpus and not (self.vllm is not None and self.vllm.is_cpu_build)
        return MachineFacts(self.ram.usable_bytes, len(self.gpus.gpus) if counted else None)


def gather(environ: Mapping[str, str]) -> Facts:
    """Reads what can be read at once; tries nothing."""
    install, conflict = None, None
    try:
        install = installed_vllm()
    except UnfitError as error:
        conflict = error
    return Facts(
        environ=environ,
        host=read_host(environ=environ),
        ram=read_ram(),
        shared_memory=read_shared_memory(),
        lock_limit=read_lock_limit(),
        gpus=read_gpus(environ=environ),
        torch=software.installed_torch(),
        vllm=install,
        vllm_conflict=conflict,
    )


def try_out(facts: Facts) -> Facts:
    """Adds the attempts: pinning and copies where there is a GPU, binding where there are NUMA nodes."""
    pins, binding = None, None
    if facts.gpus.gpus:
        sizes = sizes_to_try(facts.ram.usable_bytes, is_wsl2=facts.host.is_wsl2)
        pins = try_pinning(sizes, len(facts.gpus.gpus))
    if len(facts.host.numa_nodes) > 1 and facts.host.allowed_nodes:
        binding = try_numa_binding(facts.host.allowed_nodes[0])
    return replace(facts, pins=pins, binding=binding)


def machine_findings(facts: Facts, *, ram_cache_bytes: int | None, uses_cumem: bool) -> list[Finding]:
    """What follows from the facts.

    Args:
        ram_cache_bytes: the configured `ram_cache_size`; None without a configuration.
        uses_cumem: the configuration turns vLLM's cumem allocator on.
    """
    report, pins, has_gpu = facts.gpus, facts.pins, bool(facts.gpus.gpus)
    needs_gpu = facts.vllm is not None and not facts.vllm.is_cpu_build
    return [
        host.check_python(),
        host.check_os(facts.host),
        *host.check_wsl2(facts.host, pins),
        *gpu.check_gpus(report, facts.host, needs_gpu=needs_gpu),
        *gpu.check_device_order(report, facts.environ),
        *gpu.check_driver(report, facts.torch, pins),
        software.check_torch(facts.torch, has_gpu=has_gpu),
        software.check_vllm(facts.vllm, facts.vllm_conflict, has_gpu=has_gpu),
        software.check_allocator(facts.environ, uses_cumem=uses_cumem),
        host.check_ram(facts.ram),
        gpu.check_pinning(report, pins, facts.lock_limit, ram_cache_bytes),
        host.check_lock_limit(facts.lock_limit, pins),
        host.check_shared_memory(facts.shared_memory),
        host.check_numa(facts.host, report.gpus, facts.binding),
        *gpu.check_copies(report, pins),
    ]
