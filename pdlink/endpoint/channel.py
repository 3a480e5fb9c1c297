"""ZeroMQ frames in and out; no protocol, no state of a peer.

A worker binds one ROUTER and opens one DEALER per session that it dials. The thread that calls `poll` owns every
socket. No call waits for a peer: a full queue makes `send` raise QueueFull, sockets close without lingering, and a
monitor reports a refused or cut connection as `Disconnected`.

With credentials every connection is encrypted and proves both keys (CURVE) before its first frame is delivered. The
ROUTER asks our own loop about the client's key (ZAP, polled like any other socket); a DEALER connects only to the
holder of the key in the address. Each frame carries the sender's public key, because the other side chooses its own
route. A connection without an allowed key is reported as `ClientRefused`.
"""

from __future__ import annotations

import contextlib
import errno
import math
import select
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from pdlink import zmq_context
from pdlink.config.listen import HostPort, in_url, is_numeric
from pdlink.endpoint.inflow import Inflow
from pdlink.errors import ConfigError, InvalidRequest, TransportFailure
from pdlink.protocol.auth import ControlAddress
from pdlink.protocol.messages import MAX_FRAME_NBYTES
from pdlink.zmq_context import take_ipv6

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from pdlink.protocol.auth import Credentials

_MAX_SOCKETS = 32_768
"""A dialed session takes three: its own, and both ends of its monitor. libzmq's default is 1,023 in all. Descriptors
run out first: a session takes five, and one on the other side."""

_BACKLOG = 4096
"""Connections that wait to be accepted, as far as net.core.somaxconn allows. libzmq's default is 100: of 2,000 that
come at once the rest try again seconds later."""

_QUEUE_FRAMES = 16
"""Frames that libzmq queues for one peer. More of them wait in `Sessions`, which counts their bytes."""

_UNREAD_FRAMES = 8
"""Whole unread frames of one peer; then libzmq stops reading its socket. A peer can make us hold this many times
MAX_FRAME_NBYTES."""

_CUT = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
"""Monitored on dialed sockets: an established connection ended, or an attempt failed. Seen 6 ms after a SIGKILL."""

_DIAL_FAILURES = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not have our key on its allow-list",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "only one of the two sides uses keys",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it hung up: it ended just now; or, if it runs, its key is not the one in "
    "the address, or it uses no keys, or the port is not a control port of pdlink (an HTTP port, perhaps)",
}
"""Why a connection failed its handshake. Each comes before the event of the connection's end (libzmq 4.3.5). If only
one side uses keys, both hang up, and the slower one gets the third event."""

_REFUSALS = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
"""Failures that a second try does not change. A side that hangs up may just be stopping."""

_TURNED_AWAY = {
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "no proof of a key, or meant for another worker",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "left before it proved a key",
}
"""The listener's view. ZAP reports keys that are not allowed, in more detail."""

_HANDSHAKE_MS = 5000
"""How long a connection may take to prove its key; libzmq's default is 30 s."""

_ZAP = "inproc://zeromq.zap.01"
"""Where libzmq asks, within one context, whether a key may connect (rfc.zeromq.org/spec/27)."""


_POLLIN = int(zmq.POLLIN)
"""`&` of two flags runs some thirty lines of `enum`."""


