"""Gives up the block that is worth least to hold, by what was learnt of when blocks are asked for again.

    prompt      its blocks become new runs; what each old run shows is learnt (hit at this age)
    time        runs pass the borders of age bins (alive at this age); their rank follows their worth at that age
    evict       from the tail of the run of the lowest rank among those on which no other hangs
    judge       where LRU would have done better for a whole cacheful of blocks, be LRU for a while

What was given up is remembered as ghosts for a while, so that what is learnt does not hang on what was kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvortex.cache.policies.adaptive.births import Births
from kvortex.cache.policies.adaptive.known_blocks import KnownBlocks
from kvortex.cache.policies.adaptive.leaves import Leaves
from kvortex.cache.policies.adaptive.lru_judge import LRUJudge
from kvortex.cache.policies.adaptive.newcomers import Newcomers
from kvortex.cache.policies.adaptive.prompts import Prompts
from kvortex.cache.policies.adaptive.runs import NO_RUN, NO_SLOT, Runs
from kvortex.cache.policies.base import Choice, displace
from kvortex.keys import BlockKey

_MIN_GHOSTS: Final = 1 << 16
"""However small the cache: ghosts must outlast the time people take to think."""
_GHOST_EVERY: Final = 4
"""Of a run given up, every fourth block and the last are remembered."""
_MIN_BIRTHS: Final = 1 << 16


class Adaptive:
    """See the module's text. Hears of time by `clock` (seconds), at every prompt; a clock that jumps back stands."""

    def __init__(self, num_slots: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        assert num_slots > 0, num_slots
        self._num_slots = num_slots
        self._clock = clock
        self._max_ghosts = max(_MIN_GHOSTS, num_slots)
        self.reset()

    def __len__(self) -> int:
        return self._evictable

    def reset(self) -> None:
        self._last_s = -math.inf
        self._judge = LRUJudge(self._num_slots)
        self._runs = Runs(self._num_slots)
        self._births = Births(self._runs, max(_MIN_BIRTHS, self._num_slots // 4), self._num_slots)
        self._known = KnownBlocks(self._runs)
        self._leaves = Leaves(self._runs)
        self._told = Prompts(self._runs, self._births, self._known, self._leaves, self._judge)
        self._evictable = 0

    # ---- requests

    def prompt(self, keys: Sequence[BlockKey], num_tokens: int) -> None:
        if not keys:
            return
        self._make_room(len(keys))
        self._told.prompt(list(dict.fromkeys(keys)), num_tokens, self._now_s())
        while self._known.num_ghosts > self._max_ghosts and self._births.first < self._births.end:
            self._forget_oldest_birth()

    def answered(self, keys: Sequence[BlockKey], num_output_tokens: int) -> None:
        self._told.answered(keys, num_output_tokens)

    def _now_s(self) -> float:
        self._last_s = max(self._last_s, self._clock())
        return self._last_s

    def _make_room(self, num_births: int) -> None:
        while not self._births.has_room_for(num_births):
            self._forget_oldest_birth()

    def _forget_oldest_birth(self) -> None:
        """Its ghosts are forgotten, and it ages no more; what is held of it stays until it is given up."""
        run = self._births.pop_oldest()
        if self._runs.named[run]:
            self._known.forget_ghosts_of(run)
            self._leaves.rerank(run)
        self._births.end_if_over(run)

    # ---- slots

    def admitted(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        self._make_room(len(slots))
        places = self._known.hold(keys, slots)
        strangers = [i for i, place in enumerate(places) if place is None]
        if strangers:
            self._meet(strangers, keys)
            met = self._known.hold([keys[i] for i in strangers], [slots[i] for i in strangers])
            for i, place in zip(strangers, met, strict=True):
                places[i] = place
        changed: dict[int, None] = {}
        start = 0
        while start < len(slots):
            run = self._known.run_of_ghost(places[start])
            changed[run] = None
            start = self._take_in(run, start, keys, slots, places)
        self._evictable += len(slots)
        for run in changed:
            self._leaves.settle(run)
            parent = self._runs.parent_of(run)
            if parent != NO_RUN:
                self._leaves.settle(parent)

    def _take_in(
        self, run: int, start: int, keys: Sequence[BlockKey], slots: Sequence[int], places: Sequence[int | None]
    ) -> int:
        """The blocks of a batch from `start` on that were the run's ghosts are in their slots, and their keys are these
        very objects from now on. Returns where they end."""
        runs = self._runs
        its_keys = runs.keys[run]
        depth = free = runs.next_depth(run)
        if depth >= len(its_keys) or its_keys[depth] != keys[start]:
            depth = its_keys.index(keys[start])
        end = min(len(keys), start + len(its_keys) - depth)
        some = tuple(keys[start:end])
        is_tail = depth >= free and its_keys[depth : depth + len(some)] == some
        if is_tail and self._known.are_ghosts_of(run, places[start:end]):
            runs.extend(run, slots[start:end], depth)
            runs.keys[run] = its_keys[:depth] + some + its_keys[depth + len(some) :]
            return end
        changed = list(its_keys)
        end, last = start, NO_SLOT
        while end < len(keys) and self._known.run_of_ghost(places[end]) == run:
            if depth >= len(its_keys) or its_keys[depth] != keys[end]:
                depth = its_keys.index(keys[end])
            changed[depth] = keys[end]
            runs.add(slots[end], run, depth, behind=last)
            last = slots[end]
            depth += 1
            end += 1
        runs.keys[run] = tuple(changed)
        return end

    def _meet(self, strangers: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """Blocks of which no prompt told, or so long ago that it was forgotten: each stretch of them is a prompt."""
        start = 0
        for end in range(1, len(strangers) + 1):
            if end < len(strangers) and strangers[end] == strangers[end - 1] + 1:
                continue
            self._told.strangers([keys[i] for i in strangers[start:end]], self._now_s())
            start = end

    def used(self, slots: Sequence[int]) -> None:
        """Prompts tell more."""

    def blocked(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._runs.block(slot)
        self._evictable -= len(slots)
        self._leaves.settle_slots(slots)

    def evictable(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._runs.unblock(slot)
        self._evictable += len(slots)
        self._leaves.settle_slots(slots)

    def removed(self, slots: Sequence[int]) -> None:
        runs = self._runs
        for slot in slots:
            run = runs.run_of[slot]
            key = runs.keys[run][runs.depth_of[slot]]
            self._evictable -= not runs.is_blocked(slot)
            parent = runs.remove(slot)
            self._known.let_go(run, *(([key], []) if self._births.follows(run) else ([], [key])), given_up=False)
            self._settle_after(run, parent)
        self._known.flush()

    def evict(self, count: int) -> list[int]:
        assert count <= self._evictable, f"evict {count} of {self._evictable} evictable slots"
        victims: list[int] = []
        while len(victims) < count:
            victims += self._give_up(count - len(victims))
        self._known.flush()
        return victims

    def choose(self, keys: Sequence[BlockKey], count: int) -> Choice:
        if self._judge.be_lru or count > self._evictable:
            return displace(self, keys, count)
        places = self._known.find(keys)
        run_of = [self._known.run_at(places[j]) if j in places else NO_RUN for j in range(len(keys))]
        newcomers = Newcomers(keys, run_of, self._runs, self._leaves.rank)
        victims: list[int] = []
        declined: list[BlockKey] = []
        while (wanted := count - len(victims) - len(declined)) > 0:
            new, held = newcomers.lowest_rank(), self._leaves.lowest_rank()
            if new is not None and held is not None and new <= held:
                declined += newcomers.take(wanted)
            else:
                victims += self._give_up(wanted)
        self._known.flush()
        return Choice(victims, frozenset(declined))

    def _give_up(self, most: int) -> list[int]:
        """Gives up one to `most` slots of the run that is worth least; `flush` is for the caller."""
        runs = self._runs
        run = self._leaves.worst(by_age=self._judge.be_lru)
        keys = runs.keys[run]
        if runs.is_leaf(run):
            slots, parent = runs.remove_tail(run, most)
        else:
            slots = [slot for slot in runs.from_deepest(run) if not runs.is_blocked(slot)][:most]
            parent = [runs.remove(slot) for slot in slots][-1]
        self._evictable -= len(slots)
        ghosts, forgotten = _remembered(keys, [runs.depth_of[slot] for slot in slots])
        if not self._births.follows(run):
            ghosts, forgotten = [], ghosts + forgotten
        self._known.let_go(run, ghosts, forgotten, given_up=True)
        self._settle_after(run, parent)
        return slots

    def _settle_after(self, run: int, parent: int) -> None:
        """A run holds less, and `parent`, if there is one, has one kid less by it."""
        self._leaves.settle(run)
        if parent != NO_RUN:
            self._leaves.settle(parent)
        self._births.end_if_over(run)

    def check(self) -> None:
        """Asserts what must hold between the parts. Scans everything: for tests and soaks."""
        runs = self._runs
        named = self._known.named()
        alive = [run for run, birth in enumerate(runs.birth) if birth >= 0]
        for run in alive:
            assert runs.named[run] == named[run], (run, runs.named[run], named[run])
            held = list(runs.from_deepest(run))
            depths = [runs.depth_of[slot] for slot in held]
            assert depths == sorted(set(depths), reverse=True), depths
            assert all(runs.run_of[slot] == run for slot in held), (run, held)
            evictable = sum(not runs.is_blocked(slot) for slot in held)
            assert runs.evictable[run] == evictable, (run, runs.evictable[run], evictable)
        assert not named.keys() - set(alive), named.keys() - set(alive)
        assert sum(runs.evictable[run] for run in alive) == self._evictable, self._evictable
        self._leaves.check(alive)
        self._births.check()


def _remembered(keys: Sequence[BlockKey], depths: Sequence[int]) -> tuple[list[BlockKey], list[BlockKey]]:
    """Of the blocks of a run at these depths, the deepest first: those that are remembered, and those that are not."""
    deepest, last = depths[0], len(keys) - 1
    shallowest = depths[-1]
    if deepest - shallowest >= len(depths):  # there are holes
        stay = [d for d in depths if d % _GHOST_EVERY == _GHOST_EVERY - 1 or d == last]
        return [keys[d] for d in stay], [keys[d] for d in depths if d not in stay]
    ghosts, forgotten = [], list(keys[shallowest : deepest + 1])
    if deepest == last:
        ghosts.append(forgotten.pop())
    every = slice((_GHOST_EVERY - 1 - shallowest) % _GHOST_EVERY, None, _GHOST_EVERY)
    ghosts += forgotten[every]
    del forgotten[every]
    return ghosts, forgotten
