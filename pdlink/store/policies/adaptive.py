"""The shadow leader: policies run on a sample of the keys, and the one that hit most lately decides about all.

No fixed policy is good at every size: S3-FIFO leads where a cache holds a few hundredths of what comes again, LRU
above a tenth (benchmarks/results/2026-11-23-tiers.md). A small simulation on sampled keys tells which (Waldspurger
et al., "Cache modeling and optimization using miniature simulations", ATC 2017), so a key costs about one policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

from .queues import Lru
from .s3fifo import S3Fifo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .base import EvictionPolicy, Key

SAMPLED = 8
"""One key of so many is in the simulations."""
DECAY = 0.99968
"""Of the scores, with each sampled key used: half after 17,000 keys."""
_LEAD = 1.05
"""By how much another policy must hit more before it takes over."""


class _Simulation:
    """One policy on sampled keys, as if the store followed it."""

    def __init__(self, make: Callable[[], EvictionPolicy]) -> None:
        self.make = make
        self.score = 0.0
        self._policy = make()
        self._sizes: dict[Key, int] = {}
        self._nbytes = 0

    def use(self, key: Key, nbytes: int, capacity_nbytes: float) -> bool:
        """A key is inserted or touched; whether it was there."""
        if key in self._sizes:
            self._policy.touch(key)
            return True
        while self._nbytes + nbytes > capacity_nbytes and (victim := self._policy.evict(_any)) is not None:
            self._nbytes -= self._sizes.pop(victim)
        self._policy.insert(key, nbytes)
        self._sizes[key] = nbytes
        self._nbytes += nbytes
        return False

    def remove(self, key: Key) -> None:
        if key in self._sizes:
            self._policy.remove(key)
            self._nbytes -= self._sizes.pop(key)


class Adaptive:
    """Evicts as the leading simulation's policy does.

    A new leader begins with no keys. Those of the one before come to it when they are used, and go first if not, so
    the change costs no pass over all keys. A simulation has its share of the store's capacity, which is the most that
    was ever resident.
    """

    def __init__(self, makers: Sequence[Callable[[], EvictionPolicy]] = (Lru, S3Fifo)) -> None:
        """makers: of the policies; the first one leads at first."""
        self._simulations = [_Simulation(make) for make in makers]
        self._leader = self._simulations[0]
        self._leading = self._leader.make()
        self._before: list[EvictionPolicy] = []
        """Of earlier leaders, oldest first; none is empty."""
        self._resident: dict[Key, tuple[int, EvictionPolicy]] = {}
        """Size, and which policy has the key."""
        self._nbytes = self._capacity_nbytes = 0
        self._worth = 1.0
        """Of a hit now. It grows, where the scores of before would shrink."""

    def insert(self, key: Key, nbytes: int) -> None:
        self._resident[key] = nbytes, self._leading
        self._leading.insert(key, nbytes)
        self._nbytes += nbytes
        self._capacity_nbytes = max(self._capacity_nbytes, self._nbytes)
        self._simulate(key, nbytes)

    def touch(self, key: Key) -> None:
        known = self._resident.get(key)
        if known is None:
            return
        nbytes, policy = known
        if policy is self._leading:
            policy.touch(key)
        else:
            self._take(policy, key)
            self._resident[key] = nbytes, self._leading
            self._leading.insert(key, nbytes)
        self._simulate(key, nbytes)

    def evict(self, may_evict: Callable[[Key], bool]) -> Key | None:
        for policy in (*self._before, self._leading):
            if (victim := policy.evict(may_evict)) is not None:
                self._nbytes -= self._resident.pop(victim)[0]
                self._drop_if_empty(policy)
                return victim
        return None

    def remove(self, key: Key) -> None:
        for simulation in self._simulations:
            simulation.remove(key)
        if known := self._resident.pop(key, None):
            self._nbytes -= known[0]
            self._take(known[1], key)

    def _take(self, policy: EvictionPolicy, key: Key) -> None:
        policy.remove(key)
        self._drop_if_empty(policy)

    def _drop_if_empty(self, policy: EvictionPolicy) -> None:
        if policy is not self._leading and not len(policy):
            self._before.remove(policy)

    def _simulate(self, key: Key, nbytes: int) -> None:
        if crc32(key) % SAMPLED:
            return
        self._worth /= DECAY
        for simulation in self._simulations:
            if simulation.use(key, nbytes, self._capacity_nbytes / SAMPLED):
                simulation.score += self._worth
        best = max(self._simulations, key=lambda simulation: simulation.score)
        if best.score > _LEAD * self._leader.score:
            self._leader = best
            if len(self._leading):
                self._before.append(self._leading)
            self._leading = best.make()
        if self._worth > 1e100:
            for simulation in self._simulations:
                simulation.score /= self._worth
            self._worth = 1.0

    def __len__(self) -> int:
        return len(self._resident)


def _any(_: Key) -> bool:
    return True
