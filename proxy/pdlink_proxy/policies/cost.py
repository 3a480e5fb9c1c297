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

from pdlink._index import Costs

from ..table import Workers
from .base import MAX_SCORES, Pick
from .prefix import MAX_KEYS, Prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..fleet import PlacementRequest
    from ..table import WorkerState


class Cost(Prefix):
    def __init__(self) -> None:
        self.sent_to: Costs = Costs(MAX_KEYS)

    def pick(self, request: PlacementRequest, workers: Sequence[WorkerState], turn: int) -> Pick:
        found = workers if isinstance(workers, Workers) else Workers.of(workers)
        table = found.table
        row, cached, scores = table.columns.cheapest(
            self.sent_to,
            request.keys,
            request.key_tokens,
            request.num_tokens,
            request.held,
            request.behind,
            found.fit,
            turn,
            0 if request.considered is None else MAX_SCORES,
        )
        return Pick(table.states[row], cached, scores)
