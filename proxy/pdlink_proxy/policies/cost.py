"""The worker from which the first token is expected soonest.

Before it come the tokens that the worker has to do already and those of the prompt that it lacks, each at the
worker's measured pace; and, where the way to the decode worker is longer than from others, what the KV takes longer
(`pair_times.py`). For decode, what it lacks is transferred and takes room, and what it has slows its steps down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..table import Workers
from .base import Pick
from .prefix import Prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..fleet import PlacementRequest, WorkerState


class Cost(Prefix):
    def pick(self, request: PlacementRequest, workers: Sequence[WorkerState], turn: int) -> Pick:
        found = Workers.of(workers)
        table, cached = found.table, self.index.cached_tokens(request, found)
        costs = (table.load + request.num_tokens - cached) * table.slowness
        for key, extra in request.behind.items() if request.behind is not None else ():
            if (late := table.rows.get(key)) is not None:
                costs[late] += extra * request.num_tokens
        row = found.least(costs, turn)
        return Pick(table.states[row], int(cached[row]), found.among(costs))
