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
    """

    job_id: JobId
    direction: Direction
    gpu_blocks: IntArray
    slots: IntArray
    deadline_s: float


@dataclass(frozen=True, slots=True)
class JobResult:
    """One rank's answer to one order.

    Attributes:
        seconds: from submission to completion on this rank.
        num_bytes: bytes moved by this rank.
        detail: the reason, when the outcome is not DONE.
    """

    job_id: JobId
    direction: Direction
    outcome: Outcome
    seconds: float
    num_bytes: int
    detail: str = ""


@dataclass(slots=True)
class StepPlan:
    """Scheduler to workers: the orders of one step. Loads are served in order, before stores.

    Attributes:
        requests: for each load, the request that waits for it.
        refused: loads that must not happen; each rank answers FAILED without a copy, so that the request is computed.
        needed: loads whose GPU blocks this step's kernels, or later ones, may touch. The kernels wait, on the device,
            for those of them that were promised (see `CopyEngine.promise`); the others are not promised any more.
    """

    loads: list[CopyOrder] = field(default_factory=list)
    stores: list[CopyOrder] = field(default_factory=list)
    refused: list[CopyOrder] = field(default_factory=list)
    requests: dict[JobId, str] = field(default_factory=dict)
    needed: list[JobId] = field(default_factory=list)


@dataclass(slots=True)
class StepReport:
    """Workers to scheduler: each rank's answers since its last report."""

    results: dict[int, list[JobResult]] = field(default_factory=dict)

    def merge(self, other: StepReport) -> StepReport:
        """Both reports as one; the reports of different ranks, or of one rank in order."""
        merged = {rank: list(results) for rank, results in self.results.items()}
        for rank, results in other.results.items():
            merged.setdefault(rank, []).extend(results)
        return StepReport(merged)
