"""Holders that write, read and die over one catalog, and what must hold whatever they do.

Memory is modelled by page and part of a record: a writer leaves its reservation's serial there, so a slot used
again too early shows. A schedule is a list of numbers, each of which is a move and its choices.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Literal
from unittest.mock import patch

from pdlink.store import catalog
from pdlink.store.catalog import Catalog
from pdlink.store.eviction import Adaptive, Lru, S3Fifo
from pdlink.store.extents import ALIGNMENT_NBYTES
from pdlink.store.sessions import SessionHolds, SessionTerms
from pdlink.store.slots import KEPT, WHOLE, Change, Retention, Share, Slot, SlotLease
from tests.model.dice import Dice

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from pdlink.store.eviction import EvictionPolicy

POLICIES = (Adaptive, Lru, S3Fifo)
PAGES = 12
PROMPTS = [[b"%d-%d" % (prompt, chunk) for chunk in range(5)] for prompt in range(3)]
PROMPTS.append(PROMPTS[0][:2] + [b"branch-%d" % chunk for chunk in range(3)])
QUOTA_PAGES = 4
TENANT_PAGES = 5
SESSION_PAGES = 3
INF = float("inf")
PARTS = 4
SHARES = [*8 * [WHOLE], Share(0, 2, PARTS), Share(2, 4, PARTS), Share(0, 1, PARTS), Share(1, 4, PARTS)]
"""Of one writer, of two ranks, and of two others that share heads differently."""


@dataclass
class Writing:
    slots: tuple[Slot, ...]
    parts: range
    num_written: int = 0


@dataclass
class Reading:
    lease: SlotLease
    deadline_s: float
    keys: set[bytes]
    """Keys that still lead to the leased records."""
    content: dict[bytes, list[int]]
    """What each key's pages are to hold, by part."""
    sound: bool = True
    """Whether all that was read is what it should be."""


@dataclass
class Holder:
    name: str
    alive: bool = True
    writing: list[Writing] = field(default_factory=list)
    reading: list[Reading] = field(default_factory=list)


