"""Each worker in its turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Pick, Policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..fleet import PlacementRequest
    from ..table import WorkerState


class RoundRobin(Policy):
    notes = False

    def pick(self, request: PlacementRequest, workers: Sequence[WorkerState], turn: int) -> Pick:
        return Pick(workers[turn % len(workers)])
