"""The worker that has the most of the prompt, as long as it is not overloaded.

Where the KV of prompts lies is what workers say, or else where prompts were sent: an approximation.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pdlink._index import Guesses

from ..table import Workers
from .base import Pick, Policy, least, within

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..fleet import PlacementRequest
    from ..table import WorkerState

BOUND = 1.25
"""Times the mean load."""
WORTH = 0.5
"""Share of the prompt that must be there; for less, as a system prompt that everybody has, nobody waits."""
MAX_KEYS = 500_000
"""Of all workers: 42 MB if no two workers share one (measured)."""
MAX_WORKER_KEYS = 8192
"""Of one: 4 million tokens."""
MAX_UNHEARD_KEYS = 256
"""Of one that publishes what it has: what was sent to it, and has not been computed yet."""


class Prefix(Policy):
    herds = affine = True

    def __init__(self) -> None:
        self.sent_to = Guesses(MAX_KEYS)

    def pick(self, request: PlacementRequest, workers: Sequence[WorkerState], turn: int) -> Pick:
        found = Workers.of(workers)
        allowed = within(found, BOUND, request.num_tokens)
        cached = np.array(self.expected(request, found))
        most = int(allowed.among(cached).max())
        if most < WORTH * request.num_tokens:
            return Pick(least(found, turn))
        return Pick(least(allowed.only(cached == most), turn), most)

    def expected(self, request: PlacementRequest, workers: Workers) -> Sequence[float]:
        keys, key_tokens = request.keys, request.key_tokens
        return workers.table.columns.cached(self.sent_to, keys, key_tokens, request.num_tokens, request.held)

    @property
    def placed(self) -> Callable[[PlacementRequest, WorkerState], int]:
        return partial(self.sent_to.placed, MAX_WORKER_KEYS, MAX_UNHEARD_KEYS)

    def forget(self, worker: WorkerState) -> None:
        self.sent_to.forget(worker.number)
