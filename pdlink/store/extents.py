"""`Extents`: which bytes of an arena are taken. Numbers only; best fit, neighbours joined.

Records of one shape are equally long, so best fit gives them slots without gaps; those of another shape find room
again because free neighbours join.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

ALIGNMENT_NBYTES = 4096
"""Of every slot: what unbuffered files want."""


def whole_pages(nbytes: int) -> int:
    """What a slot of `nbytes` takes."""
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


class Extents:
    """Free ranges of [0, limit), in bytes. What was taken before the limit was lowered stays taken."""

    def __init__(self) -> None:
        self.limit_nbytes = 0
        """Where slots end at most; it may change at any time."""
        self.used_nbytes = 0
        self._end_nbytes = 0
        """Nothing is taken from there on."""
        self._end_of: dict[int, int] = {}
        """Begin to end of each free range before that; none touches another."""
        self._begin_of: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        """(nbytes, begin), ascending."""
        self._taken: dict[int, int] = {}
        """Begin to nbytes."""

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    def take(self, nbytes: int) -> int | None:
        """Begin of `nbytes`, rounded up to whole pages, in the smallest range that holds them; None if none does."""
        size = whole_pages(nbytes)
        if size <= 0:
            return None
        begin = self._smallest(size)
        if begin is None:
            return None
        if begin == self._end_nbytes:
            self._end_nbytes += size
        else:
            end = self._drop(begin)
            if begin + size < end:
                self._add(begin + size, end)
        self._taken[begin] = size
        self.used_nbytes += size
        return begin

    def _smallest(self, size: int) -> int | None:
        """Begin of the smallest free range that holds so much below the limit."""
        last_nbytes = self.limit_nbytes - self._end_nbytes
        for nbytes, begin in islice(self._by_size, bisect_left(self._by_size, (size, -1)), None):
            if size <= last_nbytes < nbytes:
                break
            if begin + size <= self.limit_nbytes:
                return begin
        return self._end_nbytes if size <= last_nbytes else None

    def give_back(self, begin: int) -> None:
        """Free what `take` gave. Raises KeyError if it did not, or has it back."""
        size = self._taken.pop(begin)
        self.used_nbytes -= size
        self._join(begin, begin + size)

    @property
    def tables(self) -> tuple[dict[int, int] | list[tuple[int, int]], ...]:
        """What takes memory, of one that nobody uses any more."""
        return self._taken, self._end_of, self._begin_of, self._by_size

    def only(self, begins: Iterable[int]) -> Extents:
        """The same with only these ranges taken. Costs a sort of them."""
        kept = Extents()
        kept.limit_nbytes = self.limit_nbytes
        for begin in sorted(begins):
            size = kept._taken[begin] = self._taken[begin]
            if begin > kept._end_nbytes:
                kept._add(kept._end_nbytes, begin)
            kept._end_nbytes = begin + size
            kept.used_nbytes += size
        return kept

    def check(self) -> None:
        """Raise AssertionError if free and taken ranges do not fill everything up to the last one that is taken."""
        ranges = sorted([*self._end_of.items(), *((begin, begin + size) for begin, size in self._taken.items())])
        edges = [0, *(end for _, end in ranges)]
        assert [begin for begin, _ in ranges] == edges[:-1], "ranges overlap or leave a gap"
        assert edges[-1] == self._end_nbytes, f"ranges end at {edges[-1]}, not at {self._end_nbytes}"
        assert self._end_nbytes not in self._begin_of, "the last range is not joined"
        assert not self._end_of.keys() & self._begin_of.keys(), "free neighbours are not joined"
        assert self._by_size == sorted((end - begin, begin) for begin, end in self._end_of.items())
        assert self.used_nbytes == sum(self._taken.values())

    def _join(self, begin: int, end: int) -> None:
        if begin in self._begin_of:
            begin = self._begin_of[begin]
            self._drop(begin)
        if end == self._end_nbytes:
            self._end_nbytes = begin
            return
        if end in self._end_of:
            end = self._drop(end)
        self._add(begin, end)

    def _add(self, begin: int, end: int) -> None:
        self._end_of[begin], self._begin_of[end] = end, begin
        insort(self._by_size, (end - begin, begin))

    def _drop(self, begin: int) -> int:
        end = self._end_of.pop(begin)
        del self._begin_of[end]
        del self._by_size[bisect_left(self._by_size, (end - begin, begin))]
        return end
