"""The worker from which the first token is expected soonest.

Before it come the tokens that the worker has to do already and those of the prompt that it lacks, each at the
worker's measured pace. For decode, what it lacks is transferred and takes room, and what it has slows its steps down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Pick
from .prefix import Prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..fleet import PlacementRequest, WorkerState


class Cost(Prefix):
    def pick(self, request: PlacementRequest, workers: Sequence[WorkerState], turn: int) -> Pick:
        cached, num_tokens = self.index.cached_tokens(request, workers), request.num_tokens
        costs = [
            (worker.load + num_tokens - tokens) * worker.slowness
            for worker, tokens in zip(workers, cached, strict=True)
        ]
        least = min(costs)
        equal = [index for index, cost in enumerate(costs) if cost == least]
        chosen = equal[turn % len(equal)]
        return Pick(workers[chosen], cached[chosen])
