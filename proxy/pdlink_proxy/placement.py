"""Placement of a request: (request, fleet) -> placed, queued or refused. No I/O, no clock.

The fleet holds workers that may get requests; `pools.py` checks health and roles. Decode is chosen first, among the
workers with room for the request; then prefill, among the workers that can exchange KV with it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from .policies.base import Pick
from .policies.registry import make_policy

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from .fleet import Fleet, PlacementRequest, WorkerState
    from .policies.base import Policy


class Placed(NamedTuple):
    """Workers for a request."""

    prefill: WorkerState | None
    """None: decode computes the prompt."""
    decode: WorkerState
    cached_tokens: int = 0
    """Of the prompt, expected at the prefill worker."""
    misfit: bool = False
    """There is no prefill because no prefill worker exchanges KV with a decode worker."""


class Queued(NamedTuple):
    """Nobody can take it now."""

    reason: str
    empty: bool
    """There is no such worker; otherwise all are full."""


class Refused(NamedTuple):
    """The workers that could serve it do not let this proxy in, and will not before somebody mends that."""

    reason: str


Decision: TypeAlias = Placed | Queued | Refused


class Placer:
    """Places the requests of one proxy. The same calls give the same decisions."""

    def __init__(self, prefill: str, decode: str) -> None:
        """The policy of each leg, by name. Raises ConfigError."""
        self.prefill, self.decode = make_policy(prefill), make_policy(decode)
        self._turn = 0

    def place(self, request: PlacementRequest, fleet: Fleet, *, full: bool = False) -> Decision:
        """full: decode workers without room for it may get it, too."""
        missing = "decode" if not fleet.decode else "prefill" if fleet.needs_prefill and not fleet.prefill else ""
        if missing:
            reason = f"no healthy {missing} worker for model {request.model!r}; see /health"
            return Refused(reason) if missing in fleet.barred else Queued(reason, empty=True)
        turn = self._turn
        prefills, refused = _others(fleet.prefill, request.avoid), fleet.refused
        decodes = _others(fleet.decode, request.avoid)
        if not full:
            need = request.total_tokens
            decodes = [worker for worker in decodes if _has_room(worker, need)]
            if not decodes:
                return Queued(f"no decode worker has room for {need} tokens", empty=False)
        self._turn += 1
        if refused:
            decodes = [to for to in decodes if any((one.key, to.key) not in refused for one in prefills)] or decodes
        decode = self._pick(self.decode, request, decodes, _decode_turn(turn, len(prefills), len(decodes))).worker
        if refused:
            prefills = [one for one in prefills if (one.key, decode.key) not in refused]
        if not prefills:
            return Placed(None, decode, misfit=bool(fleet.prefill))
        prefill, cached_tokens = self._pick(self.prefill, request, prefills, turn)
        return Placed(prefill, decode, cached_tokens)

    def _pick(self, policy: Policy, request: PlacementRequest, workers: Sequence[WorkerState], turn: int) -> Pick:
        # Without a choice a prompt need not be hashed.
        return policy.pick(request, workers, turn) if len(workers) > 1 else Pick(workers[0])

    def sent(self, request: PlacementRequest, leg: str, worker: WorkerState) -> None:
        """A leg of the request leaves for the worker."""
        (self.prefill if leg == "prefill" else self.decode).placed(request, worker)

    def forget(self, key: str) -> None:
        """The process of this worker is gone."""
        self.prefill.forget(key)
        self.decode.forget(key)


def _others(workers: Sequence[WorkerState], avoid: Set[str]) -> Sequence[WorkerState]:
    return [worker for worker in workers if worker.key not in avoid] or workers if avoid else workers


def _has_room(worker: WorkerState, need: int) -> bool:
    room = worker.room_tokens
    # What does not fit into an idle worker will never fit, and the worker says so.
    return room is None or room >= need or worker.requests + worker.foreign == 0


def _decode_turn(turn: int, num_prefill: int, num_decode: int) -> int:
    """Decode's turn where prefill's is `turn`.

    With the same turn on both sides, two pools of equal size would always pair the same workers, and one bad worker
    on each side would spoil every pair. So decode slips by one whenever all pairs of the same turn have been.
    """
    if num_prefill == 0:
        return turn
    return turn + turn // math.lcm(num_prefill, num_decode) % math.gcd(num_prefill, num_decode)