@dataclass(frozen=True, slots=True)
class Received:
    route: str
    frame: bytes
    public_key: str = ""
    """Proven by the sender of this frame; empty without credentials."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    route: str
    reason: str = ""
    """Why the handshake of the connection failed; empty for a plain end of a connection."""
    refused: bool = False
    """Whether a retry is useless until somebody changes a key or an allow-list."""


@dataclass(frozen=True, slots=True)
class ClientRefused:
    """A client was turned away."""

    reason: str
    host: str = ""
    """Its address, if known."""
    public_key: str = ""
    """Its key, if the key is not allowed."""


Arrival = Received | Disconnected | ClientRefused


class QueueFull(Exception):  # noqa: N818  back-pressure, not an error: send the frame again later
    """Earlier frames to this peer have not left yet."""


@dataclass(slots=True)
class _Dialed:
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    public_key: str
    """Only its holder can answer on this connection; empty without credentials."""
    fd: int = -1
    """Of the connection, once libzmq has told that there is one."""


class Poller:
    """Waits for sockets and plain descriptors; idle sockets cost nothing.

    zmq_poll asks every socket each time: 18 ms for 2,000 sessions of two sockets each (2 cores, libzmq 4.3.5). epoll
    on the sockets' descriptors (ZMQ_FD) does not, but is edge-triggered: any call on the socket, a send too, clears
    the event. So sockets after a send, or not read to their end, are checked without an event (`suspects`).
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        """By descriptor."""
        self._fds: dict[zmq.Socket[bytes], int] = {}
        self.suspects: set[zmq.Socket[bytes]] = set()
        """Sockets that may be readable although their descriptor does not say so. Add one after a send, or after an
        incomplete read: the next `poll` checks it without an event."""
        self.full: set[zmq.Socket[bytes]] = set()
        """Sockets that had no room for a frame: `poll` returns with the next event of one, which may be room."""

    def register(self, socket: zmq.Socket[bytes]) -> None:
        fd = socket.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        self._epoll.register(fd, select.EPOLLIN)
        self._sockets[fd], self._fds[socket] = socket, fd
        self.suspects.add(socket)

    def unregister(self, socket: zmq.Socket[bytes]) -> None:
        """Call before closing it. Ignored if it is not registered."""
        fd = self._fds.pop(socket, None)
        if fd is not None:
            del self._sockets[fd]
            self._epoll.unregister(fd)
            self.suspects.discard(socket)
            self.full.discard(socket)

    def watch(self, fd: int) -> None:
        """Wait for this plain descriptor, too."""
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        self._epoll.unregister(fd)

    def poll(self, timeout_s: float) -> tuple[set[zmq.Socket[bytes]], set[int]]:
        """Readable sockets and watched descriptors, after `timeout_s` at the latest; neither if there may be room."""
        deadline_s = time.monotonic() + timeout_s
        suspects, self.suspects = self.suspects, set()
        ready = {socket for socket in suspects if _readable(socket)}
        fds: set[int] = set()
        while True:
            left_s = 0.0 if ready else max(0.0, deadline_s - time.monotonic())
            news = self._epoll.poll(math.ceil(left_s * 1000) / 1000)  # rounding down would busy-wait
            rang = self.full & {self._sockets.get(fd) for fd, _ in news}
            self.full -= rang
            for fd, _ in news:
                socket = self._sockets.get(fd)
                if socket is None:
                    fds.add(fd)
                elif _readable(socket):
                    ready.add(socket)
            if ready or fds or rang or time.monotonic() >= deadline_s:
                return ready, fds

    def close(self) -> None:
        self._epoll.close()


