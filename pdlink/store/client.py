"""`RemoteStore`: the verbs of a store that is another process of this host, which is never in the way.

Messages go over its Unix socket ([docs/tiers.md]); KV does not: the store's arena is mapped here, and callers copy
from and into their slots themselves. One thread connects, reads answers, and connects again. A store that has gone or
does not answer within `timeout_s` is a miss for every call at once, until it is back.

Slots belong to one life of the store. What is read from them counts only if its `release` is answered, so a lost
store's leases never stand. What is written goes to the arena that was mapped when the slots were reserved: another
one is mapped only when no reservation is open.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from pdlink.errors import ProtocolError
from pdlink.memory.buffers import map_shared
from pdlink.memory.pages import touch
from pdlink.store import wire
from pdlink.store.interface import MEMORY, AnyStore, Forgotten, Found
from pdlink.store.line import Line
from pdlink.store.link import Link, RemoteFetch, greet
from pdlink.store.preimages import announcements, commits
from pdlink.store.scope import Scopes
from pdlink.store.slots import USUAL, WHOLE, Slot
from pdlink.store.socket_path import store_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdlink.kv.hashing import Preimage
    from pdlink.memory.buffers import Bytes
    from pdlink.store.interface import RecordChange
    from pdlink.store.link import Answer
    from pdlink.store.record import RecordShape
    from pdlink.store.scope import Scope
    from pdlink.store.sessions import SessionTerms
    from pdlink.store.slots import Retention, Share

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 1.0
"""Between attempts to connect."""
_TOUCH_NBYTES = 64 << 20
"""At a time: 25 ms."""
_CLEAR_S = 10.0


class RemoteStore(AnyStore):
    """In another process. `open` starts the thread; `close` ends it."""

    def __init__(self, path: str, *, name: str, timeout_s: float = 1.0) -> None:
        """path: as `store_path` takes it, of the store's socket. name: of this client, in the store's lists and logs.

        timeout_s: longest wait for an answer, beside what the call itself may take. Raises ConfigError.
        """
        self.path = store_path("tiers.store", path)
        self.name, self.timeout_s = name[: wire.MAX_TEXT], timeout_s
        self.scopes, self._token = Scopes(), os.urandom(16)
        self._calls = itertools.count(1)
        self._lock = threading.Lock()
        # Guarded by `_lock`:
        self._link: Link | None = None
        """The present connection; None while there is none."""
        self._writing: dict[int, Slot] = {}
        """Reservations of the arena that is mapped, by serial."""
        self._changed = threading.Condition(self._lock)
        self._closing = False
        self._incarnation = b""
        self._array: Bytes | None = None
        self._places: tuple[str, ...] = (MEMORY,)
        self._warned: set[str] = set()
        self._touched_nbytes = 0
        """Of the arena, from its start, are in our page table, or in line for it. `_lock` guards it."""
        self._thread = threading.Thread(target=self._run, name="pdlink-store-client", daemon=True)

    def open(self) -> None:
        """Connect; in the background, if that takes longer than `timeout_s`."""
        self._toucher = Line("pdlink-store-touch")
        self._thread.start()
        with self._changed:
            if not self._changed.wait_for(lambda: self._link is not None, self.timeout_s):
                log.warning("the store at %s does not answer yet; everything is a miss until it does", self.path)

    def close(self) -> None:
        """Reservations that are open end with the process."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            link = self._link
        if link is not None:
            link.lose("closed here")
        self._thread.join()
        self._toucher.close(self.timeout_s)

    @property
    def connected(self) -> bool:
        link = self._link
        return link is not None and not link.lost

    @property
    def has_tiers(self) -> bool:
        """A look-up waits for another process, at the least."""
        return True

    @property
    def places(self) -> tuple[str, ...]:
        """As of the last connection."""
        link = self._link
        now = link.places if link is not None else ()
        return now + self._places[len(now) :]

    @property
    def events(self) -> str:
        link = self._link
        return link.events if link is not None and not link.lost else ""

    @property
    def lends_at(self) -> str:
        link = self._link
        return link.lends_at if link is not None and not link.lost else ""

    @property
    def wants_sums(self) -> bool:
        link = self._link
        return link is not None and link.wants_sums

    @property
    def array(self) -> Bytes:
        """The store's arena, mapped here. Slots of a lost store may lie elsewhere, and count for nothing."""
        assert self._array is not None, "no slot was ever given out"
        return self._array

    # --- Reading

    def lookup(self, keys: Sequence[bytes], timeout_s: float) -> Found:
        asked = tuple(keys[: wire.MAX_KEYS])
        answer = self._ask(lambda call: wire.Lookup(call, asked, timeout_s), wire.FoundAt, timeout_s)
        places = answer.places[: len(asked)] if answer is not None else ()
        return Found(asked[: len(places)], places)

    def known_at(self, keys: Sequence[bytes], timeout_s: float) -> tuple[int, ...]:
        asked = tuple(keys[: wire.MAX_KEYS])
        answer = self._ask(lambda call: wire.Lookup(call, asked, timeout_s, each=True), wire.FoundAt, timeout_s)
        places = answer.places[: len(asked)] if answer is not None else ()
        return places + (-1,) * (len(keys) - len(places))

    def fetch(
        self,
        found: Found,
        shape: RecordShape,
        request: str,
        holder: str = "engine",
        retention: Retention = USUAL,
        *,
        checks: bool = False,
    ) -> RemoteFetch:
        link, call = self._link, next(self._calls)
        fetch = RemoteFetch(link, call, found.keys, shape.nbytes)
        if link is None:
            fetch.finish()
        else:
            places = tuple(place if place < len(link.places) else 0 for place in found.places)
            asked = wire.FetchRecords(call, found.keys, places, shape, request[: wire.MAX_TEXT], retention, checks)
            link.begin(fetch, asked)
        return fetch

    def comes_from(self, address: str, keys: Sequence[bytes]) -> None:
        if (link := self._link) is not None and link.lends_at:
            link.say(wire.ComesFrom(tuple(keys[: wire.MAX_KEYS]), address))

    def announce(self, keys: Sequence[bytes], shape: RecordShape, preimages: Sequence[Preimage | None]) -> None:
        if (link := self._link) is not None and link.events:
            for message in announcements(keys, shape, preimages):
                link.say(message)

    # --- Writing

    def reserve(
        self,
        keys: Sequence[bytes],
        shape: RecordShape,
        holder: str = "engine",
        share: Share = WHOLE,
        retention: Retention = USUAL,
    ) -> tuple[Slot, ...]:
        """A record that can never fit is a warning, and finds no room: the store's size is its own affair."""
        array = self._array
        if array is not None and shape.nbytes > len(array):
            self._warn_once(
                f"a record takes {shape.nbytes} bytes, and the store at {self.path} has {len(array)}: nothing is "
                "kept; raise its tiers.max_local_cpu_size, or lower chunk_size"
            )
            return ()
        asked = tuple(keys[: wire.MAX_KEYS])
        link, call = self._link, next(self._calls)
        answer = None if link is None else link.ask(wire.Reserve(call, asked, shape, share, retention), wire.Reserved)
        if answer is None:
            return ()
        slots = [Slot(serial, asked[index], offset, shape.nbytes) for index, serial, offset in answer.slots]
        self._touch(answer.committed_nbytes)
        with self._lock:
            if self._link is not link:  # the next connection does not name them, so they end
                return ()
            self._writing.update((slot.serial, slot) for slot in slots)
        return tuple(slots)

    def commit(
        self,
        slots: Sequence[Slot],
        shape: RecordShape,
        preimages: Sequence[Preimage | None] = (),
        *,
        summed: bool = False,
    ) -> None:
        """In the shape that they were reserved in."""
        link, serials = self._end_writing(slots)
        if link is not None and serials:
            known = zip(slots, preimages, strict=True) if link.events and preimages else ()
            by_serial = {slot.serial: each for slot, each in known}
            for message in commits(serials, by_serial, summed=summed):
                link.say(message)

    def abandon(self, slots: Iterable[Slot]) -> None:
        link, serials = self._end_writing(slots)
        if link is not None and serials:
            link.say(wire.Abandon(serials))

    # --- Operators

    def know(self, scope: Scope, former: Scope | None = None) -> None:
        """The store's process remembers `former`, whose KV others may use."""
        super().know(scope, former)
        if (link := self._link) is not None:
            link.say(wire.Know(scope))

    def hold(self, session: SessionTerms, keys: Sequence[bytes], sizes: Sequence[int], *, waits: bool) -> int:
        """Of the keys of one message at most."""
        kept, told = tuple(keys[: wire.MAX_KEYS]), tuple(sizes)
        return self._count(lambda call: wire.HoldSession(call, session, kept, told, waits), self.timeout_s)

    def end_session(self, name: str, tenant: str, owner: str | None = None) -> bool:
        return bool(self._count(lambda call: wire.EndSession(call, name, tenant, owner), _CLEAR_S))

    def clear(
        self, keys: Sequence[bytes] | None = None, places: Sequence[str] | None = None, *, ending: bytes = b""
    ) -> Forgotten:
        if keys is None:
            return self._clear(None, places, ending)
        begins = range(0, max(1, len(keys)), wire.MAX_KEYS)
        done = [self._clear(tuple(keys[begin : begin + wire.MAX_KEYS]), places) for begin in begins]
        return Forgotten(sum(part.records for part in done), all(part.durable for part in done))

    def _clear(self, keys: tuple[bytes, ...] | None, places: Sequence[str] | None, ending: bytes = b"") -> Forgotten:
        where = None if places is None else tuple(places)
        answer = self._ask(lambda call: wire.Clear(call, keys, where, ending), wire.Forgot, _CLEAR_S)
        return Forgotten(0, durable=False) if answer is None else Forgotten(answer.records, answer.durable)

    def flush(self, timeout_s: float) -> bool:
        return bool(self._count(lambda call: wire.Flush(call, timeout_s), timeout_s))

    def health(self) -> dict[str, bool]:
        """The store's own /health says more."""
        return {"store": self.connected}

    def gauges(self) -> dict[str, float]:
        """None: they are the store's."""
        return {}

    def listen(self, changed: Callable[[RecordChange], None]) -> None:
        """Nothing is told: what comes and goes is known in the store's process."""

    def problems(self) -> dict[str, str]:
        """None: they are the store's."""
        return {}

    # --- Inside

    def _ask(
        self, make: Callable[[int], wire.Request], kind: type[Answer], may_take_s: float | None
    ) -> Answer | None:
        link = self._link
        return None if link is None else link.ask(make(next(self._calls)), kind, may_take_s)

    def _count(self, make: Callable[[int], wire.Request], may_take_s: float | None = None) -> int:
        answer = self._ask(make, wire.Count, may_take_s)
        return 0 if answer is None else answer.value

    def _end_writing(self, slots: Iterable[Slot]) -> tuple[Link | None, tuple[int, ...]]:
        """Nobody writes to them any more: the serials to tell. Without a connection, the next one ends them by not
        naming them."""
        with self._changed:
            link = self._link
            serials = tuple(slot.serial for slot in slots if self._writing.pop(slot.serial, None) is not None)
            if not self._writing:
                self._changed.notify_all()
        return link, serials

    def _touch(self, upto_nbytes: int) -> None:
        """Map what the arena has grown by, before it is used, in a thread of its own."""
        with self._lock:
            array, begin = self._array, self._touched_nbytes
            if array is None or upto_nbytes <= begin:
                return
            self._touched_nbytes = upto_nbytes
        for at in range(begin, min(upto_nbytes, len(array)), _TOUCH_NBYTES):
            self._toucher.put(partial(touch, array[at : min(upto_nbytes, at + _TOUCH_NBYTES)]))

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)

    # --- The thread

    def _run(self) -> None:
        pause_s, lost_s = _FIRST_PAUSE_S, time.monotonic()
        while not self._closing:
            try:
                link = self._connect()
            except Exception as error:  # noqa: BLE001  whatever it is, the next attempt comes
                if self._closing:
                    break
                if not isinstance(error, OSError | ProtocolError):
                    log.exception("no connection to the store at %s", self.path)
                self._warn_once(f"the store at {self.path}: {error}; everything is a miss until it answers")
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, pause_s)
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)
                continue
            if lost_s and self._warned:
                log.warning("the store at %s answers after %.1f s", self.path, time.monotonic() - lost_s)
            self._warned.clear()
            reason = link.hear_safely()
            with self._changed:
                self._places, self._link = self.places, None
            link.close()
            pause_s, lost_s = _FIRST_PAUSE_S, time.monotonic()
            if not self._closing:
                self._warn_once(f"the store at {self.path}: {reason}; everything is a miss until it answers")

    def _connect(self) -> Link:
        """A connection to a store whose arena is mapped. Raises OSError, ProtocolError."""
        with self._lock:
            named = tuple(self._writing)
        end, frames, welcome, arena = greet(self.path, wire.Hello(wire.VERSION, self._token, self.name, named))
        try:
            try:
                array = map_shared(arena, welcome.arena_nbytes) if welcome.incarnation != self._incarnation else None
            finally:
                os.close(arena)
            with self._changed:
                if array is not None:
                    self._changed.wait_for(lambda: self._closing or not self._writing)
                if self._closing:
                    raise ProtocolError("closed here")
                if array is not None:
                    self._array, self._incarnation, self._touched_nbytes = array, welcome.incarnation, 0
                    named = ()  # of the store's former life: this one gives the same numbers to others
                # They never get fewer: what was found before this connection counts in them.
                self._places = welcome.places + self._places[len(welcome.places) :]
                link = self._link = Link(end, frames, self.timeout_s, welcome)
                ended = tuple(serial for serial in named if serial not in self._writing)
                self._changed.notify_all()
        except BaseException:
            end.close()
            raise
        if ended:
            link.say(wire.Abandon(ended))
        for scope in self.scopes.all().values():
            link.say(wire.Know(scope))
        self._touch(welcome.committed_nbytes)
        return link
