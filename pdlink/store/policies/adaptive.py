"""The shadow leader: several policies run on keys alone, and the one that hit most lately decides.

No fixed policy is good at every size: filters of admission lead where a cache holds a few hundredths of what comes
again, recency leads above a tenth (`pdlink bench replay`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .clock import Clock
from .lru import Lru
from .s3fifo import S3Fifo
from .w_tinylfu import WTinyLfu

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .base import Key, Policy

DECAY = 0.99996
"""Of the scores, with each key used: half after 17,000 of them."""


@dataclass(slots=True)
class _Entry:
    """A key that is resident, or would be under one of the policies."""

    nbytes: int
    resident: bool = False
    holders: int = 0
    """A bit for each shadow that holds it."""


@dataclass(slots=True)
class _Shadow:
    """One policy as if the store followed it."""

    policy: Policy
    bit: int
    nbytes: int = 0
    score: float = 0.0
    evicted: deque[Key] = field(default_factory=deque)
    """What it dropped, in order; also keys that came back or that the store does not hold."""


class Adaptive:
    """Evicts what the leading shadow has evicted already, and asks it where there is nothing of the kind.

    A shadow has the store's capacity, which is the most that was ever resident.
    """

    def __init__(self, policies: Sequence[Policy] = ()) -> None:
        policies = policies or (Lru(), Clock(), S3Fifo(0.3), WTinyLfu())
        self._shadows = [_Shadow(policy, 1 << index) for index, policy in enumerate(policies)]
        self._entries: dict[Key, _Entry] = {}
        self._num_resident = self._nbytes = self._capacity_nbytes = 0
        self._worth = 1.0
        """Of a hit now. It grows, where the scores of before would shrink."""

    def insert(self, key: Key, nbytes: int) -> None:
        entry = self._entries.setdefault(key, _Entry(nbytes))
        entry.resident = True
        self._num_resident += 1
        self._nbytes += entry.nbytes
        self._capacity_nbytes = max(self._capacity_nbytes, self._nbytes)
        self._use(key, entry)

    def touch(self, key: Key) -> None:
        entry = self._entries.get(key)
        if entry and entry.resident:
            self._use(key, entry)

    def evict(self, may_evict: Callable[[Key], bool]) -> Key | None:
        leader = max(self._shadows, key=lambda shadow: shadow.score)
        passed: list[Key] = []
        victim = None
        while leader.evicted and victim is None:
            key = leader.evicted.popleft()
            if self._is_dropped(key, leader):
                if may_evict(key):
                    victim = key
                else:
                    passed.append(key)
        leader.evicted.extendleft(reversed(passed))
        if victim is None:  # whatever is resident and was not dropped is held
            victim = self._drop(leader, lambda key: self._entries[key].resident and may_evict(key))
        if victim is not None:
            self._leave(victim)
        return victim

    def remove(self, key: Key) -> None:
        entry = self._entries.get(key)
        if entry is None:
            return
        for shadow in self._shadows:
            if entry.holders & shadow.bit:
                shadow.policy.remove(key)
                shadow.nbytes -= entry.nbytes
        entry.holders = 0
        if entry.resident:
            self._leave(key)
        else:
            del self._entries[key]

    def _use(self, key: Key, entry: _Entry) -> None:
        self._worth /= DECAY
        for shadow in self._shadows:
            if entry.holders & shadow.bit:
                shadow.score += self._worth
                shadow.policy.touch(key)
                continue
            while shadow.nbytes + entry.nbytes > self._capacity_nbytes:
                victim = self._drop(shadow, _any)
                if victim is None:
                    break
                shadow.evicted.append(victim)
            shadow.policy.insert(key, entry.nbytes)
            shadow.nbytes += entry.nbytes
            entry.holders |= shadow.bit
            if len(shadow.evicted) > 2 * self._num_resident + 64:
                shadow.evicted = deque(key for key in shadow.evicted if self._is_dropped(key, shadow))
        if self._worth > 1e100:
            for shadow in self._shadows:
                shadow.score /= self._worth
            self._worth = 1.0

    def _is_dropped(self, key: Key, shadow: _Shadow) -> bool:
        """Whether the store holds it and the shadow does not."""
        entry = self._entries.get(key)
        return entry is not None and entry.resident and not entry.holders & shadow.bit

    def _drop(self, shadow: _Shadow, may_evict: Callable[[Key], bool]) -> Key | None:
        victim = shadow.policy.evict(may_evict)
        if victim is not None:
            entry = self._entries[victim]
            shadow.nbytes -= entry.nbytes
            entry.holders &= ~shadow.bit
            if not entry.holders and not entry.resident:
                del self._entries[victim]
        return victim

    def _leave(self, key: Key) -> None:
        """The store gives it up."""
        entry = self._entries[key]
        entry.resident = False
        self._num_resident -= 1
        self._nbytes -= entry.nbytes
        if not entry.holders:
            del self._entries[key]

    def __len__(self) -> int:
        return self._num_resident


def _any(_: Key) -> bool:
    return True
