"""Batches cut into runs that fit one slot. Pure.

They lie side by side in the slot, in the order of the batch; where a run does not fit, its rest begins the next slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.kv.layout import RunArray, RunList


class SlotRuns(NamedTuple):
    nbytes: int
    lists: list[tuple[int, int, RunArray]]
    """Source region, destination region, and runs [n, 3]: source offset, destination offset, nbytes."""


class RestOfBatch:
    """What is left of one batch. The runs are copied: they belong to the caller again."""

    def __init__(self, lists: Sequence[RunList]) -> None:
        """lists: all inside their regions."""
        self._left: list[tuple[int, int, RunArray]] = []
        self.nbytes = 0
        for one in reversed(lists):
            runs = one.runs[one.runs[:, 2] > 0]  # a copy
            if len(runs):
                runs[:, 0] += one.src_base
                runs[:, 1] += one.dst_base
                self._left.append((one.src_region, one.dst_region, runs))
                self.nbytes += int(runs[:, 2].sum())
        self._at = 0
        """Of the last list of `_left`: runs that were taken."""

    def take(self, most_nbytes: int, most_runs: int) -> SlotRuns:
        """The runs of the next slot; of no bytes if nothing is left."""
        taken: list[tuple[int, int, RunArray]] = []
        room_nbytes, room_runs = most_nbytes, most_runs
        while self._left and room_nbytes and room_runs:
            src_region, dst_region, runs = self._left[-1]
            window = runs[self._at : self._at + room_runs]
            ends = np.cumsum(window[:, 2])
            whole = int(np.searchsorted(ends, room_nbytes, side="right"))
            mine = window[:whole]
            if whole < len(window):  # the next one is cut, and its rest stays
                nbytes = room_nbytes - (int(ends[whole - 1]) if whole else 0)
                if nbytes:
                    mine = window[: whole + 1].copy()
                    mine[whole, 2] = nbytes
                    runs[self._at + whole] += (nbytes, nbytes, -nbytes)
            self._at += whole
            if self._at == len(runs):
                self._left.pop()
                self._at = 0
            if len(mine):
                taken.append((src_region, dst_region, mine))
                room_runs -= len(mine)
                room_nbytes -= int(mine[:, 2].sum())
            if whole < len(window):
                break
        nbytes = most_nbytes - room_nbytes
        self.nbytes -= nbytes
        return SlotRuns(nbytes, taken)


def starts(lengths: np.ndarray[tuple[int], np.dtype[np.int64]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Where runs of these lengths begin that lie side by side."""
    return np.cumsum(lengths) - lengths
