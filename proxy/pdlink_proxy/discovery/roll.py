"""`Roll`: who has joined, by their beats. No I/O and no clock.

A worker is a name, and a life of it an epoch. Of two lives of one name, or at one URL, the younger one counts while
its beats come, also where the older one wakes up beside it (a stopped host); the older one takes the name back when
the younger one falls silent for good. Age is told by the worker, so that every proxy decides alike, also one that was
started later.

A life whose beats stop stays on the roll: the way of the beats may be broken while requests get through, and the
proxy's own probe decides. It is taken off when it says that it leaves, or when beats and probes have failed for
`FORGET_S`. A name that comes too often is left out for a growing pause.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdlink.protocol.presence import MISSED_BEATS

from ..membership import Entry, Members

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdlink.protocol.presence import Beat

    from ..dialects import Health

FORGET_S = 60.0
"""Of silence, to beats and probes, before a worker is taken off the roll."""
COMINGS = 3
"""New lives of one name in `COMINGS_S`; more of them are a worker that dies again and again."""
COMINGS_S = 60.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 30.0
"""For which such a name is left out; doubled by each further life."""


@dataclass(slots=True, eq=False)
class Life:
    """One life of a worker."""

    name: str
    epoch: str
    url: str
    cell: str
    role: str
    beat_s: float
    started_s: float
    """When it began, by the proxy's clock: the earliest that a beat lets expect, as beats may come late."""
    heard_s: float
    """The last beat, in time in which the proxy was awake."""
    silent_since_s: float | None = None
    """None while its beats come."""

    @property
    def rank(self) -> tuple[bool, float, str]:
        """The greatest one of a name counts."""
        return self.silent_since_s is None, self.started_s, self.epoch


@dataclass(slots=True)
class _Name:
    lives: list[Life] = field(default_factory=list)
    leader: Life | None = None
    comings: deque[float] = field(default_factory=deque)
    held_until_s: float = 0.0


class Roll:
    """Of one proxy. Times are seconds of monotonic clocks."""

    def __init__(self) -> None:
        self._names: dict[str, _Name] = {}
        self._lives: dict[tuple[str, str], Life] = {}
        self._held: set[str] = set()
        """Names that are left out now."""
        self._empty: deque[tuple[float, str]] = deque()
        """Names that have lost their last life, and when that had come."""
        self.changed = False
        """`members` are others than before; the reader resets it."""

    def __iter__(self) -> Iterator[Life]:
        return iter(self._lives.values())

    def __len__(self) -> int:
        return len(self._lives)

    @property
    def num_names(self) -> int:
        """Also those of which no life is here."""
        return len(self._names)

    def beat(self, beat: Beat, health: Health, *, now_s: float, awake_s: float) -> Life | None:
        """Take in a beat of the worker with this health; None if it has left."""
        life = self._lives.get((health.name, health.epoch))
        if beat.leaves:
            if life is not None:
                self._drop(life)
            return None
        started_s, role = now_s - beat.age_s, health.role or "both"
        if life is None:
            life = Life(health.name, health.epoch, beat.url, beat.cell, role, beat.beat_s, started_s, awake_s)
            self._lives[life.name, life.epoch] = life
            self._come(life, now_s)
            return life
        life.heard_s = awake_s
        life.started_s = min(life.started_s, started_s)
        if life.silent_since_s is not None:
            life.silent_since_s = None
            self._elect(self._names[life.name])
        if (life.url, life.cell, life.role, life.beat_s) != (beat.url, beat.cell, role, beat.beat_s):
            life.url, life.cell, life.role, life.beat_s = beat.url, beat.cell, role, beat.beat_s
            self.changed = True
        return life

    def expire(self, *, now_s: float, awake_s: float, well: Callable[[str], bool]) -> list[Life]:
        """The lives that have fallen silent since the last call. well: whether a probe of this URL succeeds.

        Call it when all beats that have come are taken in.
        """
        fallen, gone = [], []
        for life in self._lives.values():
            if life.silent_since_s is None:
                if awake_s - life.heard_s > MISSED_BEATS * life.beat_s:
                    life.silent_since_s = awake_s
                    fallen.append(life)
            elif awake_s - life.silent_since_s > FORGET_S and not (self.counts(life) and well(life.url)):
                gone.append(life)
        for life in fallen:
            self._elect(self._names[life.name])
        for life in gone:
            self._drop(life)
        for name in [name for name in self._held if self._names[name].held_until_s <= now_s]:
            self._held.discard(name)
            self.changed = True
        self._forget_names(now_s)
        return fallen

    def counts(self, life: Life) -> bool:
        """Whether it is the life of its name that counts, and not left out."""
        known = self._names.get(life.name)
        return known is not None and known.leader is life and life.name not in self._held

    def members(self) -> Members:
        """The workers that count; of several at one URL the one with the highest rank."""
        found: dict[str, Life] = {}
        for known in self._names.values():
            life = known.leader
            if life is None or life.name in self._held:
                continue
            other = found.get(life.url)
            if other is None or other.rank < life.rank:
                found[life.url] = life
        entries = [(life.role, Entry(life.url, cell=life.cell)) for life in found.values()]
        return Members(
            prefill=tuple(entry for role, entry in entries if role != "decode"),
            decode=tuple(entry for role, entry in entries if role != "prefill"),
        )

    def left_out(self) -> Iterator[str]:
        """For people: each life that does not count, and why."""
        for life in self._lives.values():
            known = self._names[life.name]
            if known.leader is not None and known.leader is not life:
                yield f"{life.name} at {life.url}: a younger one is at {known.leader.url}"
            elif life.name in self._held:
                yield f"{life.name} at {life.url}: it came {len(known.comings)} times in {COMINGS_S:.0f} s"

    def _come(self, life: Life, now_s: float) -> None:
        known = self._names.setdefault(life.name, _Name())
        known.lives.append(life)
        comings = known.comings
        comings.append(now_s)
        while comings[0] < now_s - COMINGS_S:
            comings.popleft()
        if len(comings) > COMINGS:
            pause_s = min(FIRST_PAUSE_S * 2.0 ** (len(comings) - COMINGS - 1), LONGEST_PAUSE_S)
            known.held_until_s = now_s + pause_s
            self._held.add(life.name)
        self._elect(known)

    def _drop(self, life: Life) -> None:
        del self._lives[life.name, life.epoch]
        known = self._names[life.name]
        known.lives.remove(life)
        self._elect(known)
        if not known.lives:
            self._empty.append((known.comings[-1], life.name))

    def _forget_names(self, now_s: float) -> None:
        """Of which no life is here, and none has come for a while."""
        while self._empty and self._empty[0][0] < now_s - COMINGS_S:
            _, name = self._empty.popleft()
            known = self._names.get(name)
            if known is not None and not known.lives and known.comings[-1] < now_s - COMINGS_S:
                del self._names[name]
                self._held.discard(name)

    def _elect(self, known: _Name) -> None:
        leader = max(known.lives, key=lambda life: life.rank, default=None)
        if leader is not known.leader:
            known.leader = leader
            self.changed = True
