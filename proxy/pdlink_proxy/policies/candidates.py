"""Several routers before one fleet: each policy chooses among a few workers, so that routers do not herd.

All routers see the same least loaded worker, and all would send their next request there. Two workers drawn by chance
are enough to avoid that (Mitzenmacher 2001), and prompts of one beginning find each other all the same: the workers
that its beginnings draw are looked at, too, and the one that says it has most of it. Every router draws the same
ones, without a word. Whether they are too busy is the policy's to weigh.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..table import Workers
from .base import mixed
from .consistent_hash import rendezvous

if TYPE_CHECKING:
    from ..fleet import PlacementRequest

NUM_BY_CHANCE = 2
NUM_KEYS = (1, 4, 16)
"""Of the beginnings of a prompt that draw a worker each."""


class Candidates:
    """Of one leg of one router."""

    def __init__(self, salt: int, *, affine: bool) -> None:
        """salt: another one in each router, or all would draw the same workers. affine: look at the worker that the
        beginning of the prompt draws."""
        self._salt, self._affine = mixed(salt + 1), affine

    def of(self, request: PlacementRequest, workers: Workers, turn: int) -> Workers:
        """What the policy may choose from; never empty."""
        num, table = workers.num, workers.table
        if num <= NUM_BY_CHANCE:
            return workers
        number = mixed(self._salt ^ turn)
        first = number % num
        rows = [int(workers.rows[first]), int(workers.rows[(first + 1 + (number >> 32) % (num - 1)) % num])]
        if self._affine:
            rows += [rendezvous(name, workers) for name in _names(request)]
            if request.held:
                said = np.array(table.columns.held(request.held))
                if workers.fit is not None:
                    said[~workers.fit] = 0
                rows += [int(said.argmax())] if said.any() else []
        mask = np.zeros(len(table.states), np.bool_)
        mask[rows] = True
        return Workers(table, mask)


def _names(request: PlacementRequest) -> list[bytes]:
    """Of its beginnings, short to long: a chat has the first two in common with its next turn."""
    keys = request.keys
    return [repr(keys[num - 1]).encode() for num in NUM_KEYS if len(keys) >= num] or [request.prompt]
