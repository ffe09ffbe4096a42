"""Blocks that ask for a slot, as runs: which of them are worth least."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from kvortex.cache.policies.adaptive.runs import NO_RUN, Runs
from kvortex.keys import BlockKey


class Newcomers:
    """The blocks of one store, given up from their prompts' tails."""

    def __init__(self, keys: Sequence[BlockKey], run_of: Sequence[int], runs: Runs, rank: Callable[[int], int]) -> None:
        """
        Args:
            keys: heads before tails.
            run_of: run of each key; NO_RUN where its prompt is not known.
        """
        self._blocks: dict[int, list[BlockKey]] = {}
        for key, run in zip(keys, run_of, strict=True):
            if run != NO_RUN:
                self._blocks.setdefault(run, []).append(key)
        self._parents = {run: runs.parent_of(run) for run in self._blocks}
        self._kids = dict.fromkeys(self._blocks, 0)
        for parent in self._parents.values():
            if parent in self._kids:
                self._kids[parent] += 1
        self._rank = rank
        # Of equal ranks, the one that stands behind goes first: it is the newer.
        self._order = {run: -number for number, run in enumerate(self._blocks)}
        self._tails: list[tuple[int, int, int]] = []
        for run, kids in self._kids.items():
            if not kids and runs.has_no_kids(run):
                self._push(run)

    def lowest_rank(self) -> int | None:
        """Of the runs on which no other hangs; None: there is none."""
        return self._tails[0][0] if self._tails else None

    def take(self, most: int) -> list[BlockKey]:
        """Up to `most` blocks of the run of lowest rank, tail first."""
        _, _, run = self._tails[0]
        blocks = self._blocks[run]
        taken = blocks[: -most - 1 : -1]
        del blocks[len(blocks) - len(taken) :]
        if not blocks:
            heapq.heappop(self._tails)
            parent = self._parents[run]
            if parent in self._kids:
                self._kids[parent] -= 1
                if not self._kids[parent]:
                    self._push(parent)
        return taken

    def _push(self, run: int) -> None:
        heapq.heappush(self._tails, (self._rank(run), self._order[run], run))
