"""What copies reach on this machine, alone and beside a model, and what they cost the model. Needs a GPU."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import torch

from kvortex import __version__
from kvortex.errors import UnfitError
from kvortex.messages import Direction
from kvortex.transfer.base import KVLayout
from kvortex.transfer.bench_flow import DEADLINE_S, Beside, Flow
from kvortex.transfer.cuda import CudaCopyEngine
from kvortex.transfer.cuda_driver import CudaDriver
from kvortex.transfer.link_probe import LinkProbe
from kvortex.transfer.model_step import ModelStep
from kvortex.transfer.pinned import PinnedSlab
from kvortex.transfer.tuning import TransferTuning, driver_version, tune

_NUM_ROWS: Final = 16
_MAX_FRAGMENTS: Final = 1 << 18
"""Of one fragment size: small ones take as long each as large ones."""

_NUM_STREAMS: Final = 4
_DEFAULT_CTAS: Final = 4
_PIN_TIMEOUT_S: Final = 120.0

_DIRECTIONS: Final = ((Direction.LOAD,), (Direction.STORE,), (Direction.LOAD, Direction.STORE))

BOTH: Final = "both"
COPY_ENGINE: Final = "copy engine"
KERNEL: Final = "kernel"
WHOLE: Final = "one large copy"


@dataclass(frozen=True, slots=True)
class Setting:
    """What a result was measured on."""

    gpu: str
    driver: str
    cuda: str
    torch: str
    triton: str
    kvortex: str
    host: str


@dataclass(frozen=True, slots=True)
class CopyResult:
    """
    Attributes:
        direction: load, store or both at once.
        fragment_bytes: contiguous bytes on the GPU; 0 for one large copy.
        method: how fragments are loaded; stores are always the copy engine's.
        is_chosen: whether this card's tuning takes that method.
        bandwidth: bytes a second while nothing else runs; of both directions together.
        beside: None where it was not measured.
    """

    direction: str
    fragment_bytes: int
    method: str
    is_chosen: bool
    bandwidth: float
    beside: Beside | None


@dataclass(frozen=True, slots=True)
class TransferReport:
    """All results, the measured peaks of one large copy first."""

    setting: Setting
    step_s: float
    results: tuple[CopyResult, ...]

    def share(self, result: CopyResult, bandwidth: float) -> float:
        """Of the peak that this machine reaches in the result's direction."""
        peak = next(r for r in self.results if r.method == WHOLE and r.direction == result.direction)
        return bandwidth / peak.bandwidth


def bench_transfer(num_bytes: int, fragment_sizes: Sequence[int], tell: Callable[[str], None]) -> TransferReport:
    """Measures on the GPU that is torch's current one.

    Args:
        num_bytes: of VRAM and of host RAM, each, to copy between.
        fragment_sizes: bytes.
        tell: is told what is being measured.

    Raises:
        UnfitError: there is no GPU that torch can use, or it is too full.
    """
    if not torch.cuda.is_available():
        raise UnfitError(
            "there is no NVIDIA GPU that torch can use here", hint="run `kvortex doctor`; it tells what is missing"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        return _bench(device, num_bytes, fragment_sizes, tell)
    except torch.OutOfMemoryError as error:
        hint = "free the GPU, or copy less at a time with --size"
        raise UnfitError(f"the GPU is too full to measure on: {error}", hint=hint) from error


def _bench(
    device: torch.device, num_bytes: int, fragment_sizes: Sequence[int], tell: Callable[[str], None]
) -> TransferReport:
    driver = CudaDriver(device.index)
    tell("tuning")
    tuning = tune(driver, fragment_sizes)
    step = ModelStep(device)
    for _ in range(5):
        step.run(lambda: None)
    step_s = statistics.median(step.run(lambda: None) for _ in range(9))
    tell(WHOLE)
    results = _peaks(driver)
    for fragment_bytes in fragment_sizes:
        for method, chosen, forced in _methods(fragment_bytes, tuning):
            tell(f"{fragment_bytes:,} bytes a fragment, {method}")
            with _flow(driver, device, num_bytes, fragment_bytes, forced) as flow:
                for directions in _DIRECTIONS:
                    if method == KERNEL and directions == (Direction.STORE,):
                        continue
                    alone = flow.alone(directions)
                    beside = flow.beside(directions, step, step_s, alone)
                    results.append(CopyResult(_name(directions), fragment_bytes, method, chosen, alone, beside))
                    tell(_in_words(results[-1]))
    return TransferReport(_setting(device), step_s, tuple(results))


def _peaks(driver: CudaDriver) -> list[CopyResult]:
    with LinkProbe(driver) as probe:
        return [
            CopyResult(_name(directions), 0, WHOLE, False, probe.bandwidth(*directions), None)
            for directions in _DIRECTIONS
        ]


def _name(directions: Sequence[Direction]) -> str:
    return directions[0].value if len(directions) == 1 else BOTH


def _in_words(result: CopyResult) -> str:
    words = f"  {result.direction}: {result.bandwidth / 1e9:.1f} GB/s"
    if result.beside is not None:
        words += f", {result.beside.bandwidth / 1e9:.1f} GB/s beside a model, whose step takes "
        words += f"{result.beside.mean_step:.2f} times as long (worst {result.beside.worst_step:.2f})"
    return words


def _methods(fragment_bytes: int, tuning: TransferTuning) -> Iterator[tuple[str, bool, TransferTuning]]:
    """(name, whether it is this card's, the tuning that has it)."""
    ctas = tuning.kernel_ctas.get(fragment_bytes, 0)
    yield COPY_ENGINE, ctas == 0, replace(tuning, kernel_ctas={})
    # Where the tuning did not even try the kernel, it cannot copy this size or is far from worth it.
    if fragment_bytes in tuning.kernel_ctas and fragment_bytes % 16 == 0 and _triton_version() != "none":
        yield KERNEL, ctas > 0, replace(tuning, kernel_ctas={fragment_bytes: ctas or _DEFAULT_CTAS})


@contextmanager
def _flow(
    driver: CudaDriver, device: torch.device, num_bytes: int, fragment_bytes: int, tuning: TransferTuning
) -> Iterator[Flow]:
    """A flow over KV in fragments of one size, by an engine of its own."""
    num_blocks = max(2, min(num_bytes, _MAX_FRAGMENTS * fragment_bytes) // (fragment_bytes * _NUM_ROWS))
    layout = KVLayout(tuple(torch.zeros(_NUM_ROWS, num_blocks, fragment_bytes, dtype=torch.uint8, device=device)))
    slab = PinnedSlab(num_blocks, layout.block_bytes, driver)
    try:
        if not slab.wait_pinned(_PIN_TIMEOUT_S):
            raise UnfitError(f"host memory cannot be pinned: {slab.refusal}", hint="run `kvortex doctor`")
        engine = CudaCopyEngine(layout, slab, _NUM_STREAMS, driver, tuning)
        try:
            yield Flow(engine, num_blocks, layout.block_bytes)
        finally:
            engine.close(DEADLINE_S)
    finally:
        slab.close()


def _setting(device: torch.device) -> Setting:
    return Setting(
        gpu=torch.cuda.get_device_name(device),
        driver=driver_version(),
        cuda=str(torch.version.cuda),
        torch=torch.__version__,
        triton=_triton_version(),
        kvortex=__version__,
        host=f"{platform.system()} {platform.release()} {platform.machine()}",
    )


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)
