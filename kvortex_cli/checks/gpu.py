"""Checks of the GPUs: which are visible, the driver, pinned memory and copies to and from them."""

from __future__ import annotations

from collections.abc import Mapping

from kvortex.hardware.gpu import Gpu, GpuReport
from kvortex.hardware.host import Host
from kvortex.hardware.memory import LockLimit
from kvortex.hardware.pinning import CopySpeed, PinReport
from kvortex.sizes import format_bytes
from kvortex_cli.checks.finding import Finding, fail, ok, warn
from kvortex_cli.checks.host import RAISE_MEMLOCK
from kvortex_cli.checks.software import Torch

OLDEST_CAPABILITY = (7, 0)
OLDEST_CUDA = (12, 0)
_BYTES_PER_SECOND_AND_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
# A link that is well used reaches about 0.87 of its raw rate; below half of it something is in the way.
_LEAST_SHARE_OF_LINK = 0.5
_PASS_GPUS = "in a container: start it with the NVIDIA container toolkit and docker --gpus all"
_CUDA_ERRORS = {
    100: ("CUDA finds no GPU it may use", "see CUDA_VISIBLE_DEVICES, and the container's device permissions"),
    802: ("the NVSwitch fabric is not ready", "start nvidia-fabricmanager, of the driver's own version"),
    803: (
        "the driver library and the loaded kernel module differ",
        "use the host driver's libcuda in the container, or reboot after a driver update",
    ),
    804: (
        "a compat libcuda was loaded, which works on data-centre cards only",
        "take the cuda compat directory out of LD_LIBRARY_PATH and ld.so.conf.d, or update the driver",
    ),
    999: ("the driver is in a bad state", "see dmesg for NVRM and Xid lines; reload the driver or reboot"),
}


def check_gpus(report: GpuReport, host: Host, *, needs_gpu: bool) -> list[Finding]:
    """One finding a visible GPU; without any, one that says why.

    Args:
        needs_gpu: the vLLM installed does not run without one.
    """
    if not report.gpus:
        return [_no_gpu(report, host, needs_gpu=needs_gpu)]
    findings = [_check_gpu(gpu) for gpu in report.gpus]
    if report.selection_problem:
        shown = f"CUDA_VISIBLE_DEVICES={report.visible_devices!r}: {report.selection_problem}"
        fix = f"CUDA uses {_count(len(report.gpus))} and ignores the rest: name each by its index or uuid"
        findings.append(warn("visible devices", shown, fix))
    return findings


def _no_gpu(report: GpuReport, host: Host, *, needs_gpu: bool) -> Finding:
    if report.driver is None and host.nvidia_pci:
        shown = f"an NVIDIA GPU is at {', '.join(host.nvidia_pci)}, but {report.no_driver}"
        return fail("gpu", shown, f"install and load the NVIDIA driver; {_PASS_GPUS}")
    if report.present:
        why = report.selection_problem or "it hides all of them"
        shown = f"{_count(report.present)} present, none visible: CUDA_VISIBLE_DEVICES={report.visible_devices!r}"
        shown, fix = f"{shown}: {why}", "unset CUDA_VISIBLE_DEVICES, or name the GPUs to use"
    else:
        shown = report.no_driver or "the driver knows no GPU"
        fix = f"with vLLM's CPU build everything runs, for trying out; {_PASS_GPUS}"
    if needs_gpu:
        return fail("gpu", f"no GPU for the CUDA build of vLLM that is installed: {shown}", fix)
    return warn("gpu", f"no GPU: {shown}", fix)


def _check_gpu(gpu: Gpu) -> Finding:
    capability = f"{gpu.compute_capability[0]}.{gpu.compute_capability[1]}" if gpu.compute_capability else "unknown"
    memory = format_bytes(gpu.memory_bytes) if gpu.memory_bytes is not None else "memory unknown"
    node = f"NUMA node {gpu.numa_node}" if gpu.numa_node is not None else "NUMA node unknown"
    shown = f"{gpu.name}, {memory}, compute capability {capability}, {_link(gpu)}, {node}"
    check = f"gpu {gpu.index}"
    if gpu.compute_capability is not None and gpu.compute_capability < OLDEST_CAPABILITY:
        oldest = ".".join(map(str, OLDEST_CAPABILITY))
        return fail(check, shown, f"KVortex and vLLM need compute capability {oldest} or newer (Volta)")
    if gpu.pcie_width and gpu.pcie_max_width and gpu.pcie_width < gpu.pcie_max_width:
        fix = f"the card has {gpu.pcie_max_width} PCIe lanes, {gpu.pcie_width} in use: try another slot"
        return warn(check, shown, fix)
    return ok(check, shown)


def check_device_order(report: GpuReport, environ: Mapping[str, str]) -> list[Finding]:
    """A finding where CUDA's numbers may mean other GPUs than the driver's: it puts the fastest first."""
    if len({gpu.name for gpu in report.gpus}) < 2 or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return []
    by_uuid = (report.visible_devices or "").startswith(("GPU-", "MIG-"))
    if by_uuid:
        return []
    shown = "the GPUs differ, and CUDA numbers them by speed"
    return [warn("device order", shown, "set CUDA_DEVICE_ORDER=PCI_BUS_ID, so that numbers mean what is shown here")]


