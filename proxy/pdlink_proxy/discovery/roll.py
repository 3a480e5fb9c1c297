"""`Roll`: who has joined, by their beats. No I/O and no clock.

A worker is a name, and a life of it an epoch. Of two lives of one name, or at one URL, the younger one counts while
its beats come, also where the older one wakes up beside it (a stopped host); the older one takes the name back when
the younger one falls silent for good. Age is told by the worker, so that every proxy decides alike, also one that was
started later.

A life whose beats stop stays on the roll: the way of the beats may be broken while requests get through, and the
proxy's own probe decides. It is taken off when it says that it leaves, or when beats and probes have failed for
`FORGET_S`. A name that comes too often is left out for a growing pause.

Of several names at one URL the one counts that the worker there answers our probes with; until it has answered, the
first that came, and a younger one only if its owner is the same. So nobody takes a worker out by saying that he is
there. What one owner, and what all that no probe has found, may have here is bounded (`room`).
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdlink.api.presence import MISSED_BEATS

from ..membership import ListedWorker, Members

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdlink.api.health import Health
    from pdlink.api.presence import Beat

FORGET_S = 60.0
"""Of silence, to beats and probes, before a worker is taken off the roll."""
COMINGS = 3
"""New lives of one name in `COMINGS_S`; more of them are a worker that dies again and again."""
COMINGS_S = 60.0
MAX_LIVES_OF_KEY = 1024
"""That came with one key: processes of one server, or a whole pool, may share it."""
MAX_LIVES = 8
"""Of one name; a silent one makes room for another."""
MAX_UNPROVEN = 256
"""Lives of one key, or all without keys, that no probe has found well. One that was not found in `PROVE_S` makes room
for another."""
PROVE_S = 10.0
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
    key: str
    """That it came with; empty without keys."""
    came_s: float
    """By the proxy's clock."""
    silent_since_s: float | None = None
    """None while its beats come."""

    @property
    def owner(self) -> str:
        """Who may take its URL. Without keys, who has its name."""
        return self.key or self.name

    @property
    def rank(self) -> tuple[bool, float, str]:
        """The greatest one of a name counts."""
        return self.silent_since_s is None, self.started_s, self.epoch


@dataclass(slots=True, eq=False)
class _Name:
    lives: list[Life] = field(default_factory=list)
    leader: Life | None = None
    at: str = ""
    """URL of the leader; empty without one."""
    comings: deque[float] = field(default_factory=deque)
    held_until_s: float = 0.0


