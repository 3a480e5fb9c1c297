"""`Extents`: which bytes of an arena are taken. Numbers only; best fit, neighbours joined.

Records of one shape are equally long, so best fit gives them slots without gaps; those of another shape find room
again because free neighbours join.
"""

from __future__ import annotations

from bisect import bisect_left, insort

ALIGNMENT_NBYTES = 4096
"""Of every slot: what unbuffered files want."""


def whole_pages(nbytes: int) -> int:
    """What a slot of `nbytes` takes."""
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


class Extents:
    """Free ranges of [0, limit), in bytes."""

    def __init__(self) -> None:
        self.limit_nbytes = 0
        self.used_nbytes = 0
        self._end_of: dict[int, int] = {}
        """Begin to end of each free range; none touches another."""
        self._begin_of: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        """(nbytes, begin), ascending."""
        self._taken: dict[int, int] = {}
        """Begin to nbytes."""

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    def grow(self, limit_nbytes: int) -> None:
        """Free what lies from the old limit to this one."""
        begin, self.limit_nbytes = self.limit_nbytes, limit_nbytes // ALIGNMENT_NBYTES * ALIGNMENT_NBYTES
        if self.limit_nbytes < begin:
            raise ValueError(f"extents end at {begin} and cannot shrink to {limit_nbytes}")
        if self.limit_nbytes > begin:
            self._join(begin, self.limit_nbytes)

    def take(self, nbytes: int) -> int | None:
        """Begin of `nbytes`, rounded up to whole pages, in the smallest range that holds them; None if none does."""
        size = whole_pages(nbytes)
        at = bisect_left(self._by_size, (size, -1))
        if size <= 0 or at == len(self._by_size):
            return None
        _, begin = self._by_size[at]
        end = self._drop(begin)
        if begin + size < end:
            self._add(begin + size, end)
        self._taken[begin] = size
        self.used_nbytes += size
        return begin

    def give_back(self, begin: int) -> None:
        """Free what `take` gave. Raises KeyError if it did not, or has it back."""
        size = self._taken.pop(begin)
        self.used_nbytes -= size
        self._join(begin, begin + size)

    def check(self) -> None:
        """Raise AssertionError if free and taken ranges do not fill [0, limit) exactly."""
        ranges = sorted([*self._end_of.items(), *((begin, begin + size) for begin, size in self._taken.items())])
        edges = [0, *(end for _, end in ranges)]
        assert [begin for begin, _ in ranges] == edges[:-1], "ranges overlap or leave a gap"
        assert edges[-1] == self.limit_nbytes, f"ranges end at {edges[-1]}, not at {self.limit_nbytes}"
        assert not self._end_of.keys() & self._begin_of.keys(), "free neighbours are not joined"
        assert self._by_size == sorted((end - begin, begin) for begin, end in self._end_of.items())
        assert self.used_nbytes == sum(self._taken.values())

    def _join(self, begin: int, end: int) -> None:
        if begin in self._begin_of:
            begin = self._begin_of[begin]
            self._drop(begin)
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
