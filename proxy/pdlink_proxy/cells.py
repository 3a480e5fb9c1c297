"""`Cells`: puts workers that name no cell into cells of bounded size. No I/O and no clock.

Each prefill worker may have a session with each decode worker of its cell. So the size of a cell bounds the sessions
of a worker, and with them descriptors, registered memory and handshakes: of 6,500 and 3,500 workers without cells
there are 22.7 million pairs.

A worker keeps its cell while it can: each move costs new sessions. Both sides are spread evenly over all cells, so
that none has workers of one side alone while there are enough of the other.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_FEWER = 0.75
"""Cells are given up when what is left fills the others to this share: one that comes and goes moves nobody."""


class Cells:
    """Of one proxy. Proxies with other histories may put a worker elsewhere: each then has cells of its own."""

    def __init__(self, size: int) -> None:
        """size: workers of one side in one cell; 0 makes no cells."""
        self._size = size
        self._cell: dict[str, int] = {}
        """By URL."""
        self._num = 1

    def allot(self, prefill: Sequence[str], decode: Sequence[str]) -> dict[str, str]:
        """The name of each worker's cell, by URL; all the same, and empty, where one cell is enough."""
        if not self._size:
            return {}
        most = max(len(prefill), len(decode))
        while most > self._num * self._size:
            self._num += 1
        while self._num > 1 and most <= (self._num - 1) * self._size * _FEWER:
            self._num -= 1
        present = {*prefill, *decode}
        self._cell = {url: cell for url, cell in self._cell.items() if url in present and cell < self._num}
        both = frozenset(prefill) & frozenset(decode)
        self._spread(prefill, frozenset())
        self._spread(decode, both)
        if self._num == 1:
            return dict.fromkeys(present, "")
        return {url: f"cell-{self._cell[url]}" for url in present}

    def _spread(self, urls: Sequence[str], settled: frozenset[str]) -> None:
        """Put each into the emptiest cell, and move as many as it takes to be even. settled: are not moved."""
        counts = Counter(dict.fromkeys(range(self._num), 0))
        for url in urls:
            if (cell := self._cell.get(url)) is not None:
                counts[cell] += 1
        for url in urls:
            if url not in self._cell:
                cell = min(range(self._num), key=lambda each: (counts[each], each))
                self._cell[url] = cell
                counts[cell] += 1
        for url in reversed(urls):
            if url in settled:
                continue
            cell, emptiest = self._cell[url], min(range(self._num), key=lambda each: (counts[each], each))
            if counts[cell] > counts[emptiest] + 1:
                self._cell[url] = emptiest
                counts[cell] -= 1
                counts[emptiest] += 1
