"""Which worker a request goes to: pure functions of what is known about the candidates.

A policy never sees a worker that must not get requests; health and roles are `pools.py`'s business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple


class Candidate(NamedTuple):
    """One worker that may be chosen, at this moment."""

    key: str
    """Names the worker and its incarnation."""
    load: int
    """Requests it has: in flight from here, plus running and waiting by its own account. A request of ours is counted
    twice once the worker has reported it, for every worker alike."""


Policy = Callable[[Sequence[Candidate], int], Candidate]
"""(candidates, at least one; turn, which grows by one with every placement) -> the chosen one."""


def round_robin(candidates: Sequence[Candidate], turn: int) -> Candidate:
    """Each in its turn."""
    return candidates[turn % len(candidates)]


def least_loaded(candidates: Sequence[Candidate], turn: int) -> Candidate:
    """The one with the fewest requests. Equal ones take turns: else the first gets all requests of an idle pool."""
    least = min(candidate.load for candidate in candidates)
    return round_robin([candidate for candidate in candidates if candidate.load == least], turn)


POLICIES: dict[str, Policy] = {"round_robin": round_robin, "least_loaded": least_loaded}


def choose_pair(
    policy: Policy,
    prefill: Sequence[Candidate],
    decode: Sequence[Candidate],
    *,
    avoid: Set[str],
    turn: int,
    fits: Callable[[Candidate, Candidate], bool] = lambda _prefill, _decode: True,
) -> tuple[Candidate | None, Candidate | None]:
    """One worker for each leg, None where there is no candidate.

    avoid: keys that are taken only where there is no other. fits: whether KV goes from the one to the other; where
    it does for no pair, decode works alone.
    """
    prefill, decode = _others(prefill, avoid), _others(decode, avoid)
    if not decode:
        return (policy(prefill, turn) if prefill else None, None)
    fed = [candidate for candidate in decode if any(fits(other, candidate) for other in prefill)] or decode
    chosen = policy(fed, _decode_turn(turn, len(prefill), len(fed)))
    feeding = [candidate for candidate in prefill if fits(candidate, chosen)]
    return (policy(feeding, turn) if feeding else None, chosen)


def _decode_turn(turn: int, num_prefill: int, num_decode: int) -> int:
    """Decode's turn where prefill's is `turn`.

    With the same turn on both sides, two pools of equal size would always pair the same workers, and one bad worker
    on each side would spoil every pair. So decode slips by one whenever all pairs of the same turn have been.
    """
    if num_prefill == 0:
        return turn
    return turn + turn // math.lcm(num_prefill, num_decode) % math.gcd(num_prefill, num_decode)


def _others(candidates: Sequence[Candidate], avoid: Set[str]) -> Sequence[Candidate]:
    return [candidate for candidate in candidates if candidate.key not in avoid] or candidates
