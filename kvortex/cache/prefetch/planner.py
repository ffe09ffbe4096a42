"""Which blocks to bring back next, one chunk at a time.

First what waiting requests ask for, in their order; then what hints name, in theirs; then conversations that are about
to go on, by value per byte and second: probability of a return while the block would last in VRAM, times the time that
computing it takes, over the time that it would lie there unused. Bytes are equal among blocks. Nothing is planned where
requests might miss the blocks, where what would go is as likely to be asked for, or where the budget is spent. What was
planned and has not begun is dropped as soon as its request comes: that one loads the rest itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Final

from kvortex.cache.costs import StepCosts, prompt_work
from kvortex.cache.index import BlockIndex
from kvortex.cache.prefetch.budget import Cause, PrefetchBudget
from kvortex.cache.prefetch.demand import Demand
from kvortex.cache.prefetch.target import Chunk, Target, Vram
from kvortex.cache.sessions.announcements import HINT_LASTS_S
from kvortex.cache.sessions.book import SessionBook
from kvortex.cache.sessions.session import Scope, Session
from kvortex.keys import BlockKey

MAX_TARGETS: Final = 256
"""Bound on hints, and on waiting requests, that are remembered at a time."""

MAX_OF_SCOPE: Final = MAX_TARGETS // 2
"""Of them, hints of one scope: whoever hints at all there is leaves room for others."""

KEEP_S: Final = 30.0
"""What was brought is kept at the warm end while its session is likely to go on within so long."""

LEAST_P: Final = 0.5
"""Less likely than that, a session is neither guessed nor kept: what goes instead was there for somebody, too."""

_CHUNK_S: Final = 0.01
"""A chunk is what the link moves in that time: so long may a request's own load wait behind one."""

_MAX_IN_FLIGHT: Final = 2
"""Chunks: one that is copied, one that is answered."""

_FIRST_CHUNK_BLOCKS: Final = 8
"""While the link's speed is not known."""

_LOOK_EVERY_S: Final = 0.25
"""After a look at conversations that led to nothing."""

_CONSIDERED: Final = 16
_TRIED: Final = 4
"""Conversations that are considered for a guess, and the best of them that are looked at closely."""

_SURPLUS: Final = 1.25
"""What would go for a block must be that much less likely to be asked for."""


