"""Numbers in ranks: the first to give up at hand, every change in constant time."""

from __future__ import annotations

from array import array

_NONE = -1


class Ranked:
    """A set of small numbers, each in one of `num_ranks` ranks and, there, in order of coming.

    Linked lists in arrays: an OrderedDict a rank takes several times the memory, and stands still when it grows.
    """

    def __init__(self, num_ranks: int) -> None:
        self._oldest = [_NONE] * num_ranks
        self._newest = [_NONE] * num_ranks
        self._filled = 0  # bit r: rank r is not empty
        self._rank = array("h")
        self._older = array("i")
        self._newer = array("i")

    def __contains__(self, number: int) -> bool:
        return number < len(self._rank) and self._rank[number] != _NONE

    def __bool__(self) -> bool:
        return self._filled != 0

    def put(self, number: int, rank: int) -> None:
        """Adds a number that is not here, as the newest of its rank."""
        ranks = self._rank
        if number >= len(ranks):
            more = number + 1 - len(ranks)
            for column in (self._rank, self._older, self._newer):
                column.extend([_NONE] * more)
        assert ranks[number] == _NONE, f"number {number} is in rank {ranks[number]}"
        ranks[number] = rank
        before = self._newest[rank]
        self._older[number] = before
        self._newer[number] = _NONE
        if before == _NONE:
            self._oldest[rank] = number
            self._filled |= 1 << rank
        else:
            self._newer[before] = number
        self._newest[rank] = number

    def discard(self, number: int) -> None:
        """Removes a number if it is here."""
        if number not in self:
            return
        rank = self._rank[number]
        self._rank[number] = _NONE
        older, newer = self._older[number], self._newer[number]
        if older == _NONE:
            self._oldest[rank] = newer
        else:
            self._newer[older] = newer
        if newer == _NONE:
            self._newest[rank] = older
        else:
            self._older[newer] = older
        if self._oldest[rank] == _NONE:
            self._filled &= ~(1 << rank)

    def filled_ranks(self) -> list[int]:
        """Those that are not empty."""
        return [rank for rank, oldest in enumerate(self._oldest) if oldest != _NONE]

    def oldest_of(self, rank: int) -> int:
        """Of a rank that is not empty, the one that came first."""
        return self._oldest[rank]

    def is_empty(self, rank: int) -> bool:
        return self._oldest[rank] == _NONE

    def lowest_rank(self) -> int:
        """The lowest rank that has any."""
        return (self._filled & -self._filled).bit_length() - 1

    def newest_of_lowest(self) -> int:
        """Of the lowest rank that has any, the one that came last."""
        return self._newest[self.lowest_rank()]

    def oldest_of_highest(self) -> int:
        """Of the highest rank that has any, the one that came first."""
        return self._oldest[self._filled.bit_length() - 1]
