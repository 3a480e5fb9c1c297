"""The worker from which the first token is expected soonest.

Before it come the tokens that the worker has to do already and those of the prompt that it lacks, each at the
worker's measured pace; and, where the way to the decode worker is longer than from others, what the KV takes longer
(`pair_times.py`). For decode, what it lacks is transferred and takes room, and what it has slows its steps down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..table import Workers, least_of
from .base import Pick
from .prefix import Prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..fleet import PlacementRequest, WorkerState


class Cost(Prefix):
    def pick(self, request: PlacementRequest, workers: Sequence[WorkerState], turn: int) -> Pick:
        found = Workers.of(workers)
        table = found.table
        if found.few:
            return self._of_few(request, found, turn)
        cached = self.index.cached_tokens(request, found)
        costs = (table.load + request.num_tokens - cached) * table.slowness
        for key, extra in request.behind.items() if request.behind is not None else ():
            if (late := table.rows.get(key)) is not None:
                costs[late] += extra * request.num_tokens
        row = found.least(costs, turn)
        return Pick(table.states[row], int(cached[row]), found.among(costs))

    def _of_few(self, request: PlacementRequest, workers: Workers, turn: int) -> Pick:
        """The same by lists."""
        table, num_tokens = workers.table, request.num_tokens
        cached = self.index.cached_of_few(request, workers)
        pace = zip(table.load.tolist(), cached, table.slowness.tolist(), strict=True)
        costs = [(load + num_tokens - here) * slowness for load, here, slowness in pace]
        for key, extra in request.behind.items() if request.behind is not None else ():
            if (late := table.rows.get(key)) is not None:
                costs[late] += extra * num_tokens
        row = least_of(costs, turn)
        return Pick(table.states[row], cached[row], costs)
