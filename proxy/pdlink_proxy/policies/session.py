"""The requests of one session to one worker; others where the fewest tokens are to be done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..table import Workers
from .base import Pick, Policy, least, within
from .consistent_hash import rendezvous

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..fleet import PlacementRequest
    from ..table import WorkerState

BOUND = 2.0
"""Times the mean load. More than for prompts: a session that moves computes all of its prompt again."""


class Session(Policy):
    notes = False

    def pick(self, request: PlacementRequest, workers: Sequence[WorkerState], turn: int) -> Pick:
        found = Workers.of(workers)
        if not request.session:
            return Pick(least(found, turn))
        row = rendezvous(request.session.encode(), within(found, BOUND, request.num_tokens))
        return Pick(found.table.states[row])
