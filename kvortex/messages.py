"""What the scheduler side and the worker side say to each other, once a step each way.

The scheduler side decides and never touches bytes; the worker side moves bytes and decides nothing. These types are
all they share. Every order gets exactly one `JobResult` from every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

import numpy as np
import numpy.typing as npt

JobId = NewType("JobId", int)
"""Numbers one order; never used twice in an engine's life."""

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class Direction(Enum):
    """Which way bytes go. STORE: VRAM to RAM. LOAD: RAM to VRAM."""

    STORE = "store"
    LOAD = "load"


class Outcome(Enum):
    """How an order ended. Whatever the outcome, no byte of it is read or written afterwards."""

    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed_out"


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """Copy whole blocks between GPU blocks and host slots.

    Attributes:
        job_id: names the order in the result.
        direction: STORE or LOAD.
        gpu_blocks: int64 [n], GPU block ids.
        slots: int64 [n], host slots; `slots[i]` pairs with `gpu_blocks[i]`.
        deadline_s: seconds after submission at which the order is given up.
        sampled: bool [n], of a STORE: the blocks that get a checksum where blocks are verified; None is all of them.
        written_by: of a STORE, the number of the plan whose step's kernels are the last that may write its GPU blocks;
            None is the plan that it comes with.
        is_prefetch: of a LOAD: not ordered for a request that has its GPU blocks.
    """

    job_id: JobId
    direction: Direction
    gpu_blocks: IntArray
    slots: IntArray
    deadline_s: float
    sampled: BoolArray | None = None
    written_by: int | None = None
    is_prefetch: bool = False


@dataclass(frozen=True, slots=True)
class JobResult:
    """One rank's answer to one order.

    Attributes:
        seconds: from submission to completion on this rank.
        num_bytes: bytes moved by this rank.
        detail: the reason, when the outcome is not DONE.
        corrupt_slots: of a LOAD that failed: the slots whose bytes are not those that were stored in them.
    """

    job_id: JobId
    direction: Direction
    outcome: Outcome
    seconds: float
    num_bytes: int
    detail: str = ""
    corrupt_slots: tuple[int, ...] = ()


@dataclass(slots=True)
class StepPlan:
    """Scheduler to workers: the orders of one step. Loads are served in order, before stores.

    Attributes:
        requests: for each load, the request that waits for it.
        refused: loads that must not happen; each rank answers FAILED without a copy, so that the request is computed.
        step_loads: loads that this step's own kernels read; their requests do not wait to be told.
        prefetches: loads that no request waits for, behind those that one waits for.
        number: counts the plans, from 1.
        timed_as: the number under which the step's time is reported; 0 is not.
        needed: loads whose GPU blocks this step's kernels, or later ones, may touch. The kernels wait, on the device,
            for those of them that were promised (see `CopyEngine.promise`); the others are not promised any more.
    """

    loads: list[CopyOrder] = field(default_factory=list)
    step_loads: list[CopyOrder] = field(default_factory=list)
    prefetches: list[CopyOrder] = field(default_factory=list)
    stores: list[CopyOrder] = field(default_factory=list)
    refused: list[CopyOrder] = field(default_factory=list)
    requests: dict[JobId, str] = field(default_factory=dict)
    needed: list[JobId] = field(default_factory=list)
    number: int = 0
    timed_as: int = 0


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """How one rank loads.

    Attributes:
        bytes_per_s: of one large load.
        by_layer: kernels can wait for their own layer's bytes; otherwise the first one waits for all.
    """

    bytes_per_s: float
    by_layer: bool


@dataclass(slots=True)
class StepReport:
    """Workers to scheduler: each rank's answers since its last report.

    Attributes:
        links: of each rank, where it is not what was last told.
        step_seconds: of one rank, the steps asked for: number -> seconds from its first kernel to its last.
    """

    results: dict[int, list[JobResult]] = field(default_factory=dict)
    links: dict[int, LinkFacts] = field(default_factory=dict)
    step_seconds: dict[int, float] = field(default_factory=dict)

    def merge(self, other: StepReport) -> StepReport:
        """Both reports as one; the reports of different ranks, or of one rank in order."""
        merged = {rank: list(results) for rank, results in self.results.items()}
        for rank, results in other.results.items():
            merged.setdefault(rank, []).extend(results)
        return StepReport(merged, self.links | other.links, self.step_seconds | other.step_seconds)
