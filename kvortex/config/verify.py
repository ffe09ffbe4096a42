"""Whether blocks can be verified here: `kv_cache.verify` needs a package that nothing else does."""

from __future__ import annotations

from importlib import metadata
from typing import Final

from kvortex.errors import UnfitError

PACKAGE: Final = "xxhash"
_LEAST_MAJOR: Final = 4
"""From then on it lets go of the interpreter lock while it reads a block."""


def check_can_verify() -> None:
    """
    Raises:
        UnfitError: the package is missing, or too old.
    """
    hint = f"pip install '{PACKAGE}>={_LEAST_MAJOR}', or kvortex-vllm[verify]"
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        raise UnfitError(f"the Python package {PACKAGE} verifies blocks, and is not installed", hint=hint) from None
    if int(version.split(".")[0]) < _LEAST_MAJOR:
        raise UnfitError(f"{PACKAGE} {version} is installed; only newer ones verify blocks", hint=hint)