def check_driver(report: GpuReport, torch: Torch | None, pins: PinReport | None) -> list[Finding]:
    """The driver, the CUDA it supports and the CUDA torch was built for; no finding without a driver."""
    if report.driver is None:
        return []
    cuda = report.driver.cuda
    shown = f"driver {report.driver.version}, up to CUDA {cuda[0]}.{cuda[1]}"
    if torch is not None and torch.cuda is not None:
        shown += f"; torch is built for CUDA {torch.cuda[0]}.{torch.cuda[1]}"
    if pins is not None and pins.cuda_error:
        cause, fix = _CUDA_ERRORS.get(pins.cuda_code, ("", "see that error in NVIDIA's list of CUDA errors"))
        shown += f"; CUDA does not start: {pins.cuda_error}"
        shown += f", {cause}" if cause else ""
        shown += f" (loaded {pins.library})" if pins.library else ""
        return [fail("driver", shown, fix)]
    if cuda < OLDEST_CUDA:
        return [fail("driver", shown, "CUDA 12 is needed: install driver 525 or newer on the host")]
    # A newer minor release of the same CUDA runs on an older driver.
    if torch is not None and torch.cuda is not None and torch.cuda[0] > cuda[0]:
        fix = f"install a driver for CUDA {torch.cuda[0]} on the host, or a vLLM built for CUDA {cuda[0]}"
        return [fail("driver", shown, fix)]
    return [ok("driver", shown)]


def check_pinning(report: GpuReport, pins: PinReport | None, limit: LockLimit, wanted_bytes: int | None) -> Finding:
    """The verdict of the real attempt.

    Args:
        wanted_bytes: the configured `ram_cache_size`; None without a configuration.
    """
    asked = f"; ram_cache_size is {format_bytes(wanted_bytes)}" if wanted_bytes is not None else ""
    if pins is None:
        fix = "run this where the GPU is; without one, nothing is pinned and nothing is lost"
        return warn("pinning", f"cannot be tried without a GPU{asked}", fix)
    if not report.gpus or pins.cuda_error:
        return warn("pinning", f"not tried, CUDA does not start{asked}", "mend the driver first")
    failed = next((attempt for attempt in pins.attempts if attempt.error), None)
    if failed is None and pins.pinned_bytes:
        seconds = pins.attempts[-1].seconds
        return ok("pinning", f"{format_bytes(pins.pinned_bytes)} touched and pinned in {seconds:.2f} s{asked}")
    limited = limit.soft_bytes is not None and limit.soft_bytes <= (failed.num_bytes if failed else 0)
    fix = RAISE_MEMLOCK if limited else "free RAM, or raise the container's memory limit; on WSL2 use a smaller size"
    why = f"{format_bytes(failed.num_bytes)}: {failed.error}" if failed else f"the attempt {pins.ended}"
    if pins.pinned_bytes:
        return warn("pinning", f"{format_bytes(pins.pinned_bytes)} pinned, not {why}{asked}", fix)
    return fail("pinning", f"failed at {why}{asked}" if failed else f"{why}{asked}", fix)


def check_copies(report: GpuReport, pins: PinReport | None) -> list[Finding]:
    """One finding a GPU whose copies were tried."""
    if pins is None:
        return []
    return [_check_copy(report.gpus[copy.ordinal], copy) for copy in pins.copies if copy.ordinal < len(report.gpus)]


def _check_copy(gpu: Gpu, copy: CopySpeed) -> Finding:
    check = f"copies gpu {gpu.index}"
    if copy.error:
        return warn(check, f"not measured: {copy.error}", "free VRAM on this GPU and run it again")
    shown = f"to GPU {format_bytes(int(copy.to_gpu))}/s, from GPU {format_bytes(int(copy.from_gpu))}/s"
    link = _link_bytes_per_second(gpu)
    if link is None:
        return ok(check, shown)
    shown += f", of {format_bytes(int(link))}/s that {_link(gpu)} carries"
    if min(copy.to_gpu, copy.from_gpu) < _LEAST_SHARE_OF_LINK * link:
        fix = "try again with the machine at rest; then look at the GPU's NUMA node and PCIe slot"
        return warn(check, shown, fix)
    return ok(check, shown)


def _link_bytes_per_second(gpu: Gpu) -> float | None:
    lane = _BYTES_PER_SECOND_AND_LANE.get(gpu.pcie_gen or 0)
    return lane * gpu.pcie_width if lane is not None and gpu.pcie_width else None


def _link(gpu: Gpu) -> str:
    if not gpu.pcie_gen or not gpu.pcie_width:
        return "PCIe unknown"
    return f"PCIe gen{gpu.pcie_gen} x{gpu.pcie_width}"


def _count(number: int) -> str:
    return f"{number} GPU" + ("" if number == 1 else "s")
