"""The steps that vLLM has scheduled: who runs in the last one, and what those compute whose time was asked for."""

from __future__ import annotations

from collections import OrderedDict, deque
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


STEPS_REMEMBERED: Final = 16
"""Of steps before these the oldest of them is named, whose kernels come later: vLLM has few steps under way."""


class StepLog:
    """Scheduler thread."""

    def __init__(self) -> None:
        self.number = 0
        """Of the last step."""
        self._completed: deque[tuple[int, int]] = deque(maxlen=STEPS_REMEMBERED)
        self._work: OrderedDict[int, PromptWork] = OrderedDict()
        self._scheduled: Collection[str] = ()
        self._num_ended = 0

    @property
    def num_running(self) -> int:
        """Requests of the last step that have not ended since."""
        return len(self._scheduled) - self._num_ended

    def begin(self, scheduler_output: SchedulerOutput, completions: int, *, loads: bool) -> int:
        """A step was scheduled.

        Args:
            completions: blocks that VRAM has completed, this step's included.
            loads: its kernels wait for loads, so its time says nothing of what it computes.

        Returns:
            The number to time it by, 0 for not at all.
        """
        self._scheduled = scheduler_output.num_scheduled_tokens
        self._num_ended = 0
        self.number += 1
        self._completed.append((self.number, completions))
        if loads or not self._scheduled:
            return 0
        work = compat.prompt_work_of(scheduler_output)
        if not work.tokens and self.number % _EACH:
            return 0
        self._work[self.number] = work
        if len(self._work) > _MAX_UNTIMED:
            self._work.popitem(last=False)
        return self.number

    def written_by(self, completion: int) -> int:
        """The number of the last step whose kernels may write a complete block, while a step is being scheduled. vLLM
        calls a block complete when it schedules the step that computes the last of it, or later."""
        for number, completions in self._completed:
            if completion < completions:
                return number
        return self.number + 1

    def work_of(self, number: int) -> PromptWork | None:
        """What a timed step computes, asked for once; None if that was too long ago."""
        return self._work.pop(number, None)

    def request_ended(self, request_id: str) -> None:
        if request_id in self._scheduled:
            self._num_ended += 1
