"""What copies reach on this machine, alone and beside a model, and what they cost the model. Needs a GPU."""

from __future__ import annotations

import itertools
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from kvortex import __version__
from kvortex.errors import KVortexError, UnfitError
from kvortex.messages import CopyOrder, Direction, IntArray, JobId, Outcome
from kvortex.transfer.base import KVLayout
from kvortex.transfer.cuda import CudaCopyEngine
from kvortex.transfer.cuda_driver import CudaDriver
from kvortex.transfer.model_step import ModelStep
from kvortex.transfer.pinned import PinnedSlab
from kvortex.transfer.tuning import TransferTuning, driver_version, tune

_NUM_ROWS: Final = 16
_MAX_FRAGMENTS: Final = 1 << 18
"""Of one fragment size: small ones take as long each as large ones."""

_NUM_STREAMS: Final = 4
_ORDER_BYTES: Final = 64 << 20
_AHEAD_S: Final = 0.1
"""More than a step, so that there is always something to copy."""

_WARM_UP_STEPS: Final = 3
_STEPS: Final = 20
_MAX_S: Final = 2.0
"""Of one measurement, where copies are slow."""

_DEFAULT_CTAS: Final = 4
_DEADLINE_S: Final = 60.0
_POLL_S: Final = 0.0002

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
class Beside:
    """Copies while a model runs.

    Attributes:
        bandwidth: bytes a second.
        mean_step, worst_step: duration of a model's step meanwhile, over that of one alone.
    """

    bandwidth: float
    mean_step: float
    worst_step: float


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
    results: list[CopyResult] = []
    for fragment_bytes in (0, *fragment_sizes):
        for method, chosen, forced in _methods(fragment_bytes, tuning):
            tell(f"{fragment_bytes:,} bytes a fragment, {method}" if fragment_bytes else method)
            with _bench_engine(driver, device, num_bytes, fragment_bytes, forced) as copies:
                for directions in ((Direction.LOAD,), (Direction.STORE,), (Direction.LOAD, Direction.STORE)):
                    if method == KERNEL and directions == (Direction.STORE,):
                        continue
                    name = directions[0].value if len(directions) == 1 else BOTH
                    alone = copies.alone(directions)
                    beside = copies.beside(directions, step, step_s, alone) if fragment_bytes else None
                    results.append(CopyResult(name, fragment_bytes, method, chosen, alone, beside))
                    tell(_in_words(results[-1]))
    return TransferReport(_setting(device), step_s, tuple(results))


def _in_words(result: CopyResult) -> str:
    words = f"  {result.direction}: {result.bandwidth / 1e9:.1f} GB/s"
    if result.beside is not None:
        words += f", {result.beside.bandwidth / 1e9:.1f} GB/s beside a model, whose step takes "
        words += f"{result.beside.mean_step:.2f} times as long (worst {result.beside.worst_step:.2f})"
    return words


def _methods(fragment_bytes: int, tuning: TransferTuning) -> Iterator[tuple[str, bool, TransferTuning]]:
    """(name, whether it is this card's, the tuning that has it)."""
    if not fragment_bytes:
        yield WHOLE, False, replace(tuning, kernel_ctas={})
        return
    ctas = tuning.kernel_ctas.get(fragment_bytes, 0)
    yield COPY_ENGINE, ctas == 0, replace(tuning, kernel_ctas={})
    # Where the tuning did not even try the kernel, it cannot copy this size or is far from worth it.
    if fragment_bytes in tuning.kernel_ctas and fragment_bytes % 16 == 0 and _triton_version() != "none":
        yield KERNEL, ctas > 0, replace(tuning, kernel_ctas={fragment_bytes: ctas or _DEFAULT_CTAS})


