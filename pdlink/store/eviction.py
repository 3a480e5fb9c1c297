"""Which record goes when something does not fit: eviction policies, and `Turns`, which has one of them for each class
of records.

A policy holds keys and sizes, never payload; it has no clock and no lock. Nobody tells it the capacity: `evict` is
only called when something does not fit, so what is resident then is the capacity.

`Adaptive` is the policy of a store. No fixed one is good at every size: S3-FIFO leads where a cache holds a few
hundredths of what comes again, LRU above a tenth (benchmarks/results/2026-11-23-tiers.md). A small simulation on
sampled keys tells which (Waldspurger et al., "Cache modeling and optimization using miniature simulations", ATC
2017), so a key costs about one policy.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from zlib import crc32

from pdlink.store.slots import DEFAULT_PRIORITY, HELD, KEPT, MIN_PRIORITY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdlink.store.slots import Retention

Key = bytes

MOST_USES = 3
"""Counted by `S3Fifo`. A key with uses is passed over as often."""
_SMALL_SHARE = 0.1
SAMPLED = 8
"""One key of so many is in the simulations."""
DECAY = 0.99968
"""Of the scores, with each sampled key used: half after 17,000 keys."""
_LEAD = 1.05
"""By how much another policy must hit more before it takes over."""


class EvictionPolicy(Protocol):
    """Decides which resident key goes next. A verb is O(1), amortised, plus the keys that `evict` must pass over.

    A request's keys are inserted and touched *suffix first*: the last chunk before the one it builds on. So the head
    of a prefix, without which the rest is worth nothing, is the newest, and no policy needs a tree.
    """

    def insert(self, key: Key, nbytes: int) -> None:
        """The key, which was not resident, is."""

    def touch(self, key: Key) -> None:
        """A resident key was used. Others are ignored."""

    def evict(self, may_evict: Callable[[Key], bool]) -> Key | None:
        """The key to drop, no longer resident when this returns; None if there is none.

        may_evict: False for keys that are leased or pinned. They are passed over and keep their places.
        """

    def remove(self, key: Key) -> None:
        """A key left for another reason than room (expired, corrupt, cleared). Unknown ones are ignored."""

    def __len__(self) -> int:
        """Resident keys."""


class KeyQueue:
    """Keys from oldest to newest, with their sizes: what policies are made of."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[Key, int] = OrderedDict()
        self.nbytes = 0

    def push(self, key: Key, nbytes: int) -> None:
        """As the newest; the key is not in here."""
        self._sizes[key] = nbytes
        self.nbytes += nbytes

    def pop(self, key: Key) -> int:
        """Take the key out; its size. Raises KeyError."""
        nbytes = self._sizes.pop(key)
        self.nbytes -= nbytes
        return nbytes

    def renew(self, key: Key) -> None:
        """Make it the newest. Raises KeyError."""
        self._sizes.move_to_end(key)

    def oldest(self, may_evict: Callable[[Key], bool]) -> Key | None:
        """The first key that may go."""
        return next(filter(may_evict, self._sizes), None)

    def trim(self, nbytes: int) -> None:
        """Forget the oldest until at most `nbytes` are left."""
        while self.nbytes > nbytes:
            self.nbytes -= self._sizes.popitem(last=False)[1]

    def __getitem__(self, key: Key) -> int:
        return self._sizes[key]

    def __contains__(self, key: Key) -> bool:
        return key in self._sizes

    def __iter__(self) -> Iterator[Key]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)


class Lru:
    """Least recently used first. Strong where the cache holds a good part of what comes again; a scan empties it."""

    def __init__(self) -> None:
        self._keys = KeyQueue()

    def insert(self, key: Key, nbytes: int) -> None:
        self._keys.push(key, nbytes)

    def touch(self, key: Key) -> None:
        if key in self._keys:
            self._keys.renew(key)

    def evict(self, may_evict: Callable[[Key], bool]) -> Key | None:
        victim = self._keys.oldest(may_evict)
        if victim is not None:
            self._keys.pop(victim)
        return victim

    def remove(self, key: Key) -> None:
        if key in self._keys:
            self._keys.pop(key)

    def __len__(self) -> int:
        return len(self._keys)


class S3Fifo:
    """A small queue in front of the main one, so that what is used once leaves early.

    Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023.

    `_SMALL_SHARE` of the bytes are on probation; a key used there goes on to the main queue, which is a CLOCK.

    A ghost queue remembers what left on probation, as much as the main queue's share; such a key comes back into the
    main queue.
    """

    def __init__(self) -> None:
        self._small, self._main, self._ghost = KeyQueue(), KeyQueue(), KeyQueue()
        self._uses: dict[Key, int] = {}

    def insert(self, key: Key, nbytes: int) -> None:
        self._uses[key] = 0
        if key in self._ghost:
            self._ghost.pop(key)
            self._main.push(key, nbytes)
        else:
            self._small.push(key, nbytes)

    def touch(self, key: Key) -> None:
        if key in self._uses:
            self._uses[key] = min(self._uses[key] + 1, MOST_USES)

    def evict(self, may_evict: Callable[[Key], bool]) -> Key | None:
        on_probation = self._small.nbytes >= _SMALL_SHARE * self._nbytes
        steps = (self._evict_small, self._evict_main, self._evict_small, self._evict_main)
        for step in steps if on_probation else steps[1:]:  # a step of the small queue may leave keys to the main one
            if (victim := step(may_evict)) is not None:
                return victim
        return None

    def _evict_main(self, may_evict: Callable[[Key], bool]) -> Key | None:
        victim = _second_chance(self._main, self._uses, may_evict)
        if victim is not None:
            self.remove(victim)
        return victim

    def _evict_small(self, may_evict: Callable[[Key], bool]) -> Key | None:
        used: list[Key] = []
        victim = None
        for key in filter(may_evict, self._small):
            if not self._uses[key]:
                victim = key
                break
            used.append(key)
        for key in used:
            self._uses[key] = 0
            self._main.push(key, self._small.pop(key))
        if victim is not None:
            del self._uses[victim]
            self._ghost.push(victim, self._small.pop(victim))
            self._ghost.trim(int((1 - _SMALL_SHARE) * self._nbytes))
        return victim

    def remove(self, key: Key) -> None:
        if key in self._uses:
            del self._uses[key]
            (self._small if key in self._small else self._main).pop(key)

    @property
    def _nbytes(self) -> int:
        return self._small.nbytes + self._main.nbytes

    def __len__(self) -> int:
        return len(self._uses)


