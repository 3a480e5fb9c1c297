"""The worker from which the first token is expected soonest.

Before it come the tokens that the worker has to do already and those of the prompt that it lacks, each at the
worker's measured pace; what it loads from below its device; and, where the way to the decode worker is longer than
from others, what the KV takes longer (`pair_times.py`). For decode, what it lacks is transferred and takes room, and
what it has slows its steps down.

What a worker computes pushes other KV out, so among workers that cost nearly the same the one that computed less of
late is taken (`csrc/index/columns.h`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..table import Workers
from .base import MAX_SCORES, Pick
from .prefix import Prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..fleet import PlacementRequest
    from ..table import WorkerState

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
        keys, table = request.chain, found.table
        row, cached, scores = table.columns.cheapest(
            self.sent_to,
            request.keys if keys is None else keys,
            request.key_tokens,
            request.num_tokens,
            request.held,
            request.behind,
            self._unit,
            found.fit,
            turn,
            0 if request.considered is None else MAX_SCORES,
        )
        return Pick(table.states[row], cached, scores)

    def placed(self, request: PlacementRequest, worker: WorkerState) -> int:
        lacking, table = super().placed(request, worker), worker.table
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
