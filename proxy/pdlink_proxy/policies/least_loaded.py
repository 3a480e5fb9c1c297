"""The worker with the fewest tokens to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..table import Workers
from .base import Pick, Policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..fleet import PlacementRequest
    from ..table import WorkerState


class LeastLoaded(Policy):
    herds, notes = True, False

    def pick(self, request: PlacementRequest, workers: Sequence[WorkerState], turn: int) -> Pick:
        found = workers if isinstance(workers, Workers) else Workers.of(workers)
        return Pick(found.table.states[found.table.columns.least(found.fit, turn)])
