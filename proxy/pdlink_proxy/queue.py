"""Requests that wait for a worker: bounded, in fair shares, without starvation. No I/O and no clock.

A request that finds no room is passed by later ones that do, until they have taken as many tokens as it asks for, or
for `PATIENCE_S`. Then the requests of its model wait behind it, and room gathers.

A *share* is all that one API key asks of one model. Shares that wait get tokens in proportion to their weights
(start-time fair queueing, Goyal et al. 1996). Within a share a request of priority p stands as if it had come p times
`PRIORITY_S` later: lower is earlier, as in vLLM, and the oldest request is first in the end.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PRIORITY_S = 10.0
MAX_PRIORITY = 8
PATIENCE_S = 20.0
"""A request that has been passed for so long lets no other one of its model pass. Long enough that small requests
need not stand still for each long answer that a large one waits for; a third of the default `queue_timeout_s`."""
LOOK = 128
"""Requests of a share that may pass: further ones are not looked at."""
MAX_RETRY_AFTER_S = 60
_SMOOTH = 0.1
_FEW_SHARES = 64


@dataclass(slots=True, eq=False)
class Waiting:
    """One request in the queue."""

    tenant: str
    model: str
    tokens: int
    """What it takes of its share."""
    since_s: float
    item: Any = None
    """The caller's."""
    priority: int = 0
    kind: object = None
    """Where one of this kind and model found no worker, one with as many tokens or more finds none."""
    passed_s: float | None = None
    """When it was first passed by another one."""
    passed_tokens: int = 0
    """Of the requests that passed it."""
    place: tuple[float, int] | None = None
    """In its share, while it waits: lower is earlier."""

    @property
    def share(self) -> tuple[str, str]:
        return self.tenant, self.model

    def lets_pass(self, now: float) -> bool:
        """Whether others may go before it."""
        late = self.passed_s is not None and now - self.passed_s >= PATIENCE_S
        return not late and self.passed_tokens < self.tokens


@dataclass(slots=True)
class Queue:
    """Everything that waits."""

    size: int
    weights: Mapping[str, float] = field(default_factory=dict)
    """By API key or model; both count, and 1 for others."""
    divided: bool = False
    """There are several keys: each takes at most as many places as are free, so that one alone has half of them, and
    none keeps the others out."""
    finish: dict[tuple[str, str], float] = field(default_factory=dict)
    """By share, the virtual time at which it has had its due."""
    virtual: float = 0.0
    _shares: dict[tuple[str, str], list[Waiting]] = field(default_factory=dict)
    """By share, its requests, the first one first; none is empty."""
    _of_tenant: Counter[str] = field(default_factory=Counter)
    """How many wait."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    num: int = 0
    """How many wait: the same as `len`, which costs a call."""
    _pace_s: float = 0.0
    """Mean time between two requests that leave for a worker."""
    _served_s: float | None = None

    def __len__(self) -> int:
        return self.num

    def passes(self, model: str) -> bool:
        """Whether a request of this model may try for workers before it waits: nobody waits, or the queue is full of
        requests of others."""
        return not self.num or (self.num >= self.size and all(share[1] != model for share in self._shares))

    def put(self, waiting: Waiting) -> bool:
        """Let a request wait; False if the queue is full."""
        if self.num >= self.size:
            return False
        if self.divided and self._of_tenant[waiting.tenant] >= self.size - self.num:
            return False
        if not self.num:
            self.finish.clear()  # nobody waited: nobody has a claim
            self.virtual = 0.0
            self._served_s = None
        priority = max(-MAX_PRIORITY, min(MAX_PRIORITY, waiting.priority))
        waiting.place = waiting.since_s + priority * PRIORITY_S, next(self._numbers)
        if waiting.share not in self._shares:
            self.finish[waiting.share] = max(self.virtual, self.finish.get(waiting.share, 0.0))
        bisect.insort(self._shares.setdefault(waiting.share, []), waiting, key=_place)
        self.num += 1
        self._of_tenant[waiting.tenant] += 1
        return True

    def remove(self, waiting: Waiting) -> None:
        """It waits no more. Nothing if it did not."""
        if waiting.place is None:
            return
        share = self._shares[waiting.share]
        del share[bisect.bisect_left(share, waiting.place, key=_place)]
        if not share:
            del self._shares[waiting.share]
        waiting.place = None
        self.num -= 1
        self._of_tenant[waiting.tenant] -= 1
        if not self._of_tenant[waiting.tenant]:
            del self._of_tenant[waiting.tenant]

    def serve(self, take: Callable[[Waiting], bool], now: float) -> bool:
        """Offer workers to those who wait, the most deserving first, until one takes; False if nobody did.

        take: whether there is a worker for this request, which then leaves the queue.
        """
        closed: set[str] = set()
        passed: dict[str, list[Waiting]] = {}
        """By model."""
        least: dict[tuple[str, object], int] = {}
        """By model and kind, tokens for which there is no worker."""
        for share in sorted(self._shares, key=self.finish.__getitem__):
            model = share[1]
            for waiting in self._shares[share][:LOOK]:
                if model in closed:
                    break
                if waiting.tokens < least.get((model, waiting.kind), math.inf):
                    if take(waiting):
                        for other in passed.get(model, ()):
                            other.passed_s = now if other.passed_s is None else other.passed_s
                            other.passed_tokens += waiting.tokens
                        self._serve(waiting, now)
                        return True
                    least[model, waiting.kind] = waiting.tokens
                if not waiting.lets_pass(now):
                    closed.add(model)
                passed.setdefault(model, []).append(waiting)
        return False

    def retry_after_s(self) -> int:
        """When a new request would find the queue empty, at the present pace."""
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(self.num * self._pace_s)))

    def _serve(self, waiting: Waiting, now: float) -> None:
        share = waiting.share
        weights = sum(map(self._weight, self._shares)) or self._weight(share)  # it may have left: it failed, or ended
        start = self.finish[share]
        self.finish[share] = start + waiting.tokens / self._weight(share)
        # Time goes on although each request may come under a new key: else the others would starve.
        self.virtual = max(start, self.virtual + waiting.tokens / weights)
        if self._served_s is not None:
            self._pace_s += _SMOOTH * (now - self._served_s - self._pace_s) if self._pace_s else now - self._served_s
        self._served_s = now
        self.remove(waiting)
        if len(self.finish) > 2 * self.num + _FEW_SHARES:  # forget those with no more than a new one would have
            self.finish = {
                share: finish
                for share, finish in self.finish.items()
                if finish > self.virtual or share in self._shares
            }

    def _weight(self, share: tuple[str, str]) -> float:
        tenant, model = share
        return self.weights.get(tenant, 1.0) * self.weights.get(model, 1.0)


def _place(waiting: Waiting) -> tuple[float, int]:
    assert waiting.place is not None
    return waiting.place
