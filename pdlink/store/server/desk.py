"""`Desk`: what one client of a store process holds, and what each of its messages does.

A client is one life of one process; its connections come and go. What it reads under a lease counts only if `release`
is answered, so leases end with the connection. It may still write into a reservation then: that ends when the client
connects again without naming it, or when its process has ended, which only the kernel can say.

No socket, clock or thread is in here; the threads that bring records tell of them. A message is believed in nothing:
a client can end, commit and release what it was given, and nothing else. (Its process has the arena mapped, and so
can write anywhere: clients are of one user.)
"""

from __future__ import annotations

import logging
import threading
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from pdlink.config.tiers import MAX_SESSION_CHARS, MAX_SESSION_TTL_S
from pdlink.errors import ConfigError, ProtocolError
from pdlink.store import wire
from pdlink.store.interface import Found
from pdlink.store.preimages import from_wire
from pdlink.store.slots import MAX_PRIORITY, MAX_PRIORITY_S, MIN_PRIORITY, life_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    from pdlink.kv.hashing import Preimage
    from pdlink.store.interface import AnyFetch
    from pdlink.store.record import RecordShape
    from pdlink.store.scope import Scope
    from pdlink.store.sessions import SessionTerms
    from pdlink.store.slots import Retention, Slot
    from pdlink.store.store import Store

log = logging.getLogger(__name__)

_MAX_FETCHES = 4096
"""Of one client at a time; an engine has one for each running request."""
_LEFT_SHARE = 8
"""Of the arena, how small a part one client leaves to the others when it has reserved all that it may."""
_ALL_OF = 4
"""Records, or fewer, that fit into an arena: one client may reserve all of them. Of more it leaves one at least."""
_MAX_DIGEST_CHARS = 64
_MAX_PARTS = 4096
"""Of a record; a model has fewer KV heads."""


