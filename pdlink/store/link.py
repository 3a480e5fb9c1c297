"""One connection of a client to its store: `greet` begins it, `Link` is what it is then, and a `RemoteFetch` lives
and dies with it."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pdlink.errors import ProtocolError
from pdlink.store import wire
from pdlink.store.slots import Slot
from pdlink.store.socket_path import peer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)
_CONNECT_S = 5.0
Answer = TypeVar("Answer", wire.FoundAt, wire.Reserved, wire.Fetched, wire.Forgot, wire.Count)
_PING = 0
"""The call of a ping that nobody waits for. Others are positive, and negative for pings that somebody waits for."""


class Greeted(NamedTuple):
    end: socket.socket
    frames: wire.Frames[wire.Reply]
    """Of what comes after the welcome."""
    welcome: wire.Welcome
    arena: int
    """Its descriptor."""


def greet(path: Path, hello: wire.Hello) -> Greeted:
    """Connect to the store at `path`, if it is of this user and version. The caller closes socket and descriptor.

    Raises OSError, ProtocolError.
    """
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.settimeout(_CONNECT_S)
        end.connect(str(path))
        _, uid = peer_of(end)
        if uid not in (os.geteuid(), 0):
            raise ProtocolError(f"user: got {uid}; expected {os.geteuid()}, this process's; run both as one user")
        end.sendall(wire.frame(hello))
        frames = wire.Frames(wire.REPLIES)
        welcome, arena = _welcomed(end, frames)
        if welcome.version != hello.version:
            os.close(arena)
            raise ProtocolError(f"version: got {welcome.version}; expected {hello.version}; install one version")
    except BaseException:
        end.close()
        raise
    return Greeted(end, frames, welcome, arena)


def _welcomed(end: socket.socket, frames: wire.Frames[wire.Reply]) -> tuple[wire.Welcome, int]:
    """The store's answer to a hello, and the arena's descriptor, for the caller to close."""
    descriptors: list[int] = []
    try:
        while True:
            more, fds, _, _ = socket.recv_fds(end, 65536, 4)
            descriptors += fds
            if not more:
                raise ProtocolError("welcome: the connection ended before it; look at the store's log")
            for reply in frames.take(more):
                if isinstance(reply, wire.Refused):
                    raise ProtocolError(f"it refuses this client: {reply.reason}")
                if not isinstance(reply, wire.Welcome) or len(descriptors) != 1:
                    raise ProtocolError(f"welcome: got {type(reply).__name__}; expected Welcome; is it a store?")
                return reply, descriptors.pop()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


class Link:
    """Usable from any thread; `hear` and `close` are for one."""

    def __init__(
        self,
        end: socket.socket,
        frames: wire.Frames[wire.Reply],
        timeout_s: float,
        welcome: wire.Welcome,
    ) -> None:
        """end: connected, and past the welcome. timeout_s: longest wait for an answer that waits for no tier."""
        self.places = welcome.places
        """Of this life of the store; what its former one found may be in more."""
        self.events, self.wants_sums, self.lends_at = welcome.events, welcome.wants_sums, welcome.lends_at
        end.settimeout(timeout_s)
        self._end, self._frames, self._timeout_s = end, frames, timeout_s
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        # Guarded by `_lock`:
        self._waiting: dict[int, Future[wire.Reply | None]] = {}
        self._fetches: dict[int, RemoteFetch] = {}
        """Questions that no answer has come for."""
        self.lost = ""
        """Why; empty while it is not. Read without `_lock`, too."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Tells `hear` of the first fetch."""

    def say(self, message: wire.Request) -> None:
        """Send it. Does nothing on a connection that is lost."""
        try:
            with self._sending:
                self._end.sendall(wire.frame(message))
        except OSError as error:
            self.lose(f"it cannot be reached ({error})")

    def ask(self, message: wire.Request, kind: type[Answer], may_take_s: float | None = None) -> Answer | None:
        """The answer to a message with a `call`; None if none came in time, or the connection is lost.

        may_take_s: what the store may wait for tiers, beside `timeout_s`; a store that is late but answers a ping is
        not lost then. None for what waits for nothing.
        """
        call: int = message.call  # type: ignore[union-attr]
        future: Future[wire.Reply | None] = Future()
        with self._lock:
            if self.lost:
                return None
            self._waiting[call] = future
        self.say(message)
        try:
            answer = future.result(self._timeout_s + (may_take_s or 0.0))
        except TimeoutError:
            with self._lock:
                self._waiting.pop(call, None)
            if may_take_s is not None:
                self.ask(wire.Ping(-call), wire.Count)
            else:
                self.lose(f"no answer within {self._timeout_s} s")
            return None
        if answer is not None and not isinstance(answer, kind):
            self.lose(f"it answered {type(answer).__name__} for {kind.__name__}")
            return None
        return answer

    def begin(self, fetch: RemoteFetch, message: wire.FetchRecords) -> None:
        """Send the message; `fetch` is done when it is answered, or the connection is lost."""
        with self._lock:
            if not self.lost:
                is_first = not self._fetches
                self._fetches[fetch.call] = fetch
                if is_first:  # after it is there: `hear` looks without the lock
                    os.eventfd_write(self._wake, 1)
        if self.lost:
            fetch.finish()
        else:
            self.say(message)

    def lose(self, reason: str) -> None:
        """End it: all that waits gets no answer. Safe to call twice."""
        with self._lock:
            if self.lost:
                return
            self.lost = reason
            waiting, fetches = list(self._waiting.values()), list(self._fetches.values())
            self._waiting.clear()
            self._fetches.clear()
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        for future in waiting:
            with suppress(InvalidStateError):
                future.set_result(None)
        for fetch in fetches:
            fetch.finish()

    def hear_safely(self) -> str:
        """The same as `hear`; what is raised there loses the link."""
        try:
            return self.hear()
        except Exception as error:
            log.exception("the store's answers could not be handed out")
            self.lose(f"{type(error).__name__}: {error}")
            return self.lost

    def hear(self) -> str:
        """Hand out answers until it is lost; why."""
        poller = select.poll()
        poller.register(self._end, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        asked_s = 0.0  # of the first ping after the last sign of life; 0: none
        while not self.lost:
            wait_s = self._timeout_s if self._fetches else None
            ready = [descriptor for descriptor, _ in poller.poll(None if wait_s is None else 1000 * wait_s)]
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._end.fileno() in ready:
                asked_s = 0.0
                self._take()
            elif self._fetches and not asked_s:
                asked_s = time.monotonic()
                self.say(wire.Ping(_PING))
            elif asked_s and time.monotonic() - asked_s >= self._timeout_s:
                self.lose(f"no sign of life within {self._timeout_s} s")
        return self.lost

    def close(self) -> None:
        """After `hear`."""
        with self._sending:
            self._end.close()
        with self._lock:
            os.close(self._wake)

    def _take(self) -> None:
        try:
            more = self._end.recv(1 << 18)
            replies = self._frames.take(more)
        except (OSError, ProtocolError) as error:
            self.lose(f"it cannot be understood ({error})")
            return
        for reply in replies:
            if isinstance(reply, wire.Refused):
                self.lose(f"it refused: {reply.reason}")
            elif isinstance(reply, wire.Fetched):
                with self._lock:
                    fetch = self._fetches.pop(reply.call, None)
                if fetch is not None:
                    fetch.came(reply.slots, reply.unchecked)
            elif isinstance(reply, wire.Coming):
                fetch = self._fetches.get(reply.call)
                if fetch is not None:
                    fetch.coming(reply.first, reply.slots, reply.unchecked)
            elif isinstance(reply, wire.Places):
                self.places = reply.places
            elif not isinstance(reply, wire.Welcome):
                with self._lock:
                    future = self._waiting.pop(reply.call, None)
                if future is not None:
                    future.set_result(reply)
        if not more:
            self.lose("it has gone")


class RemoteFetch:
    """Implements `AnyFetch`."""

    def __init__(self, link: Link | None, call: int, keys: Sequence[bytes], nbytes: int) -> None:
        """link: None for a store that is away. nbytes: of a record of the asker's shape."""
        self.call = call
        self.done: Future[tuple[Slot, ...]] = Future()
        """As `AnyFetch.done`. Callbacks may run in the link's thread, and must not wait for the store."""
        self._link, self._keys, self._nbytes = link, keys, nbytes
        self.unchecked: frozenset[bytes] = frozenset()
        """As `AnyFetch.unchecked`."""
        self._leading: list[Slot] = []
        """That came before it was done."""
        self._more = _nothing
        self._lock = threading.Lock()
        self._stood: bool | None = None
        """Whether the leases stood; None until they are given back."""

    def leading(self, first: int = 0) -> tuple[Slot, ...]:
        """As `AnyFetch.leading`."""
        return tuple((self.done.result() if self.done.done() else self._leading)[first:])

    def when_more(self, call: Callable[[], None]) -> None:
        """As `AnyFetch.when_more`, in the link's thread."""
        self._more = call

    def coming(self, first: int, slots: Sequence[tuple[int, int, int]], unchecked: Sequence[int]) -> None:
        """The store says what is there from key `first` on, while it brings more. By the link's thread."""
        if first == len(self._leading) and not self.done.done():
            self.unchecked |= self._keys_at(unchecked)
            self._leading += self._mine(first, slots)
            self._more()

    def came(self, slots: Sequence[tuple[int, int, int]], unchecked: Sequence[int] = ()) -> None:
        """The store's answer."""
        if not self.done.done():
            self.unchecked = self._keys_at(unchecked)
        with suppress(InvalidStateError):
            self.done.set_result(self._mine(0, slots))

    def _mine(self, first: int, slots: Sequence[tuple[int, int, int]]) -> tuple[Slot, ...]:
        """A record of another shape is none of ours, so the prefix ends there."""
        keys = self._keys[first : first + len(slots)]
        mine = takewhile(lambda slot: slot[1][2] == self._nbytes, zip(keys, slots, strict=False))
        return tuple(Slot(serial, key, offset, nbytes) for key, (serial, offset, nbytes) in mine)

    def _keys_at(self, indices: Sequence[int]) -> frozenset[bytes]:
        return frozenset(self._keys[index] for index in indices if index < len(self._keys))

    def finish(self) -> None:
        self.came(())

    def close(self, wrong: Sequence[Slot] = ()) -> bool:
        with self._lock:
            if self._stood is None:
                self._stood = self._release(tuple(slot.serial for slot in wrong))
            return self._stood

    def _release(self, wrong: tuple[int, ...]) -> bool:
        self.finish()
        if self._link is None:
            return True
        message = wire.Release(self.call, self.call, wrong)
        if not self.done.result():
            self._link.say(message)
            return True
        answer = self._link.ask(message, wire.Count)
        return answer is not None and answer.value == 1


def _nothing() -> None:
    """Nobody asked."""
