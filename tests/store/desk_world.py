"""Clients of a store process that write, read, lie, lose their connections and die, and what must hold.

Messages wait in lines, and are lost with the connection: a schedule says when each is delivered. The arena is real:
a record's bytes say which key it was filled for, so a slot that is used again too early shows.
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdlink.errors import ProtocolError
from pdlink.store import wire
from pdlink.store.eviction import Lru
from pdlink.store.record import HEADER_NBYTES
from pdlink.store.server.desk import Desk
from pdlink.store.slots import Share
from pdlink.store.store import Store
from tests.model.dice import Dice

from .stubs import SHAPE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.memory.buffers import Bytes

RECORDS = 6
LEASE_S = 1.5
PROMPTS = [[bytes([prompt, chunk]) * 16 for chunk in range(4)] for prompt in range(3)]


class _Still(Store):
    """Without the thread that ends leases: the schedule does."""

    def _keep(self) -> None: ...


@dataclass
class _Writing:
    key: bytes
    offset: int
    written: bool = False


@dataclass
class _Reading:
    keys: Sequence[bytes]
    slots: Sequence[tuple[int, int, int]] = ()
    sound: bool = True


@dataclass(eq=False)
class _Client:
    name: str
    store: Store
    alive: bool = True
    connected: bool = True
    calls: int = 0
    asked: dict[int, Sequence[bytes]] = field(default_factory=dict)
    """Keys of reservations without an answer."""
    writing: dict[int, _Writing] = field(default_factory=dict)
    reading: dict[int, _Reading] = field(default_factory=dict)
    releasing: dict[int, _Reading] = field(default_factory=dict)
    up: deque[wire.Request] = field(default_factory=deque)
    down: deque[wire.Reply] = field(default_factory=deque)
    late: deque[wire.Request] = field(default_factory=deque)
    """What it meant for a former life of the store, and says to this one."""

    def __post_init__(self) -> None:
        self.desk = Desk(self.store, self.name, lambda reply: self.down.append(reply))


class World:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.store = self._begun()
        self.lives = 0
        self.clients = [self._born() for _ in range(3)]
        self.counts: Counter[str] = Counter()

    def play(self, schedule: Sequence[int]) -> None:
        try:
            for number in schedule:
                dice = Dice(number)
                move = dice.one(MOVES)
                client = dice.one(self.clients)
                if client.alive or move in ("deliver", "notice"):
                    getattr(self, f"_{move}")(client, dice)
                self.counts[move] += 1
                self.store.check()
            self._finish()
        finally:
            self.store.close()

    # --- What a client does

    def _reserve(self, client: _Client, dice: Dice) -> None:
        keys = dice.one(PROMPTS)[: 1 + dice.below(4)]
        if client.connected:
            client.asked[self._call(client)] = keys
            client.up.append(wire.Reserve(client.calls, tuple(keys), SHAPE, Share()))

    def _write(self, client: _Client, dice: Dice) -> None:
        """With or without a connection."""
        if client.writing:
            for serial in [dice.one(list(client.writing))] if dice.below(2) else list(client.writing):
                writing = client.writing[serial]
                self._bytes(writing.offset)[:] = writing.key[0] << 4 | writing.key[1]
                writing.written = True

    def _commit(self, client: _Client, dice: Dice) -> None:
        done = [serial for serial, writing in client.writing.items() if writing.written]
        for serial in done:
            writing = client.writing.pop(serial)
            assert self._holds(writing.offset, writing.key), "somebody wrote into a reservation"
        if client.connected and done:
            client.up.append(wire.Commit(tuple(done)) if dice.below(4) else wire.Abandon(tuple(done)))

    def _fetch(self, client: _Client, dice: Dice) -> None:
        keys = dice.one(PROMPTS)
        if client.connected:
            client.reading[self._call(client)] = _Reading(keys)
            client.up.append(wire.FetchRecords(client.calls, tuple(keys), (0,) * len(keys), SHAPE, "request"))

    def _read(self, client: _Client, dice: Dice) -> None:
        if client.reading:
            reading = client.reading[dice.one(list(client.reading))]
            for key, (_, offset, _) in zip(reading.keys, reading.slots, strict=False):
                reading.sound &= self._holds(offset, key)

    def _release(self, client: _Client, dice: Dice) -> None:
        """Often of what has come."""
        known = [call for call, reading in client.reading.items() if reading.slots or dice.below(4) == 0]
        if known and client.connected:
            call = dice.one(known)
            client.releasing[call] = client.reading.pop(call)
            client.up.append(wire.Release(call, call))

    def _lie(self, client: _Client, dice: Dice) -> None:
        """About what others write. (One that ends its own reservation and writes on has the arena mapped, anyway.)"""
        serials = tuple(serial for other in self.clients if other is not client for serial in other.desk._writing)
        if client.connected:
            client.up.append(wire.Commit(serials) if dice.below(2) else wire.Abandon(serials))

    # --- What becomes of it

    def _deliver(self, client: _Client, dice: Dice) -> None:
        if client.up and dice.below(2):
            client.desk.handle(client.up.popleft())
        elif client.down and client.alive:
            self._hear(client, client.down.popleft())

    def _hear(self, client: _Client, reply: wire.Reply) -> None:
        match reply:
            case wire.Reserved():
                keys = client.asked.pop(reply.call)
                for index, serial, offset in reply.slots:
                    client.writing[serial] = _Writing(keys[index], offset)
            case wire.Fetched() if reply.call in client.reading:
                client.reading[reply.call].slots = reply.slots
            case wire.Count():
                reading = client.releasing.pop(reply.call)
                assert reading.sound or not reply.value, "garbage was read under a lease that stood"
                self.counts["garbage refused"] += not reading.sound
                self.counts["stood"] += reply.value and bool(reading.slots)

    def _lose(self, client: _Client, dice: Dice) -> None:
        """The connection; what the store has read of it still counts."""
        if client.connected and dice.below(10) == 0:
            client.connected = False
            for _ in range(dice.below(len(client.up) + 1)):
                client.desk.handle(client.up.popleft())
            for line in (client.up, client.down, client.asked, client.reading, client.releasing):
                line.clear()
            client.desk.disconnected()
            assert not self._leases_of(client), "a lease outlives its connection"

    def _reconnect(self, client: _Client, _: Dice) -> None:
        if not client.connected:
            client.down.clear()
            client.desk.resumed(tuple(client.writing))
            client.connected = True
            assert set(client.desk._writing) == set(client.writing), "both sides name the same reservations"
            self.counts["resumed"] += bool(client.writing)

    def _die(self, client: _Client, dice: Dice) -> None:
        if dice.below(12) == 0:
            client.alive = False

    def _notice(self, client: _Client, _: Dice) -> None:
        if not client.alive:
            self.counts["buried"] += client.desk.is_writing
            client.desk.gone()
            self.clients[self.clients.index(client)] = self._born()

    def _tick(self, _: _Client, dice: Dice) -> None:
        self.now_s += dice.below(4)
        with self.store._lock:  # its keeper ends leases, too
            self.counts["expired"] += self.store._catalog.expire(self.now_s)

    def _restart(self, _: _Client, dice: Dice) -> None:
        """The store dies and begins again, with another arena. What clients write in the old one is void."""
        if dice.below(25):
            return
        self.store.close()
        self.store = self._begun()
        for index, client in enumerate(self.clients):
            if not client.alive:
                self.clients[index] = self._born()
                continue
            if client.writing:
                client.late.append(wire.Commit(tuple(client.writing)))
            for line in (client.up, client.down, client.asked, client.reading, client.releasing, client.writing):
                line.clear()
            client.store, client.connected = self.store, True
            client.__post_init__()

    def _speak_late(self, client: _Client, _: Dice) -> None:
        if client.late and client.connected:
            with suppress(ProtocolError):
                client.desk.handle(client.late.popleft())
                raise AssertionError("a client that speaks of a former life is not told")
            self.counts["told"] += 1
            assert set(client.desk._writing) >= set(client.writing), "what was late ended a reservation of this life"

    def _begun(self) -> Store:
        store = _Still(RECORDS * SHAPE.nbytes, Lru(), lease_s=LEASE_S, clock=lambda: self.now_s)
        store.open()
        return store

    # --- What must hold

    def _finish(self) -> None:
        for client in list(self.clients):
            client.alive = False
            self._notice(client, Dice(0))
        assert self.store._catalog.num_leases == 0, "a lease has no end"
        assert self.store._catalog.num_reservations == 0, "a reservation has no end"
        self.store.clear()
        assert self.store.gauges()["used"] == 0, "a slot is lost"

    def _leases_of(self, client: _Client) -> list[object]:
        return [hold for hold in self.store._catalog._leases.values() if hold.holder == client.name]

    def _holds(self, offset: int, key: bytes) -> bool:
        return bool((self._bytes(offset) == key[0] << 4 | key[1]).all())

    def _bytes(self, offset: int) -> Bytes:
        return self.store.array[offset + HEADER_NBYTES : offset + SHAPE.nbytes : 512]

    def _call(self, client: _Client) -> int:
        client.calls += 1
        return client.calls

    def _born(self) -> _Client:
        self.lives += 1
        return _Client(f"client {self.lives}", self.store)


MOVES = [
    *("deliver",) * 24,
    *("reserve", "reserve", "write", "write", "write", "commit", "commit"),
    *("fetch", "fetch", "read", "read", "release", "release"),
    *("lie", "lose", "reconnect", "die", "notice", "tick", "restart", "speak_late"),
]
