"""How copies are issued on the card at hand: measured once, then read from a file of the user's cache."""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvortex.messages import Direction

if TYPE_CHECKING:
    from kvortex.transfer.cuda_driver import CudaDriver
    from kvortex.transfer.link_probe import LinkProbe

logger = logging.getLogger(__name__)

_FORMAT: Final = 1
_MIB: Final = 1 << 20

LOAD_BATCH_S: Final = 150e-6
"""How long a batch to the GPU may keep the model's own copies waiting. A step of ten input copies in 14 ms, on an
H200: 8 MB (this long) slows it by 4 to 8 %, 16 MB by 13 to 17 %, and 4 MB gains nothing but costs bandwidth."""

STORE_BATCH_S: Final = 300e-6
"""The same from the GPU, where a step has one copy to wait with: 16 MB slows it by 8 to 11 %, 64 MB by 15 %."""

LARGEST_PROBED_FRAGMENT: Final = 256 << 10
"""From here on a kernel is never the faster way: one fragment is longer than the copy engine's pause."""

_CTAS: Final = (2, 4, 8)
_KERNEL_MUST_GAIN: Final = 1.25
"""The kernel takes multiprocessors from the model, the copy engine does not: it must be worth it."""

_ENOUGH: Final = 0.95


@dataclass(frozen=True, slots=True)
class TransferTuning:
    """
    Attributes:
        load_bandwidth: bytes a second of one large copy to the GPU.
        store_bandwidth: the same from it.
        kernel_ctas: for fragments of some bytes, how many thread blocks load them; 0 is the copy engine. What is
            not named is the copy engine's.
    """

    load_bandwidth: float
    store_bandwidth: float
    kernel_ctas: Mapping[int, int] = field(default_factory=dict)

    @property
    def load_batch_bytes(self) -> int:
        """Bytes to the GPU between two pauses."""
        return max(_MIB, round(self.load_bandwidth * LOAD_BATCH_S) // _MIB * _MIB)

    @property
    def store_batch_bytes(self) -> int:
        """Bytes from the GPU between two pauses."""
        return max(_MIB, round(self.store_bandwidth * STORE_BATCH_S) // _MIB * _MIB)


UNMEASURED: Final = TransferTuning(load_bandwidth=25e9, store_bandwidth=25e9)
"""Where there is no memory to measure with: small batches, right on any card and fast on none."""


def tune(driver: CudaDriver, fragment_sizes: Iterable[int], directory: Path | None = None) -> TransferTuning:
    """The tuning of this GPU for a layout's fragments; measures what the cache does not have, some 0.1 s a size.

    A GPU without memory to spare, a broken or foreign file and a directory that cannot be written are no
    errors: it is measured again, or next time.

    Args:
        fragment_sizes: bytes.
        directory: of the cached file; `$XDG_CACHE_HOME/kvortex` when None.
    """
    path = (default_directory() if directory is None else directory) / file_name(driver.gpu_uuid, driver_version())
    known = read(path)
    missing = sorted(
        {size for size in fragment_sizes if size < LARGEST_PROBED_FRAGMENT}
        - set({} if known is None else known.kernel_ctas)
    )
    if known is not None and not missing:
        return known
    from kvortex.transfer.link_probe import LinkProbe

    try:
        with LinkProbe(driver) as probe:
            tuning = _measured(probe, driver, known, missing)
    except Exception as error:  # noqa: BLE001 - a kernel's compiler may raise anything, and copies go without it
        logger.warning("copies to and from the GPU are not tuned: %s: %s", type(error).__name__, error)
        return known or UNMEASURED
    logger.info(
        "measured: %.1f GB/s to the GPU, %.1f GB/s from it; kernel thread blocks by fragment size: %s",
        tuning.load_bandwidth / 1e9,
        tuning.store_bandwidth / 1e9,
        dict(tuning.kernel_ctas),
    )
    write(path, tuning)
    return tuning


def _measured(
    probe: LinkProbe, driver: CudaDriver, known: TransferTuning | None, sizes: Iterable[int]
) -> TransferTuning:
    tuning = known or TransferTuning(probe.bandwidth(Direction.LOAD), probe.bandwidth(Direction.STORE))
    ctas = {size: _best_ctas(probe, size) if driver.reads_host_pointers else 0 for size in sizes}
    return replace(tuning, kernel_ctas={**tuning.kernel_ctas, **ctas})


def _best_ctas(probe: LinkProbe, fragment_bytes: int) -> int:
    """The fewest thread blocks that come near the best, or 0 where the copy engine is about as fast."""
    from kvortex.transfer.addresses import Row

    try:
        from kvortex.transfer.gather import is_aligned
    except ImportError:
        return 0
    if not is_aligned([Row(0, fragment_bytes, fragment_bytes, 0)], 0, fragment_bytes):
        return 0
    rates = {num_ctas: probe.gather_rate(fragment_bytes, num_ctas) for num_ctas in _CTAS}
    best = max(rates.values())
    if best < _KERNEL_MUST_GAIN * probe.copy_rate(fragment_bytes):
        return 0
    return min(num_ctas for num_ctas, rate in rates.items() if rate >= _ENOUGH * best)


def default_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    # As the XDG specification says, a relative path counts as unset.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "kvortex"


def file_name(gpu_uuid: str, version: str) -> str:
    """Of the cached file, in its directory whatever the driver says."""
    return re.sub(r"[^\w.-]", "_", f"tuning-{gpu_uuid}-{version}.json")


def driver_version() -> str:
    """The NVIDIA driver's, such as 580.159.04; "unknown" where NVML does not answer."""
    from kvortex.hardware import read_gpus

    driver = read_gpus().driver
    return driver.version if driver is not None else "unknown"


def read(path: Path) -> TransferTuning | None:
    """What was measured before; None where there is nothing, or nothing of ours that makes sense."""
    try:
        with path.open(encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return None
            return _parsed(json.load(file))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None


def _parsed(document: Any) -> TransferTuning:
    if document["format"] != _FORMAT:
        raise ValueError(document["format"])
    tuning = TransferTuning(
        load_bandwidth=float(document["load_bandwidth"]),
        store_bandwidth=float(document["store_bandwidth"]),
        kernel_ctas={int(size): int(ctas) for size, ctas in document["kernel_ctas"].items()},
    )
    bandwidths = (tuning.load_bandwidth, tuning.store_bandwidth)
    if not all(1e8 <= bandwidth <= 1e13 for bandwidth in bandwidths):
        raise ValueError(bandwidths)
    if not all(ctas in (0, *_CTAS) for ctas in tuning.kernel_ctas.values()):
        raise ValueError(tuning.kernel_ctas)
    return tuning


def write(path: Path, tuning: TransferTuning) -> None:
    """Replaces the file in one step, for this user alone. Where that fails, it is measured again next time."""
    document = {"format": _FORMAT, **asdict(tuning)}
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # mkstemp's files are 0600.
        number, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)
        try:
            with os.fdopen(number, "w", encoding="utf-8") as file:
                json.dump(document, file, indent=1)
            Path(temporary).replace(path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        logger.info("the tuning of this GPU is not kept: %s", error)
