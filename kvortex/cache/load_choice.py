"""How a hit in RAM is brought back: with the request's own step, before it, or not at all.

Not at all where computing it is estimated to be quicker: a small model, a slow link. All of a hit or nothing of it: a
prefix has no holes, so what is computed must come first, and a block is the dearer to compute the later it comes. So if
any of it is worth loading, its end is, and then the rest too, or none.

With the step, the request runs at once and each layer's kernels wait for that layer's bytes: what is loaded hides
behind what is computed. Before it, the request waits while others run. The first is quicker for the request; it makes
those beside it wait wherever the step computes less than it loads. So it is chosen where nobody runs beside it, or
where the step is estimated to compute long enough.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from kvortex.cache.costs import PromptWork, StepCosts
from kvortex.messages import LinkFacts

_MAX_STRETCH: Final = 1.1
"""A step may take this much longer for its loads, where others run in it."""

_MAX_DECODES: Final = 16
"""A step loads for about as long as so many steps without prompts: in a longer one, requests whose KV is there wait for
that of others, and in a shorter one, what every step costs weighs more."""


class Way(Enum):
    """How a request's load is run."""

    COMPUTE = "compute"
    WITH_STEP = "with_step"
    BEFORE_STEP = "before_step"
    NEXT_STEP = "next_step"
    """Not now: this step loads enough; the next one takes it."""


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

    def way(self, load_bytes: int, hit: PromptWork, work: PromptWork, num_running: int) -> Way:
        """How a request's load should be run.

        Args:
            load_bytes: of one rank.
            hit: what computing the hit would be.
            work: what the step computes of the rest of the prompt.
            num_running: requests that run already, which the step would keep waiting.
        """
        if self._link is None:
            return Way.BEFORE_STEP
        own_s = load_bytes / self._link.bytes_per_s
        computed_s = self._costs.seconds(hit)
        if computed_s is not None and computed_s < own_s:
            return Way.COMPUTE
        load_s = self._load_s + own_s
        if self._load_s > 0 and 0 < _MAX_DECODES * self._costs.decode_s < load_s:
            return Way.NEXT_STEP
        if num_running == 0:
            return Way.WITH_STEP
        if not self._link.by_layer:
            return Way.BEFORE_STEP
        compute_s = self._costs.seconds(self._work + work)
        if compute_s is None or load_s > _MAX_STRETCH * (self._costs.decode_s + compute_s):
            return Way.BEFORE_STEP
        return Way.WITH_STEP

    def goes_with_step(self, load_bytes: int, work: PromptWork) -> None:
        """vLLM has admitted a request whose load goes with the step."""
        assert self._link is not None, "a load goes with a step, and no link is known"
        self._load_s += load_bytes / self._link.bytes_per_s
        self._work += work
