"""What prompts and answers tell: old runs are hit and learnt from, new ones are born."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from kvortex.cache.policies.adaptive.births import Births
from kvortex.cache.policies.adaptive.facts import (
    NUM_FACTS,
    Cut,
    cut,
    facts_of,
    is_edge,
    pack,
    traits_of,
    with_output,
)
from kvortex.cache.policies.adaptive.hazard import HazardModel, age_bin
from kvortex.cache.policies.adaptive.known_blocks import KnownBlocks
from kvortex.cache.policies.adaptive.leaves import Leaves
from kvortex.cache.policies.adaptive.lru_judge import LRUJudge
from kvortex.cache.policies.adaptive.runs import NO_RUN, Runs, Visit
from kvortex.keys import BlockKey

_FIRST_OUTPUT_TOKENS: Final = 200.0
_OUTPUT_STEP: Final = 0.02
"""Share by which the mean length of answers follows each answer."""


class Stretch(NamedTuple):
    """Held blocks of a prompt from block `start` on; those of `run` from `depth` on, in order."""

    start: int
    slots: list[int]
    run: int
    depth: int


class Prompts:
    """Follows conversations, teaches the model, and gives each block its newest run. Shares the parts it is given."""

    def __init__(self, runs: Runs, births: Births, known: KnownBlocks, leaves: Leaves, judge: LRUJudge) -> None:
        self._runs = runs
        self._births = births
        self._known = known
        self._leaves = leaves
        self._judge = judge
        self._model = HazardModel(NUM_FACTS)
        self._now_s = -math.inf
        self._sessions = 0
        self._mean_log_output = math.log1p(_FIRST_OUTPUT_TOKENS)

    def prompt(self, keys: list[BlockKey], num_tokens: int, now_s: float) -> None:
        """A prompt of distinct blocks, at a time that is not before the last one."""
        self._let_time_pass(now_s)
        known = self._known.find(keys)
        old = self._known.runs_at(known.values())
        if old and (deepest := next(reversed(known))) >= len(old):
            of_known, old = old, []
            for j, run in zip(known, of_known, strict=True):
                # Blocks forgotten before a ghost were of its run.
                old.extend([run] * (j + 1 - len(old)))
            assert len(old) == deepest + 1, (len(old), deepest)
        visit = self._visit(old, len(keys), num_tokens)
        lru_prefix = self._learn_hits(old)
        self._judge.saw(self._known.not_given_up(known), lru_prefix, len(keys))
        self._rebirth(keys, known, old, visit)
        self._births.lru_gives_up()
        self._model.learn(self._now_s)

    def strangers(self, keys: list[BlockKey], now_s: float) -> None:
        """Blocks that are not known, head first: a prompt of which nothing else was told."""
        self._now_s = self._leaves.now_s = now_s
        self._rebirth(keys, {}, [], self._visit([], len(keys), 0))
        self._births.lru_gives_up()

    def answered(self, keys: Sequence[BlockKey], num_output_tokens: int) -> None:
        """A prompt's answer is complete; `keys` may go on with its blocks."""
        last = self._known.deepest(keys)
        if last is None:
            return
        runs = self._runs
        deepest, place = last
        run = self._known.run_at(place)
        visit = runs.visit[run]
        if visit.answered:
            return
        visit.answered = True
        visit.output_tokens = num_output_tokens
        self._mean_log_output += _OUTPUT_STEP * (math.log1p(num_output_tokens) - self._mean_log_output)
        answer = list(dict.fromkeys(keys[deepest + 1 :]))
        if answer and self._births.follows(run) and runs.keys[run][-1] == keys[deepest]:
            runs.keys[run] += tuple(answer)
            self._known.add_ghosts(answer, run)
            self._births.grew(run, len(answer))
            self._births.lru_gives_up()
        self._reconsider(visit)

    def _reconsider(self, visit: Visit) -> None:
        """The length of the answer is known: its prompt's runs are worth something else."""
        runs, births = self._runs, self._births
        followed = range(max(visit.first_birth, births.first), visit.first_birth + visit.num_runs)
        again = [run for run in map(births.at, followed) if runs.facts[run]]
        for run in again:
            traits = traits_of(visit, runs.uses[run], is_edge=is_edge(runs.facts[run]))
            runs.class_[run] = self._model.class_of(traits)
        if again:
            self._set_worth(again, [with_output(runs.facts[run], visit.output_tokens) for run in again])
            for run in again:
                self._leaves.rerank(run)

    def _visit(self, old: Sequence[int], num_blocks: int, num_tokens: int) -> Visit:
        """What this prompt is in its conversation: it goes on with one if it has over half of its last prompt."""
        birth = self._births.end
        last = self._runs.visit[old[-1]] if old else None
        if last is None or len(old) * 2 <= last.num_blocks:
            self._sessions += 1
            guess = math.expm1(self._mean_log_output)
            return Visit(self._sessions, 0, 0.0, 0.0, num_blocks, num_tokens, 0.0, guess, birth)
        gap_s = max(1.0, self._now_s - self._runs.born_s[old[-1]])
        logs = last.sum_log_gaps + math.log(gap_s)
        added = max(0.0, num_tokens - last.num_tokens - last.output_tokens)
        guess = last.output_tokens
        return Visit(last.session, last.turn + 1, gap_s, logs, num_blocks, num_tokens, added, guess, birth)

    def _learn_hits(self, old: Sequence[int]) -> int:
        """Old runs are asked for: events for the model. Returns the prefix that LRU would have held, in blocks."""
        runs = self._runs
        lru_prefix, in_lru = 0, True
        end = 0
        while end < len(old):
            start, run = end, old[end]
            while end < len(old) and old[end] == run:
                end += 1
            in_lru = in_lru and runs.in_lru[run]
            if in_lru:
                lru_prefix = end
            blocks = min(end - start, runs.waiting[run])
            if blocks:
                bin_ = age_bin(self._now_s - runs.born_s[run])
                self._model.saw(runs.facts[run], bin_, hit=True, blocks=blocks, class_=runs.class_[run])
                self._births.hit(run, blocks)
        return lru_prefix

    # ---- births: a prompt's blocks become new runs

    def _rebirth(self, keys: list[BlockKey], known: dict[int, int], old: Sequence[int], visit: Visit) -> None:
        runs = self._runs
        held = self._held(known)
        for stretch in held:  # of equal keys, the objects that are held already
            j, depth, count = stretch.start, stretch.depth, len(stretch.slots)
            keys[j : j + count] = runs.keys[stretch.run][depth : depth + count]
        born = self._bear(keys, old, visit)
        changed: dict[int, None] = {}
        for (before, part), (run, _) in pairwise(born):
            runs.hang(run, before, part.end - part.start - 1)
        changed.update(dict.fromkeys(run for run, _ in born))
        self._move(keys, known, held, born, changed)
        # What is left of old runs hangs on the last block taken from each.
        starts = [part.start for _, part in born]
        for run, j in {run: j for j, run in enumerate(old)}.items():
            new, part = born[bisect_right(starts, j) - 1]
            changed[runs.hang(run, new, j - part.start)] = None
            changed[run] = None
        changed.pop(NO_RUN, None)
        for run in changed:
            self._leaves.settle(run)
            self._births.end_if_over(run)

    def _held(self, known: dict[int, int]) -> list[Stretch]:
        """Those of a prompt's blocks that are held, in stretches that lie one behind the other in one run."""
        run_of, depth_of = self._runs.run_of, self._runs.depth_of
        stretches: list[Stretch] = []
        slots: list[int] = []
        next_index = next_depth = -1
        run = NO_RUN
        for j, place in known.items():
            if place < 0:
                continue
            depth = depth_of[place]
            if j != next_index or depth != next_depth or run_of[place] != run:
                run, slots = run_of[place], []
                stretches.append(Stretch(j, slots, run, depth))
            slots.append(place)
            next_index, next_depth = j + 1, depth + 1
        return stretches

    def _bear(self, keys: Sequence[BlockKey], old: Sequence[int], visit: Visit) -> list[tuple[int, Cut]]:
        runs = self._runs
        told = {
            run: (runs.uses[run] + 1, runs.sessions[run] + (runs.visit[run].session != visit.session))
            for run in dict.fromkeys(old)
        }
        history = [told[run] for run in old]
        born: list[tuple[int, Cut]] = []
        facts: list[tuple[float, ...]] = []
        for part in cut(history, len(keys)):
            run_keys = tuple(keys[part.start : part.end])
            run = runs.new(self._births.end, self._now_s, visit, run_keys, uses=part.uses, sessions=part.sessions)
            self._births.add(run)
            runs.class_[run] = self._model.class_of(traits_of(visit, part.uses, is_edge=part.is_edge))
            facts.append(facts_of(visit, part, len(old)))
            born.append((run, part))
        visit.num_runs = len(born)
        self._set_worth([run for run, _ in born], facts)
        return born

    def _move(
        self,
        keys: Sequence[BlockKey],
        known: dict[int, int],
        held: Sequence[Stretch],
        born: Sequence[tuple[int, Cut]],
        changed: dict[int, None],
    ) -> None:
        """Files every block of a prompt under its new run; those held keep their slots."""
        runs = self._runs
        before = self._known.runs_at(known.values())
        changed.update(dict.fromkeys(before))
        ghosts = [(j, run) for (j, place), run in zip(known.items(), before, strict=True) if place < 0]
        starts = [part.start for _, part in born]
        for stretch in held:
            start, end = stretch.start, stretch.start + len(stretch.slots)
            j = start
            while j < end:
                run, part = born[bisect_right(starts, j) - 1]
                some = stretch.slots[j - start : part.end - start]
                changed[runs.move(some, run, j - part.start)] = None
                self._known.moved(stretch.run, run, len(some))
                j += len(some)
        if ghosts:
            after = [born[bisect_right(starts, j) - 1][0] for j, _ in ghosts]
            self._known.move_ghosts([keys[j] for j, _ in ghosts], [run for _, run in ghosts], after)
        num_known = next(reversed(known)) + 1 if known else 0  # with those forgotten in between
        for run, part in born:
            new = keys[part.start : part.end]
            if part.start < num_known:
                new = [key for j, key in enumerate(new, part.start) if j not in known]
            if new:
                self._known.add_ghosts(new, run)

    def _set_worth(self, some: Sequence[int], facts: Sequence[tuple[float, ...]]) -> None:
        runs = self._runs
        worth = self._model.worth(facts, [runs.class_[run] for run in some])
        for i, run in enumerate(some):
            runs.facts[run] = pack(facts[i])
            runs.worth[run] = worth[i].tobytes()

    # ---- time

    def _let_time_pass(self, now_s: float) -> None:
        self._now_s = self._leaves.now_s = now_s
        runs, saw, rerank = self._runs, self._model.saw, self._leaves.rerank
        waiting, facts, class_ = runs.waiting, runs.facts, runs.class_
        for run, bin_ in self._births.crossings(self._now_s):
            if blocks := waiting[run]:
                saw(facts[run], bin_, hit=False, blocks=blocks, class_=class_[run])
            rerank(run)
