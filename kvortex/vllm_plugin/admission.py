"""What vLLM is answered when it asks whether a request may be admitted: a hit, how it comes, or "ask again".

another request is bringing the next block     ask again
what it would displace is not copied yet       ask again (`Gate`), where prompts come back at all (`Returns`)
this step loads enough                         ask again (`LoadChoice`)
the hit is quicker computed                    no hit
else                                           the hit, with the request's step or before it
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from kvortex.cache.costs import PromptWork, prompt_work
from kvortex.cache.gate import Gate
from kvortex.cache.load_choice import LoadChoice, Way
from kvortex.cache.misses import MissExplainer
from kvortex.cache.prefix import GroupShape, PrefixHit, PrefixMatcher
from kvortex.cache.residency import Residency
from kvortex.cache.returns import Returns
from kvortex.keys import BlockKey
from kvortex.vllm_plugin.jobs import JobBook
from kvortex.vllm_plugin.pool_view import PoolView
from kvortex.vllm_plugin.requests import RequestState
from kvortex.vllm_plugin.step_log import StepLog

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvortex.vllm_plugin.setup import EngineFacts

Answer = tuple[int | None, bool]
"""Tokens that RAM restores, None to ask again; and whether the request waits for them before it runs."""

LATER: Final[Answer] = (None, False)

WORTH_WAITING: Final = 0.05
"""Share of prompts that is found from which on a request waits for copies. What one copies in a tenth of the time of
computing it is worth the wait if a tenth of it is asked for again, or less, since those who run go on meanwhile."""


class Admission:
    """Under the scheduler side's lock. Changes nothing but what the request's state says of the answer."""

    def __init__(
        self,
        facts: EngineFacts,
        groups: Sequence[GroupShape],
        view: PoolView,
        matcher: PrefixMatcher,
        explainer: MissExplainer,
        residency: Residency,
        jobs: JobBook,
        gate: Gate,
        choice: LoadChoice,
        steps: StepLog,
    ) -> None:
        self._returns = Returns(view.capacity_blocks * groups[0].block_size)
        self._facts = facts
        self._groups = groups
        self._view = view
        self._matcher = matcher
        self._explainer = explainer
        self._residency = residency
        self._jobs = jobs
        self._gate = gate
        self._choice = choice
        self._steps = steps

    def answer(self, request: Request, state: RequestState, local_tokens: int, num_known: int) -> Answer:
        """
        Args:
            local_tokens: of the prompt, found in VRAM.
            num_known: requests that have come and not ended.
        """
        state.hit = PrefixHit(local_tokens, 0, {})
        state.with_step, state.declined = False, 0
        if state.load_failed or request.skip_reading_prefix_cache:
            return 0, False
        asked = self._first_asked(request, state, local_tokens)
        if self._jobs.loading(self.next_key(request, state, local_tokens)):
            return LATER
        if self._must_wait(request, state, local_tokens):
            return LATER
        hit = self._match(request, state, local_tokens) if asked is None else asked
        way = self._way(request, hit, num_known) if hit.ram_tokens else Way.COMPUTE
        if way is Way.NEXT_STEP:
            return LATER
        declined_tokens = 0
        if way is Way.COMPUTE:
            state.declined, declined_tokens = _num_blocks(hit), hit.ram_tokens
            hit = PrefixHit(local_tokens, 0, {})
        state.hit, state.with_step = hit, way is Way.WITH_STEP
        self._explain(request, state, hit, declined_tokens)
        return hit.ram_tokens, way is Way.BEFORE_STEP

    def _first_asked(self, request: Request, state: RequestState, local_tokens: int) -> PrefixHit | None:
        """Of each request once: what of its prompt is there. vLLM asks again while it waits, and if it is preempted."""
        if state.found_share is not None:
            return None
        hit = self._match(request, state, local_tokens)
        found = local_tokens + hit.ram_tokens
        state.found_share = found / request.num_tokens
        self._returns.saw(found, request.num_tokens)
        return hit

    def _match(self, request: Request, state: RequestState, local_tokens: int) -> PrefixHit:
        return self._matcher.match(
            lambda group: state.keys(request, group, self._view.hash_block_size),
            request.num_tokens,
            local_tokens,
        )

    def next_key(self, request: Request, state: RequestState, local_tokens: int) -> BlockKey | None:
        """The first block that VRAM does not have. While a load brings it, waiting costs less than a second load."""
        group = self._groups[0]
        keys = state.keys(request, group, self._view.hash_block_size)
        position = local_tokens // group.block_size
        return keys[position] if position < len(keys) else None

    def _way(self, request: Request, hit: PrefixHit, num_known: int) -> Way:
        load_bytes, work = self.load_and_work(request, hit)
        computed = prompt_work(hit.local_tokens, hit.local_tokens + hit.ram_tokens)
        may_go_with_step = self._facts.loads_go_with_steps and self._groups[0].window is None
        return self._choice.way(
            load_bytes,
            computed,
            work,
            self._steps.num_running,
            num_known,
            may_go_with_step=may_go_with_step,
        )

    def load_and_work(self, request: Request, hit: PrefixHit) -> tuple[int, PromptWork]:
        """What a rank loads for the request, in bytes, and what is computed of it then."""
        num_blocks = _num_blocks(hit)
        work = prompt_work(hit.local_tokens + hit.ram_tokens, request.num_tokens)
        return num_blocks * self._facts.rank_block_bytes, work

    def _must_wait(self, request: Request, state: RequestState, local_tokens: int) -> bool:
        """Whether what VRAM would take for the request is worth waiting for; see `Gate`."""
        sizes = [group.block_size for group in self._groups]
        wanted = sum(-(-request.num_tokens // size) - local_tokens // size for size in sizes)
        at_stake = partial(self._at_stake, request, state, local_tokens, wanted)
        return self._gate.must_wait(request.request_id, wanted, at_stake)

    def _at_stake(self, request: Request, state: RequestState, local_tokens: int, wanted: int) -> bool:
        """Whether one of the next `wanted` blocks that VRAM takes is due for a copy or being copied, and may well be
        asked for again: this request comes back, or enough of those before it did."""
        if max(state.found_share or 0.0, self._returns.share) < WORTH_WAITING:
            return False
        sources = self._jobs.sources
        if not sources and not self._residency.queued_blocks:
            return False
        hit: set[BlockKey] = set()  # the request takes these out of VRAM's order before VRAM takes any
        for group in self._groups:
            hit.update(state.keys(request, group, self._view.hash_block_size)[: local_tokens // group.block_size])
        return self._residency.at_stake(self._view.next_taken(), wanted, hit=hit, copied_from=sources)

    def _explain(self, request: Request, state: RequestState, hit: PrefixHit, declined_tokens: int) -> None:
        """Once for each answer: vLLM may ask again at every step while it has no room for the request."""
        computed = request.num_tokens - hit.local_tokens - hit.ram_tokens
        if state.counted or state.explanation.missed.total() == computed:
            return
        state.explanation = self._explainer.explain(
            lambda group: state.keys(request, group, self._view.hash_block_size),
            request.num_tokens,
            hit.local_tokens + hit.ram_tokens,
            salted=request.cache_salt is not None,
            declined_tokens=declined_tokens,
        )


def _num_blocks(hit: PrefixHit) -> int:
    return sum(len(slots) for slots in hit.slots.values())
