"""The copy engine's interface: the CPU and the CUDA engine have the same one.

KVLayout     where the bytes of a block lie on the device: regions [num_blocks, fragment_bytes]
HostSlab     the host's slots: [num_slots, slot_bytes], a slot holds a block's fragments one after the other
CopyEngine   takes orders, moves bytes, answers each order once
StepLoads    loads that the step's own kernels read, layer by layer
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvortex.messages import CopyOrder, JobId, JobResult, LinkFacts


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The device side: every byte of block `b` is `regions[i][b]` over all i.

    Attributes:
        regions: uint8 tensors [num_blocks, fragment_bytes_i]; rows are contiguous, the row stride may be larger than
            the fragment. Views of vLLM's own KV memory, never copies.
        regions_of: for each layer whose kernels are known by name, the regions that they read.
    """

    regions: tuple[torch.Tensor, ...]
    regions_of: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.regions, "a KV layout needs at least one region"
        for region in self.regions:
            assert region.dtype == torch.uint8, region.dtype
            assert region.dim() == 2, region.shape
            assert region.stride(1) == 1, region.stride()
            assert region.shape[0] == self.regions[0].shape[0], [r.shape for r in self.regions]

    @property
    def num_blocks(self) -> int:
        return int(self.regions[0].shape[0])

    @property
    def fragment_bytes(self) -> tuple[int, ...]:
        """Bytes of a block in each region."""
        return tuple(int(region.shape[1]) for region in self.regions)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on this rank, over all regions."""
        return sum(self.fragment_bytes)


class Fence(Protocol):
    """A point of the device's compute stream, from `CopyEngine.fence`: all that was submitted to it before."""

    def is_reached(self) -> bool:
        """Whether the device has run all of it; never blocks."""
        ...


class StepLoads(Protocol):
    """Loads that the kernels of the step being submitted read. Used until `end`, by one thread.

    They do not fail: vLLM cannot take back a step. What cannot be copied in the usual way is copied in a slower one;
    both methods raise RuntimeError when the device has failed.
    """

    def hold_kernels(self, regions: Sequence[int]) -> None:
        """What the compute stream is given from now on runs behind the copies into these regions of the layout."""
        ...

    def end(self) -> bool:
        """The step's kernels are submitted; what comes after them runs behind all of the copies.

        Returns:
            False when `hold_kernels` was not called for every region: some kernels may have run too early.
        """
        ...


class Stopwatch(Protocol):
    """Runs on the device's compute stream from the point at which it was made."""

    def stop(self) -> None: ...

    def seconds(self) -> float | None:
        """From start to stop; None until the device is there. Never blocks."""
        ...


class CopyEngine(Protocol):
    """Moves blocks between a KVLayout and a HostSlab. Called from the worker's main thread only.

    Invariants (DESIGN 3, 6, 7): an order is answered exactly once; after its answer none of its bytes are read or
    written; a STORE reads a GPU block only after the kernels submitted before it, a LOAD writes one only after the
    kernels that read it; loads go before stores, among loads first come first served; nothing waits without a
    deadline; an error in a copy is a FAILED answer, never an exception to the caller.
    """

    def fence(self) -> Fence:
        """Marks the caller's compute stream as it is now; never blocks."""
        ...

    def submit(self, orders: Sequence[CopyOrder], *, after: Fence | None = None) -> None:
        """Takes orders, in this order; never waits for a copy.

        Args:
            after: the point of the compute stream behind which their first byte is read or written. An earlier
                one than now is right only where nothing submitted since writes a STORE's GPU blocks or touches
                a LOAD's. None: all that was submitted until now.
        """
        ...

    def load_for_step(self, orders: Sequence[CopyOrder], *, after: Fence) -> StepLoads:
        """Loads that the kernels submitted next read, ahead of all other loads; the caller says what waits for them.

        They have no deadline, and each is answered DONE.
        """
        ...

    @property
    def link(self) -> LinkFacts | None:
        """How this engine loads; None until it knows."""
        ...

    def stopwatch(self) -> Stopwatch: ...

    def poll(self) -> list[JobResult]:
        """The answers since the last call; never blocks."""
        ...

    def promise(self, window_s: float, never: Collection[JobId] = ()) -> list[JobId]:
        """Loads that will have ended within `window_s` seconds, but `never` these; each told once; does not block.

        Who hears of a load only at its end loses a step or two before its request runs. A promised load is not given
        up any more: its answer is DONE, or the device has failed. Until the answer its slots and GPU blocks are in use;
        kernels may be submitted to touch the blocks after `hold_kernels`. An engine without a device promises nothing.
        """
        ...

    def hold_kernels(self, job_ids: Sequence[JobId]) -> None:
        """What is submitted to the compute stream from now on runs behind the ends of these promised loads."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Gives up what waits, waits for what is being copied, ends the threads. True if all of it ended in time."""
        ...
