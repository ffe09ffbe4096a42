"""Runs: blocks of one prompt, in a row, that share a history. Which slots each holds, and which hang on which.

    prompt 1   A B C D      run 0: A B C D
    prompt 2   A B X Y      run 1: A B (asked for twice)      run 2: X Y, hangs on B      run 0: C D, hangs on B

A run is the unit of learning and of eviction: a cache of a million blocks has far fewer of them. Columns of plain
values rather than an object a run, so that the garbage collector has little to walk through.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvortex.keys import BlockKey

NO_RUN: Final = -1
NO_SLOT: Final = -1


@dataclass(slots=True)
class Visit:
    """One prompt, and what came before it in its conversation. Shared by the runs cut from it.

    Attributes:
        turn: 0 for the first prompt of a conversation.
        gap_s: since the prompt before, at least 1; 0 for the first.
        sum_log_gaps: of all gaps of the conversation so far.
        num_blocks: complete blocks of the prompt.
        num_tokens: of the prompt.
        added_tokens: those that neither the prompt before nor its answer had; 0 for the first.
        output_tokens: of the answer; a guess until `answered`.
        first_birth, num_runs: the births of its runs.
    """

    session: int
    turn: int
    gap_s: float
    sum_log_gaps: float
    num_blocks: int
    num_tokens: int
    added_tokens: float
    output_tokens: float
    first_birth: int
    num_runs: int = 0
    answered: bool = False


class Runs:
    """The table of runs, by number; numbers are used again. `runs.uses[run]` is one value of one run."""

    def __init__(self, num_slots: int) -> None:
        self._unused: list[int] = []
        self.birth: list[int] = []
        """Counts runs since the start: tells a run from a later one of the same number."""
        self.born_s: list[float] = []
        self.visit: list[Visit] = []
        self.keys: list[tuple[BlockKey, ...]] = []
        self.uses: list[int] = []
        self.sessions: list[int] = []
        """How many conversations have asked for it."""
        self.facts: list[bytes] = []
        self.worth: list[bytes] = []
        """float32 at each edge of the age bins."""
        self.class_: list[int] = []
        self.age_bin: list[int] = []
        self.waiting: list[int] = []
        """Blocks not asked for since, held or not."""
        self.named: list[int] = []
        """Keys that are known as this run's, held or not."""
        self.in_lru: list[bool] = []
        """Whether LRU in a cache of the same size would still hold it."""
        self.deepest: list[int] = []
        """The slot of the deepest block held."""
        self.evictable: list[int] = []
        """Slots held that have no pin."""
        self._parent: list[int] = []
        self._parent_birth: list[int] = []
        self._parent_depth: list[int] = []
        self._kids: list[int] = []
        self._kids_depth: list[int] = []
        self._columns: list[list[Any]] = [
            *(self.birth, self.born_s, self.visit, self.keys, self.uses, self.sessions, self.facts, self.worth),
            *(self.class_, self.age_bin, self.waiting, self.named, self.in_lru, self.deepest, self.evictable),
            *(self._parent, self._parent_birth, self._parent_depth, self._kids, self._kids_depth),
        ]
        # One more than there are slots: NO_SLOT, -1, may be written to, and is never to be given up.
        self.run_of = array("i", [NO_RUN]) * (num_slots + 1)
        self.depth_of = array("i", [0]) * (num_slots + 1)
        """Index of a slot's block in its run."""
        self._deeper = array("i", [NO_SLOT]) * (num_slots + 1)
        self._shallower = array("i", [NO_SLOT]) * (num_slots + 1)
        self._blocked = bytearray(num_slots) + b"\1"

    # ---- runs

    def new(
        self, birth: int, born_s: float, visit: Visit, keys: tuple[BlockKey, ...], *, uses: int, sessions: int
    ) -> int:
        """A run that holds no slot and hangs nowhere; all its blocks wait to be asked for."""
        values = (
            *(birth, born_s, visit, keys, uses, sessions, b"", b"", 0, 0, len(keys), 0, True, NO_SLOT, 0),
            *(NO_RUN, 0, 0, 0, 0),
        )
        if self._unused:
            run = self._unused.pop()
            for column, value in zip(self._columns, values, strict=True):
                column[run] = value
        else:
            run = len(self.birth)
            for column, value in zip(self._columns, values, strict=True):
                column.append(value)
        return run

    def release(self, run: int) -> None:
        """Ends a run that holds no slot."""
        assert self.deepest[run] == NO_SLOT, f"run {run} holds slot {self.deepest[run]}"
        self.birth[run] = -1
        self.forget_facts(run)
        self._unused.append(run)

    def forget_facts(self, run: int) -> None:
        """Drops what is of no use once none of the run's blocks is waited for."""
        self.keys[run] = ()
        self.facts[run] = self.worth[run] = b""

    def hang(self, run: int, parent: int, depth: int) -> int:
        """From now on `run` follows the block at `depth` of `parent`. Returns the run it hung on before, if that
        has one kid less, else NO_RUN."""
        before = self._drop_from_parent(run) if self.deepest[run] != NO_SLOT else NO_RUN
        self._parent[run] = parent
        self._parent_birth[run] = self.birth[parent]
        self._parent_depth[run] = depth
        if self.deepest[run] != NO_SLOT:
            self._add_to_parent(run)
        return before

    def parent_of(self, run: int) -> int:
        """The run it hangs on, if that is still there, else NO_RUN."""
        parent = self._parent[run]
        return parent if parent != NO_RUN and self.birth[parent] == self._parent_birth[run] else NO_RUN

    def has_no_kids(self, run: int) -> bool:
        """Whether no held run hangs on it."""
        return not self._kids[run]

    def is_leaf(self, run: int) -> bool:
        """Whether the deepest block held may go: no pin on it, and no held run hangs on it or deeper."""
        slot = self.deepest[run]
        if slot == NO_SLOT or self._blocked[slot]:
            return False
        return not self._kids[run] or self.depth_of[slot] > self._kids_depth[run]

    # ---- slots

    def is_blocked(self, slot: int) -> bool:
        return self._blocked[slot] != 0

    def add(self, slot: int, run: int, depth: int, *, blocked: bool = False, behind: int = NO_SLOT) -> None:
        """The run's block at `depth` is in `slot`. Constant time for blocks that come head first, or right behind the
        slot that `behind` guesses."""
        assert self.run_of[slot] == NO_RUN, f"slot {slot} is in run {self.run_of[slot]} already"
        self.run_of[slot] = run
        self.depth_of[slot] = depth
        self._blocked[slot] = blocked
        self.evictable[run] += not blocked
        first = self.deepest[run] == NO_SLOT
        deeper, shallower = NO_SLOT, self.deepest[run]
        if behind != NO_SLOT and self.run_of[behind] == run and self.depth_of[behind] < depth:
            next_deeper = self._deeper[behind]
            if next_deeper != NO_SLOT and self.depth_of[next_deeper] > depth:
                deeper, shallower = next_deeper, behind
        while shallower != NO_SLOT and self.depth_of[shallower] > depth:
            deeper, shallower = shallower, self._shallower[shallower]
        self._deeper[slot] = deeper
        self._shallower[slot] = shallower
        if shallower != NO_SLOT:
            self._deeper[shallower] = slot
        if deeper != NO_SLOT:
            self._shallower[deeper] = slot
        else:
            self.deepest[run] = slot
        if first:
            self._add_to_parent(run)

    def next_depth(self, run: int) -> int:
        """One deeper than its deepest block held."""
        slot = self.deepest[run]
        return 0 if slot == NO_SLOT else self.depth_of[slot] + 1

    def extend(self, run: int, slots: Sequence[int], depth: int) -> None:
        """The run's blocks from `depth` on are in these slots, head first; it holds none that is as deep."""
        run_of, depth_of = self.run_of, self.depth_of
        deeper_of, shallower_of = self._deeper, self._shallower
        last = first = self.deepest[run]
        assert first == NO_SLOT or depth_of[first] < depth, (run, depth_of[first], depth)
        for slot in slots:
            assert run_of[slot] == NO_RUN, f"slot {slot} is in run {run_of[slot]} already"
            run_of[slot] = run
            depth_of[slot] = depth
            depth += 1
            shallower_of[slot] = last
            deeper_of[last] = slot
            last = slot
        deeper_of[last] = NO_SLOT
        self.deepest[run] = last
        self.evictable[run] += len(slots)
        if first == NO_SLOT:
            self._add_to_parent(run)

    def remove(self, slot: int) -> int:
        """The slot holds no block of its run any more. Returns the run that has one kid less by it, else NO_RUN."""
        run = self.run_of[slot]
        assert run != NO_RUN, f"slot {slot} is in no run"
        self.run_of[slot] = NO_RUN
        self.evictable[run] -= not self._blocked[slot]
        self._blocked[slot] = 0
        deeper, shallower = self._deeper[slot], self._shallower[slot]
        if deeper == NO_SLOT:
            self.deepest[run] = shallower
        else:
            self._shallower[deeper] = shallower
        if shallower != NO_SLOT:
            self._deeper[shallower] = deeper
        return self._drop_from_parent(run) if self.deepest[run] == NO_SLOT else NO_RUN

    def move(self, slots: Sequence[int], run: int, depth: int) -> int:
        """`remove` and `add` for each of these slots, head first: they go to `depth` and on of a run that holds nothing
        as deep, pins and all. Returns the run that has one kid less by it, else NO_RUN.

        Args:
            slots: of one run, each one deeper there than the one before it.
        """
        # A run gets its parent with its first block and loses it with its last: in this order, whatever the length.
        first, *rest = slots
        blocked = self._blocked
        is_blocked = blocked[first] != 0
        parent = self.remove(first)
        self.add(first, run, depth, blocked=is_blocked)
        if not rest:
            return parent
        run_of, depth_of = self.run_of, self.depth_of
        deeper_of, shallower_of = self._deeper, self._shallower
        before = run_of[rest[0]]
        evictable = 0
        for slot in rest:
            depth += 1
            assert run_of[slot] == before, f"slot {slot} is in run {run_of[slot]}, not {before}"
            run_of[slot] = run
            depth_of[slot] = depth
            evictable += not blocked[slot]
        self.evictable[before] -= evictable
        self.evictable[run] += evictable
        # Among themselves they are linked already.
        head, tail = rest[0], rest[-1]
        deeper, shallower = deeper_of[tail], shallower_of[head]
        if deeper == NO_SLOT:
            self.deepest[before] = shallower
        else:
            shallower_of[deeper] = shallower
        if shallower != NO_SLOT:
            deeper_of[shallower] = deeper
        deeper_of[first], shallower_of[head] = head, first
        deeper_of[tail] = NO_SLOT
        self.deepest[run] = tail
        return self._drop_from_parent(before) if self.deepest[before] == NO_SLOT else NO_RUN

    def remove_tail(self, run: int, count: int) -> tuple[list[int], int]:
        """The same for up to `count` slots of a leaf, tail first: down to a pin, or to what a kid hangs on. Returns
        them, and the run that has one kid less by it."""
        run_of, shallower_of, blocked, depth_of = self.run_of, self._shallower, self._blocked, self.depth_of
        floor = self._kids_depth[run] if self._kids[run] else -1
        slots: list[int] = []
        slot = self.deepest[run]
        while count and not blocked[slot] and depth_of[slot] > floor:
            slots.append(slot)
            run_of[slot] = NO_RUN
            slot = shallower_of[slot]
            count -= 1
        self.evictable[run] -= len(slots)
        self.deepest[run] = slot
        self._deeper[slot] = NO_SLOT
        return slots, self._drop_from_parent(run) if slot == NO_SLOT else NO_RUN

    def block(self, slot: int) -> None:
        run = self.run_of[slot]
        assert run != NO_RUN, f"slot {slot} is not evictable"
        assert not self._blocked[slot], f"slot {slot} is blocked already"
        self._blocked[slot] = 1
        self.evictable[run] -= 1

    def unblock(self, slot: int) -> None:
        assert self._blocked[slot], f"slot {slot} is not blocked"
        self._blocked[slot] = 0
        self.evictable[self.run_of[slot]] += 1

    def from_deepest(self, run: int) -> Iterator[int]:
        """The slots held, tail first."""
        slot = self.deepest[run]
        while slot != NO_SLOT:
            yield slot
            slot = self._shallower[slot]

    # ---- inside

    def _add_to_parent(self, run: int) -> None:
        parent = self.parent_of(run)
        if parent == NO_RUN:
            return
        self._kids_depth[parent] = max(self._kids_depth[parent] if self._kids[parent] else 0, self._parent_depth[run])
        self._kids[parent] += 1

    def _drop_from_parent(self, run: int) -> int:
        parent = self.parent_of(run)
        if parent != NO_RUN:
            self._kids[parent] -= 1
        return parent
