"""`Listener`: the clients of a store process, each with a thread that does what it says.

A thread serves one connection of one client. When that ends while the client still writes into the arena, the
thread waits for the end of its process, which the kernel reports (pidfd), or for the client's next
connection, which takes over. Two more threads of each client do what waits for tiers, and one sends what other
threads tell it: a client that reads nothing, or asks for everything, keeps nobody waiting but itself.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pdlink.errors import ConfigError, LocalError, ProtocolError
from pdlink.store import wire
from pdlink.store.line import Line
from pdlink.store.server.desk import Desk
from pdlink.store.socket_path import listen, peer_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pdlink.store.store import Store

log = logging.getLogger(__name__)

_LINK_S = 5.0
"""How long a client may wait with its hello, or leave its socket full."""
_MAX_CLIENTS = 256
_MAX_BACKLOG = 4096
"""Jobs of one client in a line."""
_END_S = 2.0


@dataclass(eq=False)
class _Client:
    """One life of one process."""

    token: bytes
    name: str
    pid: int
    pidfd: int
    """Readable when the process has ended."""
    desk: Desk
    since_s: float
    session: _Session
    """Its connection, or the thread that waits for its end."""


class Listener:
    """`open` and `close`; a store that is open, at one path."""

    def __init__(self, store: Store, path: Path) -> None:
        self.path = path
        self.events = ""
        """Where what the store keeps is published (`KVPublisher.address`), for the clients. Set it before `open`."""
        self._store = store
        self.incarnation = os.urandom(16)
        """Names this life of the store."""
        self._lock = threading.Lock()
        self._clients: dict[bytes, _Client] = {}
        self._sessions: set[_Session] = set()
        self._closing = False
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Raises ConfigError."""
        self._bound, self._path_lock = listen(self.path, "socket")
        self._store.places_changed = self._tell_places
        self._thread = threading.Thread(target=self._accept, name="pdlink-store-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections. Clients go on without a store. Safe to call twice, and without `open`."""
        if self._closing or self._thread is None:
            return
        self._closing = True
        self._bound.shutdown(socket.SHUT_RDWR)
        self._thread.join(_END_S)
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.end()
        for session in sessions:
            session.join(_END_S)
        self._bound.close()
        self.path.unlink(missing_ok=True)
        os.close(self._path_lock)

    def clients(self) -> list[dict[str, object]]:
        """Who is connected."""
        now_s = time.monotonic()
        with self._lock:
            return [
                {
                    "name": client.name,
                    "pid": client.pid,
                    "connected": client.session.connected,
                    "for_s": round(now_s - client.since_s, 1),
                }
                for client in self._clients.values()
            ]

    def _tell_places(self, places: tuple[str, ...]) -> None:
        with self._lock:
            sessions = [client.session for client in self._clients.values()]
        for session in sessions:
            if session.connected:
                session.tell(wire.Places(places))

    # --- Threads

    def _accept(self) -> None:
        while not self._closing:
            link: socket.socket | None = None
            try:
                link, _ = self._bound.accept()
                self._begin(link)
            except Exception as error:  # noqa: BLE001  one connection may fail, and the next ones must not
                if link is not None:
                    link.close()
                if not self._closing:
                    log.warning("no connection can be accepted: %s: %s", type(error).__name__, error)
                    time.sleep(0.1)

    def _begin(self, link: socket.socket) -> None:
        """Raises OSError or RuntimeError where no descriptor or thread is left."""
        with self._lock:
            crowded = len(self._sessions) >= _MAX_CLIENTS
        if crowded:
            log.warning("a client was turned away: there are %d", _MAX_CLIENTS)
            link.close()
            return
        session = _Session(self, link)
        with self._lock:
            self._sessions.add(session)
        try:
            session.start()
        except RuntimeError:
            with self._lock:
                self._sessions.discard(session)
            session.release()
            raise

    def _admit(self, hello: wire.Hello, session: _Session) -> _Client:
        """The client of a connection, whose former one has ended. Raises LocalError for one that is not let in."""
        if hello.version != wire.VERSION:
            raise ConfigError(f"version: got {hello.version}; expected {wire.VERSION}; install one version of pdlink")
        pid, uid = peer_of(session.link)
        if uid not in (os.geteuid(), 0):
            raise ConfigError(f"user: got {uid}; expected {os.geteuid()}, the store's own; run both as one user")
        if pid == 0:
            raise ConfigError("process: got one of another pid namespace; expected the store's own; share it")
        with self._lock:
            client = self._clients.get(hello.client)
            if client is None:
                holder = f"{hello.name}-{hello.client.hex()[:8]}"
                desk = Desk(self._store, holder, session.tell, session.in_line, publishes=bool(self.events))
                client = _Client(hello.client, hello.name, pid, os.pidfd_open(pid), desk, time.monotonic(), session)
                self._clients[hello.client] = client
                return client
            if client.pid != pid:
                raise ConfigError("client: got the number of another process; expected its own; draw it by chance")
            former, client.session = client.session, session
        former.end()
        former.join(None)
        client.desk.tell = session.tell
        client.desk.resumed(hello.writing)
        return client

    def _left(self, session: _Session, client: _Client | None) -> None:
        """A thread has ended; its client is forgotten unless another connection of it has come."""
        with self._lock:
            self._sessions.discard(session)
            if client is not None and client.session is session:
                del self._clients[client.token]
                os.close(client.pidfd)


class _Session(threading.Thread):
    """One connection, and the wait for the end of a client that has none."""

    def __init__(self, listener: Listener, link: socket.socket) -> None:
        super().__init__(name="pdlink-store-client", daemon=True)
        self.link = link
        self.connected = True
        self._listener = listener
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        """Readable when this thread is to end; `_waking` guards it."""
        self._waking = threading.Lock()
        self._sending = threading.Lock()
        self._sender = Line("pdlink-store-tell")
        self._askers = Line("pdlink-store-ask", 2)
        self._holders = Line("pdlink-store-hold")

    def end(self) -> None:
        """Let the thread end; what the client writes is for another one to wait for."""
        with self._waking:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def tell(self, reply: wire.Reply) -> None:
        """Send it; in line, if another thread says it, which a client that does not read must not keep waiting."""
        if threading.get_ident() == self.ident:
            self._send(wire.frame(reply))
        else:
            self.in_line(partial(self._send, wire.frame(reply)))

    def in_line(self, job: Callable[[], None]) -> None:
        """Do it in the thread that tells, behind what it has to send."""
        if len(self._sender) < _MAX_BACKLOG:
            self._sender.put(job)
        else:
            self._disconnect()

    def run(self) -> None:
        client: _Client | None = None
        try:
            self.link.settimeout(_LINK_S)
            frames = wire.Frames(wire.REQUESTS)
            messages = self._first(frames)
            hello = messages.pop(0)
            if not isinstance(hello, wire.Hello):
                raise ProtocolError(f"hello: got {type(hello).__name__}; expected Hello; send it first")
            client = self._listener._admit(hello, self)
            self._welcome(client)
            self._serve(client, frames, messages)
        except (LocalError, ProtocolError, OSError) as error:
            self._refuse(client.name if client else "a client", error)
        except Exception:
            log.exception("store: %s is disconnected", client.name if client else "a client")
        finally:
            self.connected = False
            self.link.close()
            for line in (self._askers, self._holders, self._sender):
                line.close(0.0)
            if client is not None:
                client.desk.disconnected()
                self._await_the_end(client)
            self._listener._left(self, client)
            self.release()

    def release(self) -> None:
        """What it holds beside the connection. Safe to call twice."""
        for line in (self._askers, self._holders, self._sender):
            line.end()
        with self._waking:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    def _first(self, frames: wire.Frames[wire.Request]) -> list[wire.Request]:
        """The client's first messages. Raises ProtocolError if they do not come."""
        deadline_s = time.monotonic() + _LINK_S
        while time.monotonic() < deadline_s:
            if not (more := self.link.recv(65536)):
                break
            if messages := frames.take(more):
                return messages
        raise ProtocolError("hello: it did not come; send it first")

    def _welcome(self, client: _Client) -> None:
        store = self._listener._store
        buffer = store.buffer
        incarnation, places = self._listener.incarnation, store.places
        welcome = wire.Welcome(
            wire.VERSION,
            incarnation,
            buffer.nbytes,
            store.committed_nbytes,
            places,
            self._listener.events,
            store.wants_sums,
            store.lends_at,
        )
        with self._sending:
            socket.send_fds(self.link, [wire.frame(welcome)], [buffer.fd])
        log.info("store: %s (process %d) is connected", client.name, client.pid)

    def _serve(self, client: _Client, frames: wire.Frames[wire.Request], messages: list[wire.Request]) -> None:
        """Until the connection or the process has ended, or another connection takes over."""
        poller = select.poll()
        for descriptor in (self.link.fileno(), client.pidfd, self._wake):
            poller.register(descriptor, select.POLLIN)
        while True:
            for message in messages:
                line = self._askers if client.desk.may_wait(message) else None
                line = self._holders if client.desk.takes_long(message) else line
                if line is None:
                    client.desk.handle(message)
                elif len(line) < _MAX_BACKLOG:
                    line.put(partial(self._ask, client.desk, message))
                else:
                    raise ProtocolError(
                        f"calls: got {_MAX_BACKLOG + 1} at a time; expected at most {_MAX_BACKLOG}; wait for answers"
                    )
            ready = [descriptor for descriptor, _ in poller.poll()]
            if ready != [self.link.fileno()]:
                return
            more = self.link.recv(1 << 18)
            if not more:
                return
            messages = frames.take(more)

    def _ask(self, desk: Desk, message: wire.Request) -> None:
        try:
            desk.handle(message)
        except ProtocolError as error:
            self._refuse(desk.holder, error)
            self._disconnect()

    def _refuse(self, name: str, error: Exception) -> None:
        """Say why the connection ends."""
        log.warning("store: %s is disconnected: %s", name, error)
        self._send(wire.frame(wire.Refused(str(error)[:500])))

    def _await_the_end(self, client: _Client) -> None:
        """Of the process, as long as it has what ends with it; or until another connection takes over."""
        poller = select.poll()
        for descriptor in (client.pidfd, self._wake):
            poller.register(descriptor, select.POLLIN)
        while client.desk.is_writing:
            ready = [descriptor for descriptor, _ in poller.poll()]
            if self._wake in ready:
                return
            if client.pidfd in ready:
                client.desk.gone()

    def _send(self, frame: bytes) -> None:
        try:
            with self._sending:
                self.link.sendall(frame)
        except OSError:
            self._disconnect()

    def _disconnect(self) -> None:
        with suppress(OSError):
            self.link.shutdown(socket.SHUT_RDWR)