class World:
    def __init__(self, policy: Callable[[], EvictionPolicy] = Lru) -> None:
        self.catalog = Catalog(
            policy(),
            pin_quota_nbytes=QUOTA_PAGES * ALIGNMENT_NBYTES,
            tenant_quota_nbytes=TENANT_PAGES * ALIGNMENT_NBYTES,
            sessions=SessionHolds(2 * ALIGNMENT_NBYTES, SESSION_PAGES * ALIGNMENT_NBYTES),
        )
        self.catalog.resize(PAGES // 2 * ALIGNMENT_NBYTES)
        self.pages = [[0] * PARTS for _ in range(PAGES)]
        self.now_s = 0.0
        self.lives = 0
        self.holders = [self._born() for _ in range(3)]
        self.stored: dict[bytes, int] = {}
        self.content = {key: [0] * PARTS for keys in PROMPTS for key in keys}
        """The last committed reservation of each part."""
        self.pinned: dict[str, set[bytes]] = {}
        self.holding: list[Iterator[tuple[bytes, bool]]] = []
        """For sessions, not at their ends."""
        self.withdrawn: set[int] = set()
        """Reservations whose key was removed."""
        self.counts: Counter[str] = Counter()

    def play(self, schedule: Sequence[int]) -> None:
        with patch.object(catalog, "_KEPT_SHARE", 1):  # all that sessions keep has room
            for number in schedule:
                dice = Dice(number)
                move = dice.one(MOVES)
                getattr(self, f"_{move}")(dice)
                self._look(move)
            self._finish()

    # --- Moves

    def _reserve(self, dice: Dice) -> None:
        holder, keys = dice.one(self.holders), dice.one(PROMPTS)[: 1 + dice.below(5)]
        nbytes = ALIGNMENT_NBYTES * (1 + dice.below(2)) - dice.below(2)
        share = dice.one(SHARES)
        parts = range(PARTS) if share == WHOLE else range(share.begin, share.end)
        if holder.alive:
            retention = Retention(
                dice.one(["", "", "t", "u"]),
                dice.one([35, 35, 10, 80]),
                1 + dice.below(9),
                dice.one([INF, INF, INF, INF, 3, 9]),
            )
            slots = self.catalog.reserve(keys, nbytes, holder.name, share, retention, self.now_s)
            for slot in slots:
                assert not set(parts) & self._being_written(slot.key), "a part is written twice"
            if slots:
                holder.writing.append(Writing(slots, parts))
                self.counts["shared"] += len(parts) < PARTS

    def _write(self, dice: Dice) -> None:
        if holder := self._one(dice, "writing"):
            self._fill(dice.one(holder.writing), 1)

    def _commit(self, dice: Dice) -> None:
        """What is written of a put; most often all of it."""
        if holder := self._one(dice, "writing"):
            writing = holder.writing.pop(dice.below(len(holder.writing)))
            if dice.below(3):
                self._fill(writing, len(writing.slots))
            done, rest = writing.slots[: writing.num_written], writing.slots[writing.num_written :]
            for slot in done:
                written = {self.pages[page][part] for page in _pages(slot) for part in writing.parts}
                assert written == {slot.serial}, "somebody wrote into a reservation"
                if slot.serial not in self.withdrawn:
                    for part in writing.parts:
                        self.content[slot.key][part] = slot.serial
            self.catalog.abandon(rest)
            readable = self.catalog.commit(done)
            assert not {slot.key for slot in done if slot.serial in self.withdrawn} & set(readable), (
                "a removed key is back"
            )
            self.counts["committed"] += len(readable)
            self.counts["completed by ranks"] += len(readable) if len(writing.parts) < PARTS else 0

    def _fill(self, writing: Writing, count: int) -> None:
        for slot in writing.slots[writing.num_written :][:count]:
            for page in _pages(slot):
                for part in writing.parts:
                    self.pages[page][part] = slot.serial
            writing.num_written += 1
        if count % 2:  # a commit in pieces begins, and perhaps never comes
            self.catalog.place(writing.slots[: writing.num_written])

    def _abandon(self, dice: Dice) -> None:
        if holder := self._one(dice, "writing"):
            self.catalog.abandon(holder.writing.pop(dice.below(len(holder.writing))).slots)

    def _lease(self, dice: Dice) -> None:
        holder, keys = dice.one(self.holders), dice.one(PROMPTS)
        if holder.alive:
            expected = self.catalog.lookup(keys)
            deadline_s = self.now_s + 1 + dice.below(4)
            lease = self.catalog.lease(keys, holder.name, "request", deadline_s)
            assert [slot.key for slot in lease.slots] == keys[:expected]
            if lease.slots:
                content = {key: list(self.content[key]) for key in keys[:expected]}
                holder.reading.append(Reading(lease, deadline_s, set(content), content))

    def _read(self, dice: Dice) -> None:
        if holder := self._one(dice, "reading"):
            reading = dice.one(holder.reading)
            for slot in reading.lease.slots:
                reading.sound &= all(self.pages[page] == reading.content[slot.key] for page in _pages(slot))

    def _release(self, dice: Dice) -> None:
        if holder := self._one(dice, "reading"):
            reading = holder.reading.pop(dice.below(len(holder.reading)))
            stood = self.catalog.release(reading.lease)
            assert reading.sound or not stood, "garbage was read under a lease that stood"
            assert stood or reading.deadline_s <= self.now_s, "a lease ended before its deadline"
            self.counts["garbage refused"] += not reading.sound
            self.counts["released"] += stood

    def _forget_lease(self, dice: Dice) -> None:
        """A request that is never heard of again."""
        if holder := self._one(dice, "reading"):
            holder.reading.pop(dice.below(len(holder.reading)))

    def _tick(self, dice: Dice) -> None:
        self.now_s += dice.below(6)
        known = len(self.catalog)
        self.counts["expired"] += self.catalog.expire(self.now_s)
        self.counts["outlived"] += known - len(self.catalog)
        assert all(record.expires_s > self.now_s for record in self.catalog._records.values()), "a record outlived"
        self.withdrawn |= {serial for serial, writing in self.catalog._writing.items() if not writing.record.listed}

    def _die(self, dice: Dice) -> None:
        if dice.below(5) == 0:
            dice.one(self.holders).alive = False

    def _notice(self, dice: Dice) -> None:
        """Somebody sees that a holder is dead; another one starts."""
        for index, holder in enumerate(self.holders):
            if not holder.alive:
                self.catalog.holder_gone(holder.name)
                self.counts["buried"] += bool(holder.writing or holder.reading)
                self.holders[index] = self._born()

    def _pin(self, dice: Dice) -> None:
        keys, name = dice.one(PROMPTS), dice.one(["a", "b"])
        count = self.catalog.pin(keys, name)
        self.pinned.setdefault(name, set()).update(keys[:count])
        self.counts["pinned"] += count

    def _unpin(self, dice: Dice) -> None:
        name = dice.one(["a", "b"])
        assert self.catalog.unpin(name) == len(self.pinned.pop(name, set()))

    def _hold(self, dice: Dice) -> None:
        keys, ttl_s = dice.one(PROMPTS), 5.0 + dice.below(20)
        session = SessionTerms(dice.one(["a", "b"]), dice.one(["t", "u"]), ttl_s)
        waits = bool(dice.below(2))
        self.holding.append(self.catalog.sessions.holding(session, keys, [ALIGNMENT_NBYTES], self.now_s, waits=waits))
        self._hold_on(dice)

    def _hold_on(self, dice: Dice) -> None:
        """Others may have held for the same session, or ended it, since a hold began."""
        if not self.holding:
            return
        holding, most = dice.one(self.holding), 1 + dice.below(6)
        looked = list(islice(holding, most))
        if len(looked) < most:
            self.holding.remove(holding)
        for key in self.catalog.rank([key for key, _ in looked]):
            assert key in self.stored
            if dice.below(2):
                self.catalog.is_below(key)
        self.counts["held"] += sum(is_kept for _, is_kept in looked)

    def _end_session(self, dice: Dice) -> None:
        ended = self.catalog.sessions.end(dice.one(["a", "b"]), dice.one(["t", "u"]))
        self.counts["session ended"] += len(ended)
        for each in ended if dice.below(2) else ():
            self.catalog.forget_ended(each)

    def _remove(self, dice: Dice) -> None:
        if dice.below(3):
            return
        keys = dice.one(PROMPTS)[:3]
        self.counts["removed"] += self.catalog.remove(keys)
        self._withdraw(keys)

    def _clear(self, dice: Dice) -> None:
        if dice.below(8):
            return
        self._hear_changes()
        was = self.catalog.clear()
        self._hear([Change("removed", *record.slot[1::2]) for record in was.records.values() if not record.missing])
        self._withdraw(was.records)
        was.free()
        assert not was.policies[0]

    def _withdraw(self, keys: Collection[bytes]) -> None:
        slots = (slot for holder in self.holders for writing in holder.writing for slot in writing.slots)
        self.withdrawn |= {slot.serial for slot in slots if slot.key in keys}

    def _resize(self, dice: Dice) -> None:
        pages = self.catalog.capacity_nbytes // ALIGNMENT_NBYTES
        self.catalog.resize(max(PAGES // 2, min(PAGES, pages + dice.below(4) - 1)) * ALIGNMENT_NBYTES)

    def _one(self, dice: Dice, busy: Literal["writing", "reading"]) -> Holder | None:
        """A holder that lives and has something of that kind under way."""
        found = [holder for holder in self.holders if holder.alive and getattr(holder, busy)]
        return dice.one(found) if found else None

    # --- What must hold

    def _look(self, move: str) -> None:
        self._hear_changes()
        for keys in PROMPTS:
            missing = [key not in self.stored for key in [*keys, b"none"]]
            assert self.catalog.lookup(keys) == missing.index(True)
        self.catalog.check()
        used_nbytes = self.catalog._turns.used_nbytes
        assert max(used_nbytes["t"], used_nbytes["u"]) <= TENANT_PAGES * ALIGNMENT_NBYTES, "a quota is exceeded"
        self.counts[move] += 1

    def _hear_changes(self) -> None:
        changes, self.catalog.changes = self.catalog.changes, []
        self._hear(changes)

    def _hear(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self.counts[change.kind] += 1
            if change.kind == "stored":
                assert change.key not in self.stored
                self.stored[change.key] = change.nbytes
                continue
            assert self.stored.pop(change.key) == change.nbytes
            if change.kind == "evicted":
                is_kept = self.catalog.sessions.rank(change.key) == KEPT
                assert not is_kept or change.key in self.catalog._records, "what a session keeps was evicted"
                assert not any(change.key in keys for keys in self.pinned.values()), "a pinned record was evicted"
                leased = [reading for reading in self._readings() if reading.deadline_s > self.now_s]
                assert not any(change.key in reading.keys for reading in leased), "a leased record was evicted"
            for kept in (*self.pinned.values(), *(reading.keys for reading in self._readings())):
                kept.discard(change.key)

    def _finish(self) -> None:
        """When all is given back, nothing is left: the arena takes as many records as it has pages.

        Records that nobody completes went in their turn.
        """
        for holder in self.holders:
            holder.alive = False
            holder.reading.clear()
        self.catalog.expire(self.now_s + 100)
        for _ in range(4):  # a session each
            self.catalog.expire(self.now_s + 100)
        assert self.catalog.num_leases == 0, "a lease has no end"
        self._notice(Dice(0))
        for name in list(self.pinned):
            self.catalog.unpin(name)
        assert self.catalog.num_reservations == 0, "a reservation has no end"
        keys = [b"new-%d" % index for index in range(self.catalog.capacity_nbytes // ALIGNMENT_NBYTES)]
        slots = self.catalog.reserve(keys, ALIGNMENT_NBYTES, "last")
        assert [slot.key for slot in slots] == keys, "a slot is lost"
        self.catalog.abandon(slots)
        self.catalog.clear()
        self.catalog.check()
        assert self.catalog.used_nbytes == 0, "a slot is lost"

    def _being_written(self, key: bytes) -> set[int]:
        """Parts of reservations of a key that was not removed meanwhile."""
        return {
            part
            for holder in self.holders
            for writing in holder.writing
            for slot in writing.slots
            if slot.key == key and slot.serial not in self.withdrawn
            for part in writing.parts
        }

    def _readings(self) -> list[Reading]:
        return [reading for holder in self.holders for reading in holder.reading]

    def _born(self) -> Holder:
        self.lives += 1
        return Holder(f"worker {self.lives}")


MOVES = [
    *(
        "reserve",
        "write",
        "write",
        "write",
        "commit",
        "commit",
        "abandon",
        "lease",
        "lease",
        "read",
        "read",
        "release",
    ),
    *(
        "forget_lease",
        "tick",
        "die",
        "notice",
        "pin",
        "unpin",
        "remove",
        "clear",
        "resize",
        "hold",
        "hold_on",
        "end_session",
    ),
]


def _pages(slot: Slot) -> range:
    first = slot.offset // ALIGNMENT_NBYTES
    return range(first, first - (-slot.nbytes // ALIGNMENT_NBYTES))
