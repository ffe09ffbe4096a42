"""What the configuration needs to know of the machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What this process may use.

    Attributes:
        usable_ram_bytes: RAM, after cgroup limits.
        gpu_count: GPUs that CUDA shows it; None where vLLM's CPU build makes that meaningless.
    """

    usable_ram_bytes: int
    gpu_count: int | None = None


def this_machine(*, with_gpus: bool) -> MachineFacts:
    """This process's facts, now.

    Args:
        with_gpus: False on vLLM's CPU build, which uses none.
    """
    from kvortex.hardware import read_gpus, usable_ram_bytes

    return MachineFacts(usable_ram_bytes(), len(read_gpus().gpus) if with_gpus else None)