class _Copies:
    """An engine with blocks to load and others to store, over and over."""

    def __init__(self, engine: CudaCopyEngine, num_blocks: int, block_bytes: int) -> None:
        self._engine = engine
        self._block_bytes = block_bytes
        rng = np.random.default_rng(0)
        blocks, slots = rng.permutation(num_blocks), rng.permutation(num_blocks)
        half = num_blocks // 2
        # Both at once touch different blocks and slots.
        self._pairs = {
            Direction.LOAD: (blocks[:half], slots[:half]),
            Direction.STORE: (blocks[half:], slots[half:]),
        }
        self._ids = itertools.count()

    def alone(self, directions: Sequence[Direction]) -> float:
        """Bytes a second, of the best of three runs over all the blocks."""
        rates: list[float] = []
        first_s = time.perf_counter()
        while len(rates) < 3 and time.perf_counter() < first_s + _MAX_S:
            begin_s = time.perf_counter()
            orders = [order for direction in directions for order in self._round(direction)]
            self._engine.submit(orders)
            num_bytes = self._collect(len(orders))
            rates.append(num_bytes / (time.perf_counter() - begin_s))
        return max(rates)

    def beside(self, directions: Sequence[Direction], step: ModelStep, step_s: float, alone: float) -> Beside:
        """Of steps that always have more to copy beside them.

        Args:
            alone: bytes a second without steps.
        """
        ahead_bytes = alone * _AHEAD_S
        under_way = dict.fromkeys(directions, 0)
        rounds = {direction: self._endless(direction) for direction in directions}
        num_bytes = 0

        def top_up() -> None:
            nonlocal num_bytes
            for answer in self._engine.poll():
                assert answer.outcome is Outcome.DONE, answer
                under_way[answer.direction] -= answer.num_bytes
                num_bytes += answer.num_bytes
            for direction in directions:
                while under_way[direction] < ahead_bytes:
                    order = next(rounds[direction])
                    self._engine.submit([order], after=fence)
                    under_way[direction] += len(order.slots) * self._block_bytes

        with torch.cuda.stream(step.stream):
            fence = self._engine.fence()
            for _ in range(_WARM_UP_STEPS):
                step.run(top_up)
            num_bytes, begin_s = 0, time.perf_counter()
            seconds: list[float] = []
            while len(seconds) < _STEPS and time.perf_counter() < begin_s + _MAX_S:
                seconds.append(step.run(top_up))
            rate = num_bytes / (time.perf_counter() - begin_s)
            while sum(under_way.values()):
                for answer in self._engine.poll():
                    under_way[answer.direction] -= answer.num_bytes
                time.sleep(_POLL_S)
        return Beside(rate, statistics.mean(seconds) / step_s, max(seconds) / step_s)

    def _collect(self, num_answers: int) -> int:
        num_bytes = 0
        while num_answers:
            for answer in self._engine.poll():
                if answer.outcome is not Outcome.DONE:
                    raise KVortexError(f"a copy failed: {answer.detail}")
                num_answers -= 1
                num_bytes += answer.num_bytes
            time.sleep(_POLL_S)
        return num_bytes

    def _endless(self, direction: Direction) -> Iterator[CopyOrder]:
        while True:
            yield from self._round(direction)

    def _round(self, direction: Direction) -> Iterator[CopyOrder]:
        blocks, slots = self._pairs[direction]
        count = max(1, min(_ORDER_BYTES // self._block_bytes, len(blocks) // 8))
        for begin in range(0, len(blocks), count):
            yield self._order(direction, blocks[begin : begin + count], slots[begin : begin + count])

    def _order(self, direction: Direction, blocks: IntArray, slots: IntArray) -> CopyOrder:
        return CopyOrder(JobId(next(self._ids)), direction, blocks, slots, _DEADLINE_S)


@contextmanager
def _bench_engine(
    driver: CudaDriver, device: torch.device, num_bytes: int, fragment_bytes: int, tuning: TransferTuning
) -> Iterator[_Copies]:
    """An engine over KV in fragments of one size; 0 is one large fragment a block."""
    num_rows, size = (_NUM_ROWS, fragment_bytes) if fragment_bytes else (1, _ORDER_BYTES)
    num_blocks = max(2, min(num_bytes, _MAX_FRAGMENTS * size) // (size * num_rows))
    memory = torch.zeros(num_rows, num_blocks, size, dtype=torch.uint8, device=device)
    layout = KVLayout(tuple(memory))
    slab = PinnedSlab(num_blocks, layout.block_bytes, driver)
    try:
        if not slab.wait_pinned(_DEADLINE_S):
            raise UnfitError(f"host memory cannot be pinned: {slab.refusal}", hint="run `kvortex doctor`")
        engine = CudaCopyEngine(layout, slab, _NUM_STREAMS, driver, tuning)
        try:
            yield _Copies(engine, num_blocks, layout.block_bytes)
        finally:
            engine.close(_DEADLINE_S)
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
