"""The requests of one session to one worker; others where the fewest tokens are to be done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Pick, least, within
from .consistent_hash import ConsistentHash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..fleet import PlacementRequest, WorkerState

BOUND = 2.0
"""Times the mean load. More than for prompts: a session that moves computes all of its prompt again."""


class Session(ConsistentHash):
    def pick(self, request: PlacementRequest, workers: Sequence[WorkerState], turn: int) -> Pick:
        if not request.session:
            return Pick(least(workers, turn))
        return Pick(self.rendezvous(request.session.encode(), within(workers, BOUND, request.num_tokens)))
