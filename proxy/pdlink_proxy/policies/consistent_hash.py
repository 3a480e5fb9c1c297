"""The same beginning of a prompt to the same worker, as long as that one is not overloaded.

Rendezvous hashing: every router finds the same worker without a word to the others, and one that comes or goes moves
only its own share of the prompts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..table import Workers, number_of
from .base import Pick, Policy, all_mixed, within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..fleet import PlacementRequest
    from ..table import WorkerState

NUM_KEYS = 4
"""Of a prompt that count: more than most system prompts, which many requests have in common."""
BOUND = 1.25
"""Times the mean load. Source: consistent hashing with bounded loads, Mirrokni et al. 2018."""


class ConsistentHash(Policy):
    notes = False

    def pick(self, request: PlacementRequest, workers: Sequence[WorkerState], turn: int) -> Pick:
        found = Workers.of(workers)
        return Pick(found.table.states[rendezvous(_name(request), within(found, BOUND, request.num_tokens))])


def rendezvous(name: bytes, workers: Workers) -> int:
    """The row of the worker that this name draws."""
    drawn = all_mixed(workers.table.names ^ np.uint64(number_of(name)))
    if workers.fit is not None:
        drawn[~workers.fit] = 0
    return int(drawn.argmax())


def _name(request: PlacementRequest) -> bytes:
    """What goes to one worker."""
    keys = request.keys[:NUM_KEYS]
    return repr(keys[-1]).encode() if keys else request.prompt
