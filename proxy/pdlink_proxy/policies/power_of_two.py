"""The less loaded of two workers drawn by chance.

For several routers in front of one fleet: the same least loaded worker, seen by all of them, would get a burst.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Pick, Policy, mixed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..fleet import PlacementRequest
    from ..table import WorkerState


class PowerOfTwo(Policy):
    notes = False

    def pick(self, request: PlacementRequest, workers: Sequence[WorkerState], turn: int) -> Pick:
        number, num = mixed(turn + 1), len(workers)
        first = number % num
        other = (first + 1 + (number >> 32) % (num - 1)) % num if num > 1 else first
        one, two = workers[first], workers[other]
        return Pick(one if one.load <= two.load else two)
