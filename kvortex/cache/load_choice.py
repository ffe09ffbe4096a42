"""How a hit in RAM is brought back: with the request's own step, before it, or not at all.

Not at all where computing it is estimated to be quicker: a small model, a slow link. All of a hit or nothing of it: a
prefix has no holes, so what is computed must come first, and a block is the dearer to compute the later it comes. So if
any of it is worth loading, its end is, and then the rest too, or none.

What is weighed is waiting. Computing a hit keeps its request and all beside it waiting. So does a load with the step,
for what of it does not hide behind what the step computes. A load before the step keeps only its own request waiting:
for the loads ahead of it on the link, for its own, and for the step in which its end is heard of.

With the step, the request runs at once and each layer's kernels wait for that layer's bytes: what is loaded hides
behind what is computed. Before it, the request waits while others run. The first is quicker for the request; it makes
those beside it wait wherever the step computes less than it loads. So it is chosen where nobody runs beside it, or
where the step is estimated to compute long enough.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from enum import Enum
from typing import Final

from kvortex.cache.costs import PromptWork, StepCosts
from kvortex.messages import LinkFacts

_MAX_STRETCH: Final = 1.1
"""A step may take this much longer for its loads, where others run in it."""

_MAX_DECODES: Final = 16
"""A step loads for about as long as so many steps without prompts: in a longer one, requests whose KV is there wait for
that of others, and in a shorter one, what every step costs weighs more."""

_MAX_SLOWER: Final = 2.0
"""A load is never chosen for the sake of others where computing is so many times as quick: what others gain is little
there, and when they have ended, one still waits."""

_USUAL_S: Final = 5.0
"""Requests that were answered together come again together: the first of them hears of the others by what was usual."""


class Way(Enum):
    """How a request's load is run."""

    COMPUTE = "compute"
    WITH_STEP = "with_step"
    BEFORE_STEP = "before_step"
    NEXT_STEP = "next_step"
    """Not now: this step loads enough; the next one takes it."""


class LoadChoice:
    """Adds up what the step that is being scheduled computes and loads."""

    def __init__(self, costs: StepCosts, clock: Callable[[], float] = time.monotonic) -> None:
        self._costs = costs
        self._clock = clock
        self._links: dict[int, LinkFacts] = {}
        self._link: LinkFacts | None = None
        self._link_free_at = clock()
        self._usual = 0.0
        self._usual_at = clock()
        self._work = PromptWork()
        self._load_s = 0.0

    def heard_of(self, rank: int, link: LinkFacts) -> None:
        """A rank's link, as it is now; the slowest rank counts."""
        self._links[rank] = link
        links = self._links.values()
        self._link = LinkFacts(min(one.bytes_per_s for one in links), all(one.by_layer for one in links))

    def begin_step(self, num_known: int = 0) -> None:
        """The next step begins to be scheduled.

        Args:
            num_known: requests that have come and not ended.
        """
        self._work = PromptWork()
        self._load_s = 0.0
        kept = self._kept
        self._usual = num_known + (self._usual - num_known) * kept
        self._usual_at = self._clock()

    @property
    def _kept(self) -> float:
        """What still counts of what was usual then."""
        return math.exp((self._usual_at - self._clock()) / _USUAL_S)

    def way(
        self,
        load_bytes: int,
        hit: PromptWork,
        work: PromptWork,
        num_running: int,
        num_known: float = 1,
        *,
        may_go_with_step: bool = True,
    ) -> Way:
        """How a request's load should be run.

        Args:
            load_bytes: of one rank.
            hit: what computing the hit would be.
            work: what the step computes of the rest of the prompt.
            num_running: requests that run already, which the step would keep waiting.
            num_known: requests that have come and not ended, this one among them.
            may_go_with_step: the model and its engine allow that.
        """
        if self._link is None:
            return Way.BEFORE_STEP
        own_s = load_bytes / self._link.bytes_per_s
        way = self._load_way(own_s, work, num_running) if may_go_with_step else Way.BEFORE_STEP
        computed_s = self._costs.seconds(hit)
        if computed_s is None:
            return way
        return self._or_compute(way, computed_s, own_s, work, max(num_known, self._usual * self._kept))

    def _load_way(self, own_s: float, work: PromptWork, num_running: int) -> Way:
        assert self._link is not None
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

    def _or_compute(self, way: Way, computed_s: float, own_s: float, work: PromptWork, num_known: float) -> Way:
        """The way, or another that keeps requests waiting for less."""
        if way is not Way.BEFORE_STEP and own_s - self._hidden_s(work) <= computed_s:
            return way
        told_s = self._costs.decode_s if num_known > 1 else 0.0
        alone_s = self._backlog_s + own_s + told_s
        if own_s > _MAX_SLOWER * computed_s or alone_s > num_known * computed_s:
            return Way.COMPUTE
        return Way.BEFORE_STEP

    def _hidden_s(self, work: PromptWork) -> float:
        """Seconds that another load may take without making the step longer."""
        assert self._link is not None
        compute_s = self._costs.seconds(self._work + work) if self._link.by_layer else None
        return 0.0 if compute_s is None else max(0.0, compute_s - self._load_s)

    @property
    def _backlog_s(self) -> float:
        """Seconds until the link has brought what was ordered."""
        return max(0.0, self._link_free_at - self._clock())

    def goes_with_step(self, load_bytes: int, work: PromptWork) -> None:
        """vLLM has admitted a request whose load goes with the step."""
        assert self._link is not None, "a load goes with a step, and no link is known"
        self._load_s += load_bytes / self._link.bytes_per_s
        self._work += work
        self._occupy(load_bytes)

    def goes_before_step(self, load_bytes: int) -> None:
        """vLLM has allocated for a request that waits for its load."""
        self._occupy(load_bytes)

    def _occupy(self, load_bytes: int) -> None:
        if self._link is not None:
            self._link_free_at = self._clock() + self._backlog_s + load_bytes / self._link.bytes_per_s
