"""The same beginning of a prompt to the same worker, as long as that one is not overloaded.

Rendezvous hashing: every router finds the same worker without a word to the others, and one that comes or goes moves
only its own share of the prompts.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from .base import Pick, Policy, mixed, within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..fleet import PlacementRequest, WorkerState

NUM_KEYS = 4
"""Of a prompt that count: more than most system prompts, which many requests have in common."""
BOUND = 1.25
"""Times the mean load. Source: consistent hashing with bounded loads, Mirrokni et al. 2018."""


class ConsistentHash(Policy):
    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        """Of the workers, by key."""

    def pick(self, request: PlacementRequest, workers: Sequence[WorkerState], turn: int) -> Pick:
        return Pick(self.rendezvous(self.name(request), within(workers, BOUND, request.num_tokens)))

    def name(self, request: PlacementRequest) -> bytes:
        """What goes to one worker."""
        keys = request.keys[:NUM_KEYS]
        return repr(keys[-1]).encode() if keys else request.prompt

    def rendezvous(self, name: bytes, workers: Sequence[WorkerState]) -> WorkerState:
        """The worker that this name draws."""
        number, numbers = _number(name), self._numbers
        for worker in workers:
            if worker.key not in numbers:  # its URL alone: a restarted worker keeps its share
                numbers[worker.key] = _number(worker.key.partition("#")[0].encode())
        return max(workers, key=lambda worker: mixed(number ^ numbers[worker.key]))

    def forget(self, key: str) -> None:
        self._numbers.pop(key, None)


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
