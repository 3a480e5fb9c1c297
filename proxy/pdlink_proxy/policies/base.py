"""What placement asks of a policy, and what several of them are made of."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..fleet import PlacementRequest, WorkerState


class Pick(NamedTuple):
    worker: WorkerState
    cached_tokens: int = 0
    """Tokens of the prompt whose KV the policy expects there."""


class Policy:
    """Chooses one worker for one leg. No I/O, no clock and no randomness but `turn`: the same calls give the same
    choices. Each leg of a proxy has a policy of its own."""

    def pick(self, request: PlacementRequest, workers: Sequence[WorkerState], turn: int) -> Pick:
        """One of `workers`, of which there is at least one, each fit to get the request. turn: grows by one with
        every placement."""
        raise NotImplementedError

    def placed(self, request: PlacementRequest, worker: WorkerState) -> None:
        """The request goes to `worker`: the policy's pick, or the only candidate."""

    def forget(self, key: str) -> None:
        """What the worker of this key held is gone with its process."""


_load = attrgetter("load")


def least(workers: Sequence[WorkerState], turn: int) -> WorkerState:
    """The one with the smallest load. Equal ones take turns: else the first gets all requests of an idle pool."""
    load = min(workers, key=_load).load
    equal = [worker for worker in workers if worker.load == load]
    return equal[turn % len(equal)]


def within(workers: Sequence[WorkerState], factor: float, tokens: int) -> Sequence[WorkerState]:
    """Those with at most `factor` times the mean load that the pool has with these `tokens`; never empty."""
    bound = factor * (sum(map(_load, workers)) + tokens) / len(workers)
    return [worker for worker in workers if worker.load <= bound]


def mixed(number: int) -> int:
    """64 bits that look random and are equal for equal numbers. Source: the finaliser of splitmix64."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return number ^ (number >> 31)
