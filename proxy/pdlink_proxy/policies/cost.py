"""The worker from which the first token is expected soonest.

Before it come the tokens that the worker has to do already and those of the prompt that it lacks, each at the
worker's measured pace; what it loads from below its device; and, where the way to the decode worker is longer than
from others, what the KV takes longer (`pair_times.py`). For decode, what it lacks is transferred and takes room, and
what it has slows its steps down.

What a worker computes pushes other KV out, sooner where it has computed more of late. So a worker that has no more to
do, and has computed less, gets the request instead if it costs little more: sessions with one system prompt would all
go where the first one went, until none of them finds its KV again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..table import Workers, least_of
from .base import Pick
from .prefix import Prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..fleet import PlacementRequest
    from ..table import WorkerState

SPARED = 16
"""What it is worth, in tokens computed, to compute a token where nothing was computed of late, and not where a whole
pool was: the session that loses its KV computes it again, and pushes out the next one's, with each of its turns."""
MARGIN = 0.25
"""Shares of a pool by which workers may differ: less is chance."""
POOL_TOKENS = 500_000
"""Of a worker that does not say."""
_MOST = 1e100


class Cost(Prefix):
    def __init__(self) -> None:
        super().__init__()
        self._unit = 1.0
        """Of `WorkerState.taken`: it grows with all that is computed, so that older KV counts less and less."""

    def pick(self, request: PlacementRequest, workers: Sequence[WorkerState], turn: int) -> Pick:
        found = workers if isinstance(workers, Workers) else Workers.of(workers)
        if found.few:
            return self._of_few(request, found, turn)
        table = found.table
        cached = self.index.cached_tokens(request, found)
        costs = (table.load + request.num_tokens - cached) * table.slowness
        for key, extra in _extras(request):
            if (late := table.rows.get(key)) is not None:
                costs[late] += extra
        taken = table.taken if found.fit is None else np.where(found.fit, table.taken, np.inf)
        row = found.least(np.where(costs == found.among(costs).min(), taken, np.inf), turn)
        busy = table.load * table.slowness
        other = int(np.where(busy <= busy[row], taken, np.inf).argmin())
        if self._spares(request.num_tokens - cached[row], taken[row] - taken[other], costs[other] - costs[row]):
            row = other
        return Pick(table.states[row], int(cached[row]), found.among(costs))

    def _of_few(self, request: PlacementRequest, workers: Workers, turn: int) -> Pick:
        """The same by lists."""
        table, num_tokens = workers.table, request.num_tokens
        loads, slowness, taken = table.load.tolist(), table.slowness.tolist(), table.taken.tolist()
        may_hold = request.keys or request.held
        cached = self.index.cached_of_few(request, workers) if may_hold else [0] * len(loads)
        costs = [(load + num_tokens - here) * slow for load, here, slow in zip(loads, cached, slowness, strict=True)]
        if request.loading or request.behind:
            for key, extra in _extras(request):
                if (late := table.rows.get(key)) is not None:
                    costs[late] += extra
        least = min(costs)
        if costs.count(least) == 1:
            row = costs.index(least)
        else:
            row = least_of([of if cost == least else math.inf for cost, of in zip(costs, taken, strict=True)], turn)
        if taken[row] > 0:
            busy = loads[row] * slowness[row]
            idle = [at for at in range(len(loads)) if loads[at] * slowness[at] <= busy]
            other = min(idle, key=taken.__getitem__)
            if self._spares(num_tokens - cached[row], taken[row] - taken[other], costs[other] - costs[row]):
                row = other
        return Pick(table.states[row], cached[row], costs)

    def _spares(self, lacking: float, more: float, costs_more: float) -> bool:
        """Whether to leave a worker that lacks so many tokens, and has computed more than another one."""
        return costs_more <= SPARED * lacking * (more / self._unit - MARGIN)

    def placed(self, request: PlacementRequest, worker: WorkerState) -> int:
        if request.chain is None:  # it was never looked up
            return 0
        lacking, table = request.num_tokens - self.index.note(request, worker), worker.table
        share = lacking / (worker.pool_tokens or POOL_TOKENS)
        worker.taken = taken = worker.taken + share * self._unit
        if table is not None:
            table.taken[worker.row] = taken
        self._unit *= 1 + share / (len(table.states) if table is not None else 1)
        if self._unit > _MOST and table is not None:
            for each in table.states:
                each.took(each.taken / self._unit)
            self._unit = 1.0
        return lacking


def _extras(request: PlacementRequest) -> list[tuple[str, float]]:
    """What comes to the costs of some workers, by their keys."""
    found = list(request.loading.items()) if request.loading else []
    if request.behind is not None:
        found += [(key, extra * request.num_tokens) for key, extra in request.behind.items()]
    return found