def _second_chance(keys: KeyQueue, uses: dict[Key, int], may_evict: Callable[[Key], bool]) -> Key | None:
    """The first key without uses that may go. Those with uses before it lose one each and go to the end."""
    for _ in range(MOST_USES + 1):
        used: list[Key] = []
        victim = None
        for key in keys:
            if not may_evict(key):
                continue
            if not uses[key]:
                victim = key
                break
            uses[key] -= 1
            used.append(key)
        for key in used:
            keys.renew(key)
        if victim is not None or not used:
            return victim
    return None


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


class _Class(NamedTuple):
    priority: int
    tenant: str


class Turns:
    """Records with priorities, of tenants with a quota. Each class of them has a policy of its own.

    The lowest priority goes first, and within it the tenant that uses most. Of what sessions keep, what was used
    longest ago goes first, whatever the policy of others is: it tells how long their pauses are.
    """

    def __init__(self, policy: EvictionPolicy, *, quota_nbytes: int) -> None:
        """policy: of all records, as long as priorities and tenants are alike; others get one like it.

        quota_nbytes: of each tenant; 0 sets none. Where no tenant has one, all tenants are one.
        """
        self.quota_nbytes = quota_nbytes
        self.own_quotas_nbytes: dict[str, int] = {}
        """By tenant that has another one; 0 sets none."""
        self.used_nbytes: Counter[str] = Counter()
        """Of slots, by tenant."""
        self._usual = _Class(DEFAULT_PRIORITY, "")
        self._policies: dict[_Class, EvictionPolicy] = {self._usual: policy}
        self._class_of: dict[Key, _Class] = {}

    def __len__(self) -> int:
        return len(self._class_of)

    @property
    def by_tenant(self) -> bool:
        """Whether tenants are told apart. Records that are there when it changes are to be inserted again."""
        return bool(self.quota_nbytes or any(self.own_quotas_nbytes.values()))

    def insert(self, key: Key, nbytes: int, retention: Retention) -> None:
        kind = _Class(retention.priority, retention.tenant if self.by_tenant else "")
        self._class_of[key] = kind
        if kind not in self._policies:
            self._policies[kind] = Lru() if kind.priority >= HELD else type(self._policies[self._usual])()
        self._policies[kind].insert(key, nbytes)

    def touch(self, key: Key) -> None:
        """Unknown ones are ignored."""
        if key in self._class_of:
            self._policies[self._class_of[key]].touch(key)

    def remove(self, key: Key) -> None:
        """Unknown ones are ignored."""
        if key in self._class_of:
            kind = self._class_of.pop(key)
            self._policies[kind].remove(key)
            self._drop_if_empty(kind)

    def clear(self) -> tuple[list[EvictionPolicy], list[dict[Any, Any] | set[Any] | list[Any]]]:
        """No key is known any more, and nothing is used. What it had, as `Emptied` wants it."""
        was: list[EvictionPolicy] = list(self._policies.values())
        tables: list[dict[Any, Any] | set[Any] | list[Any]] = [self._class_of]
        self._policies = {self._usual: type(self._policies[self._usual])()}
        self._class_of = {}
        self.used_nbytes = Counter()
        return was, tables

    def quota_of(self, tenant: str) -> int:
        """In bytes; 0 for none."""
        return self.own_quotas_nbytes.get(tenant, self.quota_nbytes) if tenant else 0

    def room_in_quota(self, tenant: str, nbytes: int) -> bool:
        quota_nbytes = self.quota_of(tenant)
        return not quota_nbytes or self.used_nbytes[tenant] + nbytes <= quota_nbytes

    def give_back(self, tenant: str, nbytes: int) -> None:
        self.used_nbytes[tenant] -= nbytes
        if not self.used_nbytes[tenant]:
            del self.used_nbytes[tenant]

    def evict(
        self, may_evict: Callable[[Key], bool], tenant: str | None = None, *, from_priority: int = MIN_PRIORITY
    ) -> Key | None:
        """As `EvictionPolicy.evict`. tenant: only of that one. from_priority: no lower one. Costs a look at each
        class."""
        for kind in sorted(self._policies, key=lambda kind: (kind.priority, -self.used_nbytes[kind.tenant])):
            may_go = from_priority <= kind.priority < KEPT and tenant in (None, kind.tenant)
            key = self._policies[kind].evict(may_evict) if may_go else None
            if key is not None:
                del self._class_of[key]
                self._drop_if_empty(kind)
                return key
        return None

    def _drop_if_empty(self, kind: _Class) -> None:
        if kind != self._usual and not len(self._policies[kind]):
            del self._policies[kind]