class Desk:
    """For one thread, but for messages that `may_wait` or `takes_long`: they touch nothing of it."""

    def __init__(
        self,
        store: Store,
        holder: str,
        tell: Callable[[wire.Reply], None],
        in_line: Callable[[Callable[[], None]], None] = lambda job: job(),
        *,
        publishes: bool = False,
    ) -> None:
        """holder: unique among clients. tell: takes the answers, in any thread, also when nobody hears them. in_line:
        does something behind the answers that are told already.

        publishes: whether listeners of the store want to know what keys are the hashes of.
        """
        self.holder, self.tell, self.in_line, self._publishes = holder, tell, in_line, publishes
        self._store = store
        self._writing: dict[int, tuple[Slot, RecordShape]] = {}
        """By serial."""
        self._fetches: dict[int, AnyFetch] = {}
        """By the client's number."""

    @property
    def is_writing(self) -> bool:
        """Whether its process may still write into the arena."""
        return bool(self._writing)

    def may_wait(self, message: wire.Request) -> bool:
        """Whether `handle` waits for tiers, or for the disk that notes a clear, or frees what was cleared."""
        return isinstance(message, wire.Flush | wire.Clear) or (
            isinstance(message, wire.Lookup) and self._store.has_tiers
        )

    def takes_long(self, message: wire.Request) -> bool:
        """Whether `handle` waits for nothing, and looks at as many records as a session keeps. In their order."""
        return isinstance(message, wire.HoldSession | wire.EndSession)

    def handle(self, message: wire.Request) -> None:
        """Do it, and tell the answer, now or later. Raises ProtocolError for what no client has reason to send."""
        store = self._store
        match message:
            case wire.Lookup():
                asked = message.keys, message.timeout_s
                places = store.known_at(*asked) if message.each else store.lookup(*asked).places
                self.tell(wire.FoundAt(message.call, places))
            case wire.ComesFrom():
                store.comes_from(message.address, message.keys)
            case wire.Preimages():
                self._announce(message)
            case wire.FetchRecords():
                self._fetch(message)
            case wire.Release():
                self._release(message)
            case wire.Reserve():
                self._reserve(message)
            case wire.Commit():
                self._commit(message)
            case wire.Abandon():
                store.abandon([slot for slot, _ in self._taken(message.serials)])
            case wire.HoldSession():
                session = _checked_session(message.session)
                held = store.hold(session, message.keys, message.sizes, waits=message.waits)
                self.tell(wire.Count(message.call, held))
            case wire.EndSession():
                ended = store.end_session(message.name, message.tenant, message.owner)
                self.tell(wire.Count(message.call, int(ended)))
            case wire.Clear():
                self._check_places(message.places or ())
                self.tell(
                    wire.Forgot(message.call, *store.clear(message.keys, message.places, ending=message.ending))
                )
            case wire.Flush():
                self.tell(wire.Count(message.call, int(store.flush(message.timeout_s))))
            case wire.Know():
                self._know(message.scope)
            case wire.Ping():
                self.tell(wire.Count(message.call, 1))
            case wire.Hello():
                raise ProtocolError("hello: got a second one; send it once, first")

    def disconnected(self) -> None:
        """Nobody hears the answer to a release any more."""
        for fetch in self._fetches.values():
            fetch.finish()
            fetch.close()
        self._fetches.clear()

    def resumed(self, writing: Iterable[int]) -> None:
        """The client is here again, and goes on with these reservations only."""
        self._store.abandon([slot for slot, _ in self._taken(set(self._writing) - set(writing))])

    def gone(self) -> None:
        """Its process has ended, and touches nothing any more."""
        self.disconnected()
        self._store.holder_gone(self.holder)
        self._writing.clear()

    # --- Inside

    def _fetch(self, message: wire.FetchRecords) -> None:
        _check(message.shape)
        if len(message.places) != len(message.keys) or max(message.places, default=0) >= len(self._store.places):
            raise ProtocolError(f"places: got {message.places[:8]}...; expected what a look-up gave; look up again")
        if message.call in self._fetches or len(self._fetches) >= _MAX_FETCHES:
            raise ProtocolError(
                f"fetches: got {len(self._fetches) + 1}; expected at most {_MAX_FETCHES}; release some"
            )
        found = Found(message.keys, message.places)
        retention = _checked(message.retention)
        fetch = self._store.fetch(
            found, message.shape, message.request, self.holder, retention, checks=message.checks
        )
        self._fetches[message.call] = fetch
        if not fetch.done.done():
            coming = _Coming(self, message.call, fetch)
            coming.tell()
            fetch.when_more(coming.more)
        fetch.done.add_done_callback(partial(self._fetched, message.call, fetch))

    def _fetched(self, call: int, fetch: AnyFetch, done: Future[tuple[Slot, ...]]) -> None:
        slots = done.result()
        self.tell(wire.Fetched(call, _named(slots), _unchecked(slots, 0, fetch)))

    def _release(self, message: wire.Release) -> None:
        fetch = self._fetches.pop(message.fetch, None)
        stood = False
        if fetch is not None:
            wrong = set(message.wrong) if fetch.done.done() else set()
            stood = fetch.close([slot for slot in fetch.done.result() if slot.serial in wrong] if wrong else ())
        self.tell(wire.Count(message.call, int(stood)))

    def _reserve(self, message: wire.Reserve) -> None:
        """What never fits finds no room; the client has seen the arena's size."""
        _check(message.shape)
        nbytes, share = message.shape.nbytes, message.share
        if not 0 <= share.begin < share.end <= share.total <= _MAX_PARTS:
            raise ProtocolError(f"share: got {tuple(share)}; expected parts of at most {_MAX_PARTS}; correct it")
        retention = _checked(message.retention)
        slots: list[Slot] = []
        if nbytes <= self._store.buffer.nbytes:
            held_nbytes = sum(slot.nbytes for slot, _ in self._writing.values())
            all_fit = self._store.buffer.nbytes // nbytes
            left = max(all_fit // _LEFT_SHARE, int(all_fit > _ALL_OF))
            most_nbytes = self._store.buffer.nbytes - left * nbytes - held_nbytes
            reserve = partial(self._store.reserve_for, message.keys, message.shape, self.holder, share, retention)
            for slot in reserve(most_nbytes=most_nbytes):
                if slot.nbytes == nbytes:
                    slots.append(slot)
                else:  # somebody has begun a record of this key in another shape
                    self._store.abandon([slot])
        self._writing.update((slot.serial, (slot, message.shape)) for slot in slots)
        index_of = {key: index for index, key in enumerate(message.keys)}
        reserved = tuple((index_of[slot.key], slot.serial, slot.offset) for slot in slots)
        end = max((slot.offset + slot.nbytes for slot in slots), default=0)
        self.tell(wire.Reserved(message.call, reserved, max(end, self._store.committed_nbytes)))

    def _know(self, scope: Scope) -> None:
        for group in scope.groups:
            _check(group.shape)
            if scope.chunk_tokens % group.shape.chunk_tokens:
                raise ProtocolError(
                    f"scope: got records of {group.shape.chunk_tokens} positions; expected a divisor of "
                    f"{scope.chunk_tokens} tokens; correct it"
                )
        self._store.know(scope)

    def _announce(self, message: wire.Preimages) -> None:
        _check(message.shape)
        if len(message.known) != len(message.keys):
            raise ProtocolError(f"known: got {len(message.known)}; expected one for each key; correct it")
        if self._publishes:
            said = zip(message.keys, message.known, strict=True)
            known = [None if each is None else _preimage(each, key, message.shape) for key, each in said]
            self._store.announce(message.keys, message.shape, known)

    def _commit(self, message: wire.Commit) -> None:
        """In the shapes that they were reserved in."""
        known = self._known(message) if self._publishes else {}
        by_shape: dict[RecordShape, list[Slot]] = {}
        for slot, shape in self._taken(message.serials):
            by_shape.setdefault(shape, []).append(slot)
        for shape, slots in by_shape.items():
            self._store.commit(slots, shape, [known.get(slot.serial) for slot in slots], summed=message.summed)

    def _known(self, message: wire.Commit) -> dict[int, Preimage]:
        """By serial."""
        if message.known and len(message.known) != len(message.serials):
            raise ProtocolError(f"known: got {len(message.known)}; expected one for each serial; correct it")
        found = {}
        for serial, said in zip(message.serials, message.known, strict=False):
            if said is not None and serial in self._writing:
                slot, shape = self._writing[serial]
                found[serial] = _preimage(said, slot.key, shape)
        return found

    def _taken(self, serials: Iterable[int]) -> list[tuple[Slot, RecordShape]]:
        """Reservations of this client, which end now.

        Raises ProtocolError for those of another life of the store: a number of it could mean another record here.
        """
        serials = list(serials)
        if any(life_of(serial) != self._store.life for serial in serials):
            raise ProtocolError("serials: from an earlier run of the store; reserve again")
        return [self._writing.pop(serial) for serial in serials if serial in self._writing]

    def _check_places(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._store.places:
                raise ProtocolError(f"place: got {name!r}; expected {', '.join(self._store.places)}; use one of them")


class _Coming:
    """Tells a client what has come of a fetch that is not done. In any thread."""

    def __init__(self, desk: Desk, call: int, fetch: AnyFetch) -> None:
        self._desk, self._call, self._fetch = desk, call, fetch
        self._lock = threading.Lock()
        self._num_told, self._waits = 0, False

    def more(self) -> None:
        """Tell it in line, once for all that has come by then: a client that does not read must not fill the line."""
        with self._lock:
            if self._waits:
                return
            self._waits = True
        self._desk.in_line(self.tell)

    def tell(self) -> None:
        with self._lock:  # each chunk once; `Fetched` may overtake
            self._waits = False
            first = self._num_told
            further = self._fetch.leading(first)
            self._num_told += len(further)
            if further:
                unchecked = _unchecked(further, first, self._fetch)
                self._desk.tell(wire.Coming(self._call, first, _named(further), unchecked))


def _named(slots: Sequence[Slot]) -> tuple[tuple[int, int, int], ...]:
    return tuple((slot.serial, slot.offset, slot.nbytes) for slot in slots)


def _unchecked(slots: Sequence[Slot], first: int, fetch: AnyFetch) -> tuple[int, ...]:
    return tuple(index for index, slot in enumerate(slots, first) if slot.key in fetch.unchecked)


def _checked(retention: Retention) -> Retention:
    """Raises ProtocolError for one that no request may ask for."""
    right = MIN_PRIORITY <= retention.priority <= MAX_PRIORITY and 0 < retention.priority_s <= MAX_PRIORITY_S
    if not right or not retention.ttl_s > 0 or len(retention.tenant) > _MAX_DIGEST_CHARS:
        raise ProtocolError(f"retention: got {retention!r:.200}; expected what `Retention` says; correct it")
    return retention


def _checked_session(session: SessionTerms) -> SessionTerms:
    """Raises ProtocolError for one that no request may name."""
    right = 0 < len(session.name) <= MAX_SESSION_CHARS
    right &= max(map(len, (session.tenant, session.scope, session.owner))) <= _MAX_DIGEST_CHARS
    if not right or not 0 < session.ttl_s <= MAX_SESSION_TTL_S:
        raise ProtocolError(f"session: got {session!r:.200}; expected what `SessionTerms` says; correct it")
    return session


def _preimage(said: wire.Known, key: bytes, shape: RecordShape) -> Preimage:
    """Raises ProtocolError for one of another key: routers would send prompts to KV of others."""
    known = from_wire(said, key, shape)
    if known is None:
        raise ProtocolError(f"known: got tokens of another key than {key.hex()[:16]}; expected its own")
    return known


@lru_cache(256)
def _check(shape: RecordShape) -> None:
    """Raises ProtocolError for a shape of no record."""
    sizes = [shape.chunk_tokens]
    for group in shape.groups:
        sizes += [len(group.layers), group.num_parts, group.num_heads, group.head_nbytes]
    if not shape.groups or min(sizes) < 1:
        raise ProtocolError(f"shape: got sizes {sizes}; expected 1 or more; describe what a chunk holds")
    try:
        shape.check()
    except ConfigError as error:
        raise ProtocolError(f"shape: {error}") from None
