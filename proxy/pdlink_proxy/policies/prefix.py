"""The worker that has the most of the prompt, as long as it is not overloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..table import Workers
from .base import Pick, Policy, least, within
from .prefix_index import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..fleet import PlacementRequest
    from ..table import WorkerState

BOUND = 1.25
"""Times the mean load."""
WORTH = 0.5
"""Share of the prompt that must be there; for less, as a system prompt that everybody has, nobody waits."""


class Prefix(Policy):
    herds = affine = True

    def __init__(self) -> None:
        self.index = PrefixIndex()

    def pick(self, request: PlacementRequest, workers: Sequence[WorkerState], turn: int) -> Pick:
        allowed = within(Workers.of(workers), BOUND, request.num_tokens)
        cached = self.index.cached_tokens(request, allowed)
        most = int(allowed.among(cached).max())
        if most < WORTH * request.num_tokens:
            return Pick(least(Workers.of(workers), turn))
        return Pick(least(allowed.only(cached == most), turn), most)

    def placed(self, request: PlacementRequest, worker: WorkerState) -> int:
        if request.chain is None:  # it was never looked up
            return 0
        return request.num_tokens - self.index.note(request, worker)

    def forget(self, key: str) -> None:
        self.index.forget(key)