class Channel:
    """The sockets of one worker. `bind()` acquires; all other methods belong to one thread."""

    def __init__(self, identity: str) -> None:
        """identity: unique per worker life (name and epoch)."""
        self._identity = identity.encode()
        self.credentials: Credentials | None = None
        """Set by `bind`; may be replaced between two polls, with another allow-list."""
        self._host = ""
        """Of its own address."""
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._questions: zmq.Socket[bytes] | None = None
        """With credentials: libzmq's questions about keys."""
        self._gate: zmq.Socket[bytes] | None = None
        """The ROUTER's monitor: accepted connections, and with credentials failed handshakes."""
        self._inflow = Inflow()
        self._dealers: dict[str, _Dialed] = {}
        self._routes: dict[zmq.Socket[bytes], str] = {}
        """Of every socket in `_dealers`."""
        self._poller: Poller | None = None
        self._num_dialed = 0
        self._num_polls = 0

    def bind(self, host: str, port: int, credentials: Credentials | None = None) -> int:
        """Listen on host:port (0 takes a free port); returns the port. Raises ConfigError if it cannot.

        credentials: of every connection, in and out; None accepts anybody, unencrypted.
        """
        self.credentials, self._host = credentials, host
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        try:
            self._poller = Poller()
            self._router = self._socket(zmq.ROUTER)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._router.setsockopt(zmq.BACKLOG, _BACKLOG)
            if credentials is None:
                self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
            else:  # no handover: a client that uses the same route would take it over
                self._questions = self._guard(self._router, credentials)
            self._gate = self._router.get_monitor_socket(zmq.EVENT_ACCEPTED | _any_of(_TURNED_AWAY))
            self._poller.register(self._gate)
            take_ipv6(self._router, in_url(host))
            self._router.bind(f"tcp://{in_url(host)}:{port or '*'}")
            self._poller.register(self._router)
        except zmq.ZMQError as error:
            self.close()
            reason = zmq.strerror(error.errno or 0)  # error.strerror repeats the address
            raise ConfigError(f"listen.control: cannot bind tcp://{HostPort(host, port)}: {reason}") from None
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        return int(endpoint.rsplit(":", 1)[1])

    def dial(self, address: str) -> str:
        """Open a connection to a peer's ROUTER; returns the route. `poll` reports a failure.

        Raises ConfigError for an invalid address, or if only one side has keys; TransportFailure if no socket or
        descriptor is left.
        """
        try:
            target = ControlAddress.parse(address)
        except InvalidRequest as error:
            raise ConfigError(f"cannot dial {address!r}: {error}") from None
        if bool(target.public_key) != (self.credentials is not None):
            raise ConfigError(f"cannot dial {target.endpoint}: only one of the two sides uses keys")
        assert self._poller is not None, "bind() first"
        self._num_dialed += 1
        route = f"dial-{self._num_dialed}"
        with contextlib.ExitStack() as made:
            try:
                dealer = self._socket(zmq.DEALER)
                made.callback(dealer.close)
                dealer.setsockopt(zmq.IDENTITY, self._identity + b"/%d" % self._num_dialed)
                dealer.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
                if self.credentials is not None:
                    keys = self.credentials.keys
                    dealer.setsockopt_string(zmq.CURVE_SERVERKEY, target.public_key)
                    dealer.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
                    dealer.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
                monitored = f"inproc://pdlink-{route}"  # get_monitor_socket() leaks a socket if it fails
                dealer.monitor(monitored, _CUT | zmq.EVENT_CONNECTED | _any_of(_DIAL_FAILURES))
                monitor = self._socket(zmq.PAIR)
                made.callback(monitor.close)
                monitor.connect(monitored)
                # A process that listens on IPv6 has names looked up as such: its cluster may have nothing else.
                take_ipv6(dealer, in_url(target.host if is_numeric(target.host) else self._host))
                dealer.connect(target.endpoint)
            except zmq.ZMQError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise ConfigError(f"cannot dial {target.endpoint}: {error}") from None
                raise TransportFailure(
                    f"cannot dial {target.endpoint}: no descriptor or socket left ({error.strerror}); raise ulimit -n"
                ) from None
            made.pop_all()
        self._dealers[route] = _Dialed(dealer, monitor, target.public_key)
        for socket in (dealer, monitor):
            self._routes[socket] = route
            self._poller.register(socket)
        return route

    def send(self, route: str, frame: bytes) -> bool:
        """Queue one frame; False if the peer is gone. Raises QueueFull if it must be sent again later: after the next
        `poll` that ends early, as a rule; the event of room is lost where another call on the socket took it."""
        dialed = self._dealers.get(route)
        socket = dialed.socket if dialed is not None else self._router
        if socket is None or self._poller is None:
            return False
        self._poller.suspects.add(socket)
        for _ in range(2):
            try:
                if dialed is not None:
                    socket.send(frame, zmq.NOBLOCK)
                else:
                    socket.send_multipart([bytes.fromhex(route), frame], zmq.NOBLOCK)
            except zmq.Again:
                socket.getsockopt(zmq.EVENTS)  # libzmq notices frames that left; else once a millisecond
            except (zmq.ZMQError, ValueError):
                return False
            else:
                return True
        self._poller.full.add(socket)
        raise QueueFull

    def drop(self, route: str) -> None:
        """Close a dialed connection; queued frames get 100 ms to leave. The peer closes accepted connections."""
        dialed = self._dealers.pop(route, None)
        if dialed is not None:
            for socket in (dialed.socket, dialed.monitor):
                del self._routes[socket]
                if self._poller is not None:
                    self._poller.unregister(socket)
            dialed.socket.disable_monitor()
            dialed.monitor.close()
            dialed.socket.close(linger=100)

    def watch(self, fd: int) -> None:
        """Let `poll` also wait for this descriptor to become readable."""
        assert self._poller is not None, "bind() first"
        self._poller.watch(fd)

    def unwatch(self, fd: int) -> None:
        """No longer."""
        if self._poller is not None:
            self._poller.unwatch(fd)

    def poll(self, timeout_s: float) -> tuple[Iterable[Arrival], set[int]]:
        """Wait up to `timeout_s`; returns arrivals, and the watched descriptors that are readable.

        Iterating reads the frames, one of each connection in turn. Unread frames wait in their sockets.
        """
        assert self._poller is not None, "bind() first"
        if time.monotonic() >= self._inflow.look_at_s:
            self._inflow.look()
        ready, fds = self._poller.poll(timeout_s)
        for socket in ready:
            self._poller.suspects.add(socket)  # until it is read to its end
        return self._arrivals(ready), fds

    def _arrivals(self, ready: AbstractSet[zmq.Socket[bytes]]) -> Iterator[Arrival]:
        if self._questions is not None and self._questions in ready:
            yield from self._judge(self._questions)
        if self._gate is not None and self._gate in ready:
            for event, value in self._drain_events(self._gate):
                if event == zmq.EVENT_ACCEPTED:
                    self._inflow.begun(value)
                elif self.credentials is not None:
                    yield ClientRefused(_TURNED_AWAY[event])
        sources: deque[tuple[str, _Dialed | None]] = deque()
        if self._router in ready:
            sources.append(("", None))  # libzmq takes turns between its peers
        routes = sorted({self._routes[socket] for socket in ready if socket in self._routes})
        sources.extend((route, self._dealers[route]) for route in routes)
        sources.rotate(-self._num_polls)  # so that no connection is always the first
        self._num_polls += 1
        while sources:
            route, dialed = source = sources.popleft()
            arrival = self._take(route, dialed)
            if arrival is not None:
                sources.append(source)
                yield from arrival
            elif dialed is not None and dialed.monitor in ready:  # only now: frames sent before the cut come first
                for event, value in self._drain_events(dialed.monitor, 1):
                    if event == zmq.EVENT_CONNECTED:
                        dialed.fd = value
                        self._inflow.begun(value)
                    else:
                        yield Disconnected(route, _DIAL_FAILURES.get(event, ""), event in _REFUSALS)

    def _take(self, route: str, dialed: _Dialed | None) -> Sequence[Received] | None:
        """The next frame of this socket, nothing for a malformed one, None if there is none left."""
        if dialed is None:
            return self._take_accepted()
        try:
            parts = dialed.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        self._inflow.delivered.add(dialed.fd)
        return [Received(route, parts[0], dialed.public_key)] if len(parts) == 1 else []

    def _take_accepted(self) -> Sequence[Received] | None:
        assert self._router is not None
        try:
            route = self._router.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        part, num_parts = self._router.recv(zmq.NOBLOCK, copy=False), 1
        while part.more:
            part, num_parts = self._router.recv(zmq.NOBLOCK, copy=False), num_parts + 1
        # Asked of each frame: a route may be another client's by now, also one that libzmq has named.
        public_key = str(part.get("User-Id")) if self.credentials is not None else ""  # set by libzmq
        try:
            fd = int(part.get(zmq.SRCFD))
        except zmq.ZMQError:  # a client with a ZeroMQ from before 2013
            fd = -1
        self._inflow.delivered.add(fd)
        return [Received(route.hex(), part.bytes, public_key)] if num_parts == 1 else []

    def _guard(self, router: zmq.Socket[bytes], credentials: Credentials) -> zmq.Socket[bytes]:
        """Let only holders of allowed keys connect to `router`."""
        questions = self._socket(zmq.REP)
        questions.bind(_ZAP)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt_string(zmq.CURVE_SECRETKEY, credentials.keys.secret)
        router.setsockopt(zmq.ZAP_DOMAIN, b"pdlink")
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # libzmq's default lets everybody in if nobody answers
        router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        assert self._poller is not None
        self._poller.register(questions)
        return questions

    def _judge(self, questions: zmq.Socket[bytes]) -> Iterable[ClientRefused]:
        """Answer libzmq's questions whether a client's key may connect; yields refused clients."""
        assert self.credentials is not None
        for version, request_id, _domain, host, _route, mechanism, *proof in self._drain(questions):
            key = z85.encode(proof[0]).decode() if mechanism == b"CURVE" and len(proof) == 1 else ""
            allowed = key in self.credentials.allowed
            verdict = (b"200", b"", key.encode()) if allowed else (b"400", b"", b"")
            questions.send_multipart([version, request_id, *verdict, b""], zmq.NOBLOCK)
            if not allowed:
                yield ClientRefused(
                    f"key {key or 'missing'} is not on the allow-list", host.decode(errors="replace"), key
                )

    @staticmethod
    def _drain_events(monitor: zmq.Socket[bytes], limit: int = 256) -> Iterable[tuple[zmq.Event, int]]:
        """Events waiting now. libzmq's I/O thread blocks on a monitor that is not read."""
        for _ in range(limit):
            try:
                message = recv_monitor_message(monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            yield zmq.Event(message["event"]), message["value"]

    @staticmethod
    def _drain(socket: zmq.Socket[bytes], limit: int = 256) -> Iterable[list[bytes]]:
        """Messages waiting now, at most `limit`: one peer must not keep the loop busy."""
        for _ in range(limit):
            try:
                yield socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        assert self._context is not None, "bind() first"
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _QUEUE_FRAMES)
        socket.setsockopt(zmq.RCVHWM, _UNREAD_FRAMES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_NBYTES)
        return socket

    def close(self) -> None:
        """Close every socket without waiting for peers. Safe to call twice."""
        for route in list(self._dealers):
            self.drop(route)
        if self._router is not None:
            if self._gate is not None:
                self._router.disable_monitor()
            for guard in (self._gate, self._questions):
                if guard is not None:
                    guard.close()
            self._gate = self._questions = None
            self._router.close()
            self._router = None
        if self._poller is not None:
            self._poller.close()
            self._poller = None
        if self._context is not None:
            zmq_context.end(self._context)  # also closes sockets of a `bind` that failed halfway
            self._context = None


def _readable(socket: zmq.Socket[bytes]) -> bool:
    events = socket.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & _POLLIN)


def _any_of(events: Mapping[zmq.Event, str]) -> int:
    mask = 0
    for event in events:
        mask |= event
    return mask
