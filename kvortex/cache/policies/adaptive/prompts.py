"""What prompts and answers tell: old runs are hit and learnt from, new ones are born."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

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
        old: list[int] = []
        for j, place in known.items():
            # Blocks forgotten before a ghost were of its run.
            old.extend([self._known.run_at(place)] * (j + 1 - len(old)))
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
        known = self._known.find(keys)
        if not known:
            return
        runs = self._runs
        deepest = max(known)
        run = self._known.run_at(known[deepest])
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
        for j, place in known.items():
            if place >= 0:  # of equal keys, the object that is held already
                keys[j] = runs.keys[runs.run_of[place]][runs.depth_of[place]]
        changed: dict[int, None] = {}
        at: list[tuple[int, int]] = []  # of each block: its new run, and the depth there
        for run, part in self._bear(keys, old, visit):
            if part.start:
                runs.hang(run, *at[-1])
            changed[run] = None
            at.extend((run, depth) for depth in range(part.end - part.start))
        self._move(keys, known, at, changed)
        # What is left of old runs hangs on the last block taken from each.
        for run, (parent, depth) in dict(zip(old, at, strict=False)).items():
            changed[runs.hang(run, parent, depth)] = None
            changed[run] = None
        changed.pop(NO_RUN, None)
        for run in changed:
            self._leaves.settle(run)
            self._births.end_if_over(run)

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
        self, keys: Sequence[BlockKey], known: dict[int, int], at: Sequence[tuple[int, int]], changed: dict[int, None]
    ) -> None:
        """Files every block of a prompt under its new run; those held keep their slots."""
        runs = self._runs
        ghosts: list[int] = []
        held: list[int] = []
        before = {j: self._known.run_at(place) for j, place in known.items()}
        changed.update(dict.fromkeys(before.values()))
        for j, place in known.items():
            if place < 0:
                ghosts.append(j)
                continue
            held.append(j)
            blocked = runs.is_blocked(place)
            changed[runs.remove(place)] = None
            runs.add(place, *at[j], blocked=blocked)
        self._known.rename([before[j] for j in held], [at[j][0] for j in held])
        self._known.move_ghosts([keys[j] for j in ghosts], [before[j] for j in ghosts], [at[j][0] for j in ghosts])
        new: dict[int, list[BlockKey]] = {}
        for j, key in enumerate(keys):
            if j not in known:
                new.setdefault(at[j][0], []).append(key)
        for run, run_keys in new.items():
            self._known.add_ghosts(run_keys, run)

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
