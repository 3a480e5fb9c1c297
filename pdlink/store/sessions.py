"""`SessionHolds`: which records agents' sessions keep, until their deadlines, in a quota. Pure: no clock, no lock.

A session keeps the records of its last turn, also before they are written. A record that only memory has is not
evicted. A record that a tier below has, too, leaves memory after all others, that of the longest pause first. The
tier drops none of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from pdlink.store.interface import SessionState
from pdlink.store.slots import HELD, KEPT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_SESSIONS, MAX_OF_TENANT = 16384, 4096
"""A session more keeps nothing: its turns are served all the same."""
_MOST_DUE = 64
"""Deadlines that one call looks at: some hundredths of a millisecond."""
_STALE = 64
"""Entries of sessions that are gone, beside some for each that is there, before they are sorted out."""

_Name = tuple[str, str, str, str]
"""Tenant, name, owner, scope."""


class SessionTerms(NamedTuple):
    name: str
    """As the client calls it."""
    tenant: str
    """As of `Retention`: each has names of its own."""
    ttl_s: float
    """How long it keeps its records, counted from the begin and from the end of each turn."""
    scope: str = ""
    """Whose keys these are (`Origin.scope`): a session keeps those of the last turn of each model, and of each rank
    whose records are its own."""
    owner: str = ""
    """Who may end it; empty without an API key. Each has names of its own."""


@dataclass(slots=True, eq=False)
class _Kept:
    """A key that sessions keep."""

    nbytes: int
    tenant: str
    sessions: int = 0
    is_below: bool = False


@dataclass(slots=True, eq=False)
class Holder:
    session: SessionTerms
    waits: bool
    deadline_s: float = inf
    due_s: float = inf
    """When its deadline is looked at: of the only entry that counts."""
    asked: int = 0
    turn: int = 0
    """Counts holds, and the end: a hold that is under way ends with the next of them."""
    keys: list[bytes] = field(default_factory=list)
    nbytes: int = 0
    """Of their records."""


class SessionHolds:
    def __init__(self, quota_nbytes: int, total_nbytes: int) -> None:
        """Most bytes of records that the sessions of one tenant keep, and all sessions together. What several
        sessions keep counts once."""
        self._quota_nbytes, self._total_nbytes = quota_nbytes, total_nbytes
        self.kept: dict[bytes, _Kept] = {}
        """By key. Tiers ask in their own threads whether a key is in it."""
        self.nbytes = 0
        self._nbytes_of: Counter[str] = Counter()
        self._num_of: Counter[str] = Counter()
        self._holders: dict[_Name, Holder] = {}
        self._named: dict[tuple[str, str], set[_Name]] = {}
        """By tenant and name."""
        self._entries: list[tuple[float, _Name]] = []
        """A heap: when to look at a deadline, which may be later by now."""
        self._ended: list[Holder] = []
        """They keep what `take_ended` has not given yet."""

    def __len__(self) -> int:
        return len(self._holders)

    def states(self, now_s: float) -> list[SessionState]:
        return [
            SessionState(
                each.session.name,
                each.session.tenant,
                each.session.owner,
                records=len(each.keys),
                asked=each.asked,
                nbytes=each.nbytes,
                waits=each.waits,
                ends_in_s=each.deadline_s - now_s,
            )
            for each in self._holders.values()
        ]

    def holding(
        self, session: SessionTerms, keys: Sequence[bytes], sizes: Sequence[int], now_s: float, *, waits: bool
    ) -> Iterator[tuple[bytes, bool]]:
        """The session keeps the leading ones of these keys that the quota allows, and no others of its scope.

        One key at a time, so that others use it in between. Gives each that it keeps no more, with False, and each
        that it keeps, in order, with True. The next hold of this session, or its end, ends this one where it is.
        sizes: bytes of a record, in turns. waits: its turn has ended.
        """
        name = session.tenant, session.name, session.owner, session.scope
        mine = self._holders.get(name)
        if mine is None:
            if len(self) >= MAX_SESSIONS or self._num_of[session.tenant] >= MAX_OF_TENANT:
                return
            mine = self._holders[name] = Holder(session, waits)
            self._named.setdefault(name[:2], set()).add(name)
            self._num_of[session.tenant] += 1
        mine.turn += 1
        mine.session, mine.waits, mine.asked, mine.deadline_s = session, waits, len(keys), now_s + session.ttl_s
        if mine.deadline_s < mine.due_s:
            self._look_at(name, mine)
        turn = mine.turn
        for step in self._steps(mine, keys, sizes):
            yield step
            if mine.turn != turn:
                return

    def _steps(self, mine: Holder, keys: Sequence[bytes], sizes: Sequence[int]) -> Iterator[tuple[bytes, bool]]:
        common = 0
        for mine_too, key in zip(mine.keys, keys, strict=False):
            if mine_too != key:
                break
            common += 1
            yield key, True
        while len(mine.keys) > common:
            yield self._cut(mine, len(mine.keys) - 1)[0], False
        tenant = mine.session.tenant
        for index in range(common, len(keys)):
            key, nbytes = keys[index], sizes[index % len(sizes)]
            kept = self.kept.get(key)
            if kept is None:
                if not self._has_room(tenant, nbytes):
                    return
                kept = self.kept[key] = _Kept(nbytes, tenant)
                self._count(kept, 1)
            kept.sessions += 1
            mine.keys.append(key)
            mine.nbytes += kept.nbytes
            yield key, True

    def end(self, name: str, tenant: str, owner: str | None = None) -> list[Holder]:
        """It has ended, in all scopes. Each keeps what `take_of` has not given yet. owner: None for all."""
        found = [each for each in self._named.get((tenant, name), ()) if owner in (None, each[2])]
        return [self._end(each) for each in found]

    def _end(self, name: _Name) -> Holder:
        mine = self._holders.pop(name)
        mine.turn += 1
        self._ended.append(mine)
        self._num_of[name[0]] -= 1
        named = self._named[name[:2]]
        named.discard(name)
        if not named:
            del self._named[name[:2]]
        return mine

    def is_due(self, now_s: float) -> bool:
        """Whether the deadline of some session may be over, or an ended one keeps something still."""
        return bool(self._ended) or (bool(self._entries) and self._entries[0][0] <= now_s)

    def expire(self, now_s: float) -> None:
        """End sessions whose deadline is over: some of them, see `is_due`."""
        for _ in range(_MOST_DUE):
            if not self._entries or self._entries[0][0] > now_s:
                return
            at_s, name = heappop(self._entries)
            mine = self._holders.get(name)
            if mine is None or mine.due_s != at_s:
                continue
            if mine.deadline_s > now_s:
                self._look_at(name, mine)
            else:
                self._end(name)

    def _look_at(self, name: _Name, mine: Holder) -> None:
        """At its deadline."""
        mine.due_s = mine.deadline_s
        heappush(self._entries, (mine.due_s, name))
        if len(self._entries) > _STALE + 3 * len(self._holders):
            self._entries = [(each.due_s, name) for name, each in self._holders.items()]
            heapify(self._entries)

    def take_ended(self, most: int) -> list[bytes]:
        """Keys that ended sessions keep no more, so many at most; none are left once it gives fewer."""
        gone: list[bytes] = []
        while self._ended and len(gone) < most:
            gone += self.take_of(self._ended[-1], most - len(gone))
            if not self._ended[-1].keys:
                self._ended.pop()
        return gone

    def take_of(self, ended: Holder, most: int) -> list[bytes]:
        """The same of one of them."""
        return self._cut(ended, max(0, len(ended.keys) - most))

    def rank(self, key: bytes) -> int | None:
        """Instead of a record's priority in memory; None for one that is as others."""
        kept = self.kept.get(key)
        if kept is None:
            return None
        return HELD if kept.is_below else KEPT

    def place(self, key: bytes, *, is_below: bool) -> None:
        """A tier below has its record, or only memory will."""
        if (kept := self.kept.get(key)) is not None:
            kept.is_below = is_below

    def check(self) -> None:
        """Raise AssertionError at the first broken invariant."""
        holders = [*self._holders.values(), *self._ended]
        num_kept = Counter(key for each in holders for key in each.keys)
        assert num_kept == {key: kept.sessions for key, kept in self.kept.items()}
        nbytes = Counter[str]()
        for kept in self.kept.values():
            nbytes[kept.tenant] += kept.nbytes
        assert nbytes == self._nbytes_of
        assert self.nbytes == nbytes.total() <= self._total_nbytes
        assert all(used <= self._quota_nbytes for used in nbytes.values())
        assert +self._num_of == Counter(tenant for tenant, *_ in self._holders)
        assert all(each.deadline_s >= each.due_s for each in self._holders.values())
        assert {(each.due_s, name) for name, each in self._holders.items()} <= set(self._entries)
        assert {name for each in self._named.values() for name in each} == self._holders.keys()
        assert all(each.nbytes == sum(self.kept[key].nbytes for key in each.keys) for each in holders)

    def _has_room(self, tenant: str, nbytes: int) -> bool:
        in_all = self.nbytes + nbytes <= self._total_nbytes
        return in_all and self._nbytes_of[tenant] + nbytes <= self._quota_nbytes

    def _cut(self, mine: Holder, first: int) -> list[bytes]:
        """It keeps the keys before this one only; the others."""
        gone = mine.keys[first:]
        del mine.keys[first:]
        for key in gone:
            kept = self.kept[key]
            mine.nbytes -= kept.nbytes
            kept.sessions -= 1
            if not kept.sessions:
                del self.kept[key]
                self._count(kept, -1)
        return gone

    def _count(self, kept: _Kept, sign: int) -> None:
        self.nbytes += sign * kept.nbytes
        self._nbytes_of[kept.tenant] += sign * kept.nbytes