class PrefetchPlanner:
    """Scheduler thread. A plan costs its chunk and a bounded number of conversations looked at."""

    def __init__(
        self,
        book: SessionBook,
        index: BlockIndex,
        vram: Vram,
        budget: PrefetchBudget,
        demand: Demand,
        costs: StepCosts,
        *,
        block_size: int,
        loading: Callable[[BlockKey], bool],
    ) -> None:
        self._book = book
        self._index = index
        self._vram = vram
        self._budget = budget
        self._demand = demand
        self._costs = costs
        self._block_size = block_size
        self._loading = loading
        self._queued: OrderedDict[Hashable, Target] = OrderedDict()
        self._hints: OrderedDict[Hashable, Target] = OrderedDict()
        self._guess: Target | None = None
        self._look_again_at = 0.0
        self._in_flight = 0
        self._links: dict[int, float] = {}
        self._link_blocks_per_s: float | None = None
        self._credit_blocks = 0.0
        self._credit_at = 0.0

    # ---- what there is to bring back

    def request_waits(self, request_id: str, keys: Sequence[BlockKey], session: Session | None, now: float) -> None:
        """A request was queued; it may have to wait behind others."""
        if len(self._queued) < MAX_TARGETS:
            self._queued[request_id] = Target(Cause.QUEUED, request_id, keys, session, now)

    def request_is_served(self, request_id: str) -> None:
        """vLLM considers it, or it ended: it loads what it lacks itself."""
        self._queued.pop(request_id, None)

    def hint(self, scope: Scope, keys: Sequence[BlockKey], session: Session | None, now: float) -> bool:
        """Somebody says that these blocks will be asked for soon. False when too many say so, or this one too often."""
        if not keys:
            return True
        name = session.number if session is not None else keys[-1]
        if name not in self._hints and self._is_full_for(scope, now):
            return False
        self._hints[name] = Target(Cause.HINT, name, keys, session, now, scope)
        return True

    def _is_full_for(self, scope: Scope, now: float) -> bool:
        for name, target in list(self._hints.items()):
            if now - target.asked_at <= HINT_LASTS_S:
                break
            del self._hints[name]
        own = sum(target.scope == scope for target in self._hints.values())
        return len(self._hints) >= MAX_TARGETS or own >= MAX_OF_SCOPE

    def forget_targets(self) -> None:
        """What was known of blocks is not true any more."""
        self._queued.clear()
        self._hints.clear()
        self._guess = None

    # ---- one chunk

    def heard_of_link(self, rank: int, blocks_per_s: float) -> None:
        """A rank's link as it is now; the slowest rank's counts."""
        self._links[rank] = blocks_per_s
        self._link_blocks_per_s = min(self._links.values())

    def plan(self, now: float, *, running: bool, requests_load: bool) -> Chunk | None:
        """The next chunk; `issued` is owed for it.

        Args:
            running: requests run, so the link's time is shared with them.
            requests_load: loads of requests are under way: they go first.
        """
        self._add_credit(now, running=running)
        if self._in_flight >= _MAX_IN_FLIGHT or requests_load:
            return None
        if not (self._queued or self._hints or self._book.num_lost):
            return None
        room = self._room(running=running)
        if room <= 0:
            return None
        horizon_s = self._horizon_s
        for target, p in self._targets(now, horizon_s):
            if chunk := self._chunk_of(target, p, room, now):
                return chunk
        return None

    def _add_credit(self, now: float, *, running: bool) -> None:
        """The link's time that is prefetch's own, in blocks; no more than one chunk of it is saved up."""
        passed, self._credit_at = now - self._credit_at, now
        if self._link_blocks_per_s is not None and running:
            gained = passed * self._link_blocks_per_s * max(self._budget.share(cause) for cause in Cause)
            self._credit_blocks = min(self._chunk_blocks, self._credit_blocks + gained)

    @property
    def _chunk_blocks(self) -> int:
        rate = self._link_blocks_per_s
        return _FIRST_CHUNK_BLOCKS if rate is None else max(1, int(_CHUNK_S * rate))

    def _room(self, *, running: bool) -> int:
        room = min(self._chunk_blocks, self._vram.free_blocks - self._demand.margin_blocks)
        return room if not running or self._link_blocks_per_s is None else min(room, int(self._credit_blocks))

    def may_plan(self, now: float) -> bool:
        """Whether a step in which nothing runs may have something to order; a look that costs little and may err."""
        if self._queued or self._hints:
            return True
        if not self._book.num_lost or self._budget.allowed(Cause.GUESS) <= 0 or self._room(running=False) <= 0:
            return False
        likely = self._book.likeliest(now, self._horizon_s, 1)
        return bool(likely) and likely[0][0] >= LEAST_P

    @property
    def _horizon_s(self) -> float:
        """How long what a guess brings would lie there, if nobody kept it."""
        return self._demand.lasts_s(self._vram.free_blocks)

    def issued(self, chunk: Chunk) -> None:
        """The chunk was ordered."""
        self._in_flight += 1
        chunk.target.in_flight += 1
        self._credit_blocks = max(0.0, self._credit_blocks - len(chunk.keys))
        self._budget.issued(chunk.target.cause, len(chunk.keys))

    def ended(self, chunk: Chunk, *, failed: bool) -> None:
        """The chunk is loaded, or will not be."""
        self._in_flight -= 1
        chunk.target.in_flight -= 1
        assert min(self._in_flight, chunk.target.in_flight) >= 0, (self._in_flight, chunk.target.in_flight)
        if failed:
            self._drop(chunk.target)

    def _targets(self, now: float, horizon_s: float) -> Iterator[tuple[Target, float]]:
        """What could be brought back, in order, with the probability that it is asked for in time."""
        for target in list(self._queued.values())[:_MAX_IN_FLIGHT]:
            yield target, 1.0
        for name, target in list(self._hints.items())[:_MAX_IN_FLIGHT]:
            if now - target.asked_at > HINT_LASTS_S or (target.session is not None and target.session.requests):
                del self._hints[name]
            else:
                yield target, self._budget.use_rate(Cause.HINT)
        if not self._book.num_lost or self._budget.allowed(Cause.GUESS) <= 0:
            return
        if self._guess is not None and self._guess.session is not None:
            p = self._book.p_return_within(self._guess.session, now, horizon_s)
            if self._guess.session.is_silent and p >= LEAST_P:
                yield self._guess, p
            self._guess = None
        if now < self._look_again_at:
            return
        for p, session in self._best_guesses(now, horizon_s)[:_TRIED]:
            self._guess = Target(Cause.GUESS, session.number, session.keys, session, now)
            yield self._guess, p
        self._guess = None
        self._look_again_at = now + _LOOK_EVERY_S

    def _best_guesses(self, now: float, horizon_s: float) -> list[tuple[float, Session]]:
        likely = [
            (p, s)
            for p, s in self._book.likeliest(now, horizon_s, _CONSIDERED)
            # Who is announced is not guessed.
            if s.is_silent and p * self._book.p_unannounced(s) >= LEAST_P
        ]
        likely.sort(
            key=lambda pair: pair[0] * self._seconds_a_block(pair[1]) / self._waits_s(pair[1], now), reverse=True
        )
        return likely

    def _waits_s(self, session: Session, now: float) -> float:
        """How long its blocks would lie in VRAM before they are used; no less than what brings a part of them."""
        return max(_CHUNK_S, self._book.half_back_in_s(session, now))

    def _seconds_a_block(self, session: Session) -> float:
        """Computing time that each block that VRAM lacks would save; relative while nothing was measured."""
        start, end = self.first_missing(session.keys), len(session.keys)
        if start == end:
            return 0.0
        work = prompt_work(start * self._block_size, end * self._block_size)
        seconds = self._costs.seconds(work)
        return (work.tokens if seconds is None else seconds) / (end - start)

    def first_missing(self, keys: Sequence[BlockKey]) -> int:
        """VRAM gives up a prompt's tail before its head, so that what it has is a prefix."""
        return bisect_left(range(len(keys)), True, key=lambda i: not self._vram.holds(keys[i]))

    def _chunk_of(self, target: Target, p: float, room: int, now: float) -> Chunk | None:
        start = self.first_missing(target.keys)
        # Its own earlier chunk brings these, or a later one, which ended before it, has brought them.
        while start < len(target.keys) and target.in_flight and self._is_at_hand(target.keys[start]):
            start += 1
        if start < len(target.keys) and self._loading(target.keys[start]):
            return None
        slots = self._index.match(target.keys[start : start + room])
        if not slots:
            if not target.in_flight:
                # A session that is about to come is not to lose what it has.
                if target.cause is Cause.HINT and start and self._budget.allowed(Cause.HINT) > 0:
                    self._vram.keep(target)
                self._drop(target)
            return None
        count = min(len(slots), self._budget.allowed(target.cause))
        # What goes would have been there for so long at most, and is not kept.
        lasts_s = self._demand.lasts_s(self._vram.free_blocks)
        if target.cause is Cause.HINT:  # used by then, and free again
            lasts_s = min(lasts_s, self._book.announcements.lead_s)
        count = self._vram.takeable(
            count,
            lambda s: self._book.p_return_within(s, now, lasts_s),
            p / _SURPLUS,
            frozenset(target.keys[:start]),
        )
        if count <= 0:
            return None
        return Chunk(target, start, tuple(target.keys[start : start + count]), tuple(slots[:count]))

    def _is_at_hand(self, key: BlockKey) -> bool:
        return self._loading(key) or self._vram.holds(key)

    def _drop(self, target: Target) -> None:
        """There is nothing, or nothing more, to bring back for it."""
        for targets in (self._queued, self._hints):
            if targets.get(target.name) is target:
                del targets[target.name]
        if self._guess is target:
            self._guess = None
        if target.session is not None:
            self._book.settled(target.session)
