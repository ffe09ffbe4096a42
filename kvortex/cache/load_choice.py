"""How a hit in RAM is brought back: with the request's own step, or before it.

With the step, the request runs at once and each layer's kernels wait for that layer's bytes: what is loaded hides
behind what is computed. Before it, the request waits while others run. The first is quicker for the request; it makes
those beside it wait wherever the step computes less than it loads. So it is chosen where nobody runs beside it, or
where the step is estimated to compute long enough.
"""

from __future__ import annotations

from typing import Final

from kvortex.cache.costs import PromptWork, StepCosts
from kvortex.messages import LinkFacts

_MAX_STRETCH: Final = 1.1
"""A step may take this much longer for its loads, where others run in it."""


class LoadChoice:
    """Adds up what the step that is being scheduled computes and loads."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._link: LinkFacts | None = None
        self._work = PromptWork()
        self._load_s = 0.0

    def heard_of(self, link: LinkFacts) -> None:
        """A rank's link; the slowest counts."""
        known = self._link
        if known is None:
            self._link = link
        else:
            self._link = LinkFacts(min(known.bytes_per_s, link.bytes_per_s), known.by_layer and link.by_layer)

    def begin_step(self) -> None:
        self._work = PromptWork()
        self._load_s = 0.0

    def with_step(self, load_bytes: int, work: PromptWork, num_running: int) -> bool:
        """Whether a request's load should go with its step.

        Args:
            load_bytes: of one rank.
            work: what the step computes of the request's prompt.
            num_running: requests that run already, which the step would keep waiting.
        """
        if self._link is None:
            return False
        if num_running == 0:
            return True
        if not self._link.by_layer:
            return False
        compute_s = self._costs.seconds(self._work + work)
        if compute_s is None:
            return False
        load_s = self._load_s + load_bytes / self._link.bytes_per_s
        return load_s <= _MAX_STRETCH * (self._costs.decode_s + compute_s)

    def goes_with_step(self, load_bytes: int, work: PromptWork) -> None:
        """vLLM has admitted a request whose load goes with the step."""
        assert self._link is not None, "a load goes with a step, and no link is known"
        self._load_s += load_bytes / self._link.bytes_per_s
        self._work += work
