"""The steps that vLLM has scheduled: who runs in the last one, and what those compute whose time was asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from kvortex.cache.costs import PromptWork
from kvortex.vllm_plugin import compat

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_EACH: Final = 16
"""Of the steps without prompts, which are alike, one in so many is timed."""

_MAX_UNTIMED: Final = 64
"""Bound on steps whose time has not come in; an idle or failed worker reports none."""


class StepLog:
    """Scheduler thread."""

    def __init__(self) -> None:
        self._number = 0
        self._work: OrderedDict[int, PromptWork] = OrderedDict()
        self._scheduled: Collection[str] = ()
        self._num_ended = 0

    @property
    def num_running(self) -> int:
        """Requests of the last step that have not ended since."""
        return len(self._scheduled) - self._num_ended

    def begin(self, scheduler_output: SchedulerOutput, *, loads: bool) -> int:
        """A step was scheduled.

        Args:
            loads: its kernels wait for loads, so its time says nothing of what it computes.

        Returns:
            The number to time it by, 0 for not at all.
        """
        self._scheduled = scheduler_output.num_scheduled_tokens
        self._num_ended = 0
        self._number += 1
        if loads or not self._scheduled:
            return 0
        work = compat.prompt_work_of(scheduler_output)
        if not work.tokens and self._number % _EACH:
            return 0
        self._work[self._number] = work
        if len(self._work) > _MAX_UNTIMED:
            self._work.popitem(last=False)
        return self._number

    def work_of(self, number: int) -> PromptWork | None:
        """What a timed step computes, asked for once; None if that was too long ago."""
        return self._work.pop(number, None)

    def request_ended(self, request_id: str) -> None:
        if request_id in self._scheduled:
            self._num_ended += 1