class Roll:
    """Of one proxy. Times are seconds of monotonic clocks."""

    def __init__(self) -> None:
        self._names: dict[str, _Name] = {}
        self._lives: dict[tuple[str, str], Life] = {}
        self._unproven: dict[str, dict[Life, None]] = {}
        """By key, in the order of their coming."""
        self._of_key: Counter[str] = Counter()
        """By key, its lives."""
        self._at: dict[str, list[_Name]] = {}
        """By URL, the names whose leaders are there; of several the first one with beats counts."""
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

    def room(self, name: str, epoch: str, key: str, now_s: float) -> str:
        """Why a new life of this name may not come; empty if it may, and then there is room for it."""
        if (name, epoch) in self._lives:
            return ""
        known = self._names.get(name)
        if known is not None and len(known.lives) >= MAX_LIVES:
            silent = next((life for life in known.lives if life.silent_since_s is not None), None)
            if silent is None:
                return f"{name} has {MAX_LIVES} lives here"
            self._drop(silent)
        if key and self._of_key[key] >= MAX_LIVES_OF_KEY:
            return f"{name}: its key has {MAX_LIVES_OF_KEY} workers here"
        unproven = self._unproven.get(key, {})
        if len(unproven) >= MAX_UNPROVEN:
            oldest = next(iter(unproven))
            if now_s - oldest.came_s < PROVE_S:
                return f"{name}: {MAX_UNPROVEN} workers have come that no probe has found yet"
            self._drop(oldest)
        return ""

    def beat(self, beat: Beat, health: Health, *, now_s: float, awake_s: float, key: str = "") -> Life | None:
        """Take in a beat of the worker with this health; None if it has left. key: see `Life`."""
        life = self._lives.get((health.name, health.epoch))
        if beat.leaves:
            if life is not None:
                self._drop(life)
            return None
        started_s, role = now_s - beat.age_s, health.role or "both"
        if life is None:
            told = (health.name, health.epoch, beat.url, beat.cell, role, beat.beat_s)
            life = Life(*told, started_s, awake_s, key, now_s)
            self._lives[life.name, life.epoch] = life
            self._of_key[key] += 1
            self._unproven.setdefault(key, {})[life] = None
            self._come(life, now_s)
            return life
        life.heard_s = awake_s
        life.started_s = min(life.started_s, started_s)
        if life.silent_since_s is not None:
            life.silent_since_s = None
            self._elect(self._names[life.name])
        if (life.url, life.cell, life.role, life.beat_s) != (beat.url, beat.cell, role, beat.beat_s):
            life.url, life.cell, life.role, life.beat_s = beat.url, beat.cell, role, beat.beat_s
            self._place(self._names[life.name])
            self.changed = True
        return life

    def expire(
        self,
        *,
        now_s: float,
        awake_s: float,
        well: Callable[[str], bool],
        named: Callable[[str], str] = lambda _: "",
    ) -> list[Life]:
        """The lives that have fallen silent since the last call. well: whether a probe of this URL succeeds. named:
        by which name the worker there answers it; empty if nobody knows.

        Call it when all beats that have come are taken in.
        """
        for unproven in self._unproven.values():
            for life in [life for life in unproven if self.counts(life) and well(life.url)]:
                del unproven[life]
        for url, names in self._at.items():
            if len(names) > 1:
                self._prefer(names, named(url))
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
        """Whether it is the life of its name, and at its URL, that counts, and not left out."""
        known = self._names.get(life.name)
        return known is not None and known.leader is life and self._counting(life.url) is known

    def members(self) -> Members:
        """The workers that count: one at each URL."""
        found = [known.leader for url in self._at if (known := self._counting(url)) is not None]
        entries = [(life.role, ListedWorker(life.url, cell=life.cell)) for life in found if life is not None]
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
            elif (there := self._counting(life.url)) is not None and there is not known and there.leader is not None:
                yield f"{life.name} at {life.url}: {there.leader.name} is there"

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
        self._unproven[life.key].pop(life, None)
        self._of_key[life.key] -= 1
        if not self._of_key[life.key]:
            del self._of_key[life.key], self._unproven[life.key]
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
        if leader is not None and len(self._at.get(leader.url, ())) > 1:
            self.changed = True  # whether its beats come decides who counts there
        self._place(known)

    def _place(self, known: _Name) -> None:
        """Its leader is at another URL, perhaps."""
        url = known.leader.url if known.leader is not None else ""
        if url == known.at:
            return
        if known.at:
            there = self._at[known.at]
            there.remove(known)
            if not there:
                del self._at[known.at]
        known.at = url
        if url:
            self._at.setdefault(url, []).append(known)

    def _counting(self, url: str) -> _Name | None:
        """Of the names whose leaders are at this URL, the one that counts."""
        found: _Name | None = None
        for known in self._at.get(url, ()):
            life = known.leader
            if life is None or life.name in self._held:
                continue
            if found is None or found.leader is None:
                found = known
            elif found.leader.silent_since_s is not None or found.leader.owner == life.owner:
                found = known if life.rank > found.leader.rank else found
        return found

    def _prefer(self, names: list[_Name], name: str) -> None:
        """This one comes first of those at one URL."""
        at = next((at for at, known in enumerate(names) if known.leader is not None and known.leader.name == name), 0)
        if at:
            names.insert(0, names.pop(at))
            self.changed = True
