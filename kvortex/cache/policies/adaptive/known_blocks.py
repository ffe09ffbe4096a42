"""Which run each block belongs to, of those held and of ghosts: blocks not held that are remembered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kvortex.cache.key_table import KeyTable
from kvortex.cache.policies.adaptive.runs import Runs
from kvortex.keys import BlockKey


class KnownBlocks:
    """Key -> place: a slot, or of a ghost, a negative number that tells its run and whether it was given up."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._places = KeyTable()
        self._held = 0
        self._ghosts: list[BlockKey] = []
        self._ghost_places: list[int] = []
        self._forgotten: list[BlockKey] = []

    @property
    def num_ghosts(self) -> int:
        return len(self._places) - self._held

    def find(self, keys: Sequence[BlockKey]) -> dict[int, int]:
        """Index in `keys` -> place, of those known."""
        return self._places.found(keys)

    def run_at(self, place: int) -> int:
        return self._runs.run_of[place] if place >= 0 else (-1 - place) >> 1

    def runs_at(self, places: Iterable[int]) -> list[int]:
        """The run of each place."""
        run_of = self._runs.run_of
        return [run_of[place] if place >= 0 else (-1 - place) >> 1 for place in places]

    def deepest(self, keys: Sequence[BlockKey]) -> tuple[int, int] | None:
        """Index in `keys` of the last one that is known, and its place. Costs those behind it."""
        for index in range(len(keys) - 1, -1, -1):
            if (place := self._places.get(keys[index])) is not None:
                return index, place
        return None

    @staticmethod
    def run_of_ghost(place: int | None) -> int:
        assert place is not None, "a block that is not known"
        assert place < 0, f"a block that is in slot {place} already"
        return (-1 - place) >> 1

    @staticmethod
    def are_ghosts_of(run: int, places: Sequence[int | None]) -> bool:
        return {_ghost(run), _ghost(run, given_up=True)}.issuperset(places)

    @staticmethod
    def was_given_up(place: int) -> bool:
        return place < 0 and (-1 - place) & 1 == 1

    def add_ghosts(self, keys: Sequence[BlockKey], run: int) -> None:
        """Keys not known so far are the run's, and not held."""
        self._places.add(keys, [_ghost(run)] * len(keys))
        self._runs.named[run] += len(keys)

    def move_ghosts(self, keys: Sequence[BlockKey], before: Sequence[int], after: Sequence[int]) -> None:
        """Ghosts belong to other runs: `after[i]` instead of `before[i]`."""
        self._places.move(keys, [_ghost(run) for run in after])
        named = self._runs.named
        for run in before:
            named[run] -= 1
        for run in after:
            named[run] += 1

    def moved(self, before: int, after: int, count: int) -> None:
        """So many blocks that are held went from run to run."""
        self._runs.named[before] -= count
        self._runs.named[after] += count

    def hold(self, keys: Sequence[BlockKey], slots: Sequence[int]) -> list[int | None]:
        """Ghosts are held from now on. Returns the place that each had; None for a key not known, which is left out."""
        # Keys given again are other objects than those the index holds; kept apart, they would take their bytes twice.
        places = self._places.replace(keys, slots)
        self._held += len(keys) - places.count(None)
        return places

    def let_go(self, run: int, ghosts: Sequence[BlockKey], forgotten: Sequence[BlockKey], *, given_up: bool) -> None:
        """Blocks of the run are held no more: some are ghosts, the others are not known any more."""
        self._ghosts += ghosts
        self._ghost_places += [_ghost(run, given_up=given_up)] * len(ghosts)
        self._forgotten += forgotten
        self._runs.named[run] -= len(forgotten)

    def flush(self) -> None:
        """Ends one or more `let_go`: nothing is to be looked for in between. Thousands of runs may give up together."""
        self._places.move(self._ghosts, self._ghost_places)
        self._places.remove(self._forgotten)
        self._held -= len(self._ghosts) + len(self._forgotten)
        self._ghosts, self._ghost_places, self._forgotten = [], [], []

    def forget_ghosts_of(self, run: int) -> None:
        keys = self._runs.keys[run]
        found = self.find(keys)
        # A key that a run lost and got back stands in it twice.
        gone = list(dict.fromkeys(keys[i] for i, place in found.items() if place < 0 and self.run_at(place) == run))
        self._places.remove(gone)
        self._runs.named[run] -= len(gone)

    def named(self) -> Counter[int]:
        """How many keys are known of each run. Scans all of them."""
        return Counter(self.run_at(place) for _, place in self._places.items())

    def not_given_up(self, found: Mapping[int, int]) -> int:
        """Of what `find` found: how many leading blocks are held, or were never given up. One that was never stored is
        nobody's fault."""
        for count, (index, place) in enumerate(found.items()):
            if index != count or self.was_given_up(place):
                return count
        return len(found)


def _ghost(run: int, *, given_up: bool = False) -> int:
    return -1 - (2 * run + given_up)
