"""Placement policies: pure functions that choose a worker among candidates.

`pools.py` checks health and roles first: every candidate may get the request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple


class Candidate(NamedTuple):
    """One worker that may be chosen now."""

    key: str
    """Names the worker and its incarnation."""
    load: int
    """Its requests: in flight from here, plus running and waiting as it reports. A request of ours counts twice once
    the worker has reported it, for every worker alike."""


Policy = Callable[[Sequence[Candidate], int], Candidate]
"""(at least one candidate, turn) -> the chosen one. The turn grows by one with every placement."""


def round_robin(candidates: Sequence[Candidate], turn: int) -> Candidate:
    """The candidates in turn."""
    return candidates[turn % len(candidates)]


def least_loaded(candidates: Sequence[Candidate], turn: int) -> Candidate:
    """The candidate with the fewest requests. Equal ones take turns, or the first would get all of an idle pool."""
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
    """One worker for each leg, None if it has no candidate.

    avoid: keys to take only if there is no other. fits: whether the pair can exchange KV; if no pair can, decode
    works alone.
    """
    prefill, decode = _others(prefill, avoid), _others(decode, avoid)
    if not decode:
        return (policy(prefill, turn) if prefill else None, None)
    fed = [candidate for candidate in decode if any(fits(other, candidate) for other in prefill)] or decode
    chosen = policy(fed, _decode_turn(turn, len(prefill), len(fed)))
    feeding = [candidate for candidate in prefill if fits(candidate, chosen)]
    return (policy(feeding, turn) if feeding else None, chosen)


def _decode_turn(turn: int, num_prefill: int, num_decode: int) -> int:
    """Decode's turn if prefill's is `turn`.

    With equal turns, two pools of equal size would always pair the same workers, and one bad worker on each side
    could spoil every pair. So decode slips by one after each full round.
    """
    if num_prefill == 0:
        return turn
    return turn + turn // math.lcm(num_prefill, num_decode) % math.gcd(num_prefill, num_decode)


def _others(candidates: Sequence[Candidate], avoid: Set[str]) -> Sequence[Candidate]:
    return [candidate for candidate in candidates if candidate.key not in avoid] or candidates
