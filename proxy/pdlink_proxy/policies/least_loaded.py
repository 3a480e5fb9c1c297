"""The worker with the fewest tokens to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..table import Workers
from .base import Pick, Policy, least

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..fleet import PlacementRequest, WorkerState


class LeastLoaded(Policy):
    herds, notes = True, False

    def pick(self, request: PlacementRequest, workers: Sequence[WorkerState], turn: int) -> Pick:
        return Pick(least(Workers.of(workers), turn))
