"""What placement asks of a policy, and what several of them are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..fleet import PlacementRequest
    from ..table import Names, Workers, WorkerState

MAX_SCORES = 8
"""Of a decision, that are kept."""


class Pick(NamedTuple):
    worker: WorkerState
    cached_tokens: int = 0
    """Tokens of the prompt whose KV the policy expects there."""
    scores: Sequence[tuple[int, float]] = ()
    """Of the best candidates, the lowest first: the row of each and what the policy weighs; without them the policy
    goes by their loads."""


class Policy:
    """Chooses one worker for one leg. No I/O, no clock and no randomness but `turn`: the same calls give the same
    choices. Each leg of a proxy has a policy of its own."""

    herds = False
    """Routers that see the same loads choose the same worker: several of them must not look at all workers."""
    notes = True
    """It has `placed`: False saves a call for each leg."""
    affine = False
    """It looks for the KV of a prompt's beginning."""

    def pick(self, request: PlacementRequest, workers: Sequence[WorkerState], turn: int) -> Pick:
        """One of `workers`, of which there is at least one, each fit to get the request. turn: grows by one with
        every placement. `Workers.of` them gives columns, where a loop over thousands would take too long."""
        raise NotImplementedError

    def expected(self, request: PlacementRequest, workers: Workers) -> Sequence[float] | None:
        """By row of their table, tokens of the prompt that each is expected to have; None from a policy that does not
        know."""
        return None

    def placed(self, request: PlacementRequest, worker: WorkerState) -> int:
        """The request goes to `worker`: the policy's pick, or the only candidate. Returns how many tokens of the
        prompt the worker lacks; 0 from a policy that does not know."""
        return 0

    def forget(self, worker: WorkerState) -> None:
        """What the worker held is gone with its process."""


def least(workers: Workers, turn: int) -> WorkerState:
    """The one with the smallest load; equal ones take turns."""
    return workers.table.states[workers.table.columns.least(workers.fit, turn)]


def within(workers: Workers, factor: float, tokens: int) -> Workers:
    """Those with at most `factor` times the mean load that the pool has with these `tokens`; never empty."""
    load = workers.table.columns.load
    bound = factor * (float(workers.among(load).sum()) + tokens) / len(workers)
    return workers.only(load <= bound)


def mixed(number: int) -> int:
    """64 bits that look random and are equal for equal numbers. Source: the finaliser of splitmix64."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return number ^ (number >> 31)


def all_mixed(numbers: Names) -> Names:
    """`mixed` of each."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
