"""Several routers before one fleet: each policy chooses among a few workers, so that routers do not herd.

All routers see the same least loaded worker, and all would send their next request there. Two workers drawn by chance
are enough to avoid that (Mitzenmacher 2001), and prompts of one beginning find each other all the same: the workers
that its beginnings draw are looked at, too, and the one that says it has most of it. Every router draws the same
ones, without a word. Whether they are too busy is the policy's to weigh.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..table import Workers
from .base import mixed
from .consistent_hash import rendezvous

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..fleet import PlacementRequest
    from ..table import WorkerState

NUM_BY_CHANCE = 2
NUM_KEYS = (1, 4, 16)
"""Of the beginnings of a prompt that draw a worker each."""


class Candidates:
    """Of one leg of one router."""

    def __init__(self, salt: int, *, affine: bool) -> None:
        """salt: another one in each router, or all would draw the same workers. affine: look at the worker that the
        beginning of the prompt draws."""
        self._salt, self._affine = mixed(salt + 1), affine

    def of(self, request: PlacementRequest, workers: Sequence[WorkerState], turn: int) -> Sequence[WorkerState]:
        """What the policy may choose from; never empty."""
        num = len(workers)
        if num <= NUM_BY_CHANCE:
            return workers
        number = mixed(self._salt ^ turn)
        first = number % num
        other = (first + 1 + (number >> 32) % (num - 1)) % num
        found = [workers[first], workers[other]]
        if self._affine:
            all_ = Workers.of(workers)
            drawn = [rendezvous(name, all_) for name in _names(request)]
            found += [worker for worker in dict.fromkeys(drawn) if worker not in found]
            if request.held:
                rows, fit = all_.table.rows, all_.fit
                there = [rows[key] for key in request.held if key in rows and (fit is None or fit[rows[key]])]
                most = max(
                    map(all_.table.states.__getitem__, there), key=lambda one: request.held[one.key], default=None
                )
                found += [most] if most is not None and most not in found else []
        return found


def _names(request: PlacementRequest) -> list[bytes]:
    """Of its beginnings, short to long: a chat has the first two in common with its next turn."""
    keys = request.keys
    return [repr(keys[num - 1]).encode() for num in NUM_KEYS if len(keys) >= num] or [request.prompt]
