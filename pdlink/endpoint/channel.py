"""ZeroMQ frames in and out, and nothing else: no protocol, no state of a peer.

A worker binds one ROUTER, and opens one DEALER per session it dials. Every socket is owned by the thread that calls
`poll`; no call waits for a peer: a full queue makes `send` return False, sockets close without lingering, and a
connection that is refused or cut is reported as `Disconnected` by a monitor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import recv_monitor_message

from pdlink.errors import ConfigError
from pdlink.protocol.messages import MAX_FRAME_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

_QUEUE_FRAMES = 10_000
"""Frames queued per peer before it counts as not reading."""

_CUT = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
"""Monitored on dialed sockets: an established connection ended, or an attempt failed. Seen 6 ms after a SIGKILL."""


@dataclass(frozen=True, slots=True)
class Received:
    route: str
    frame: bytes


@dataclass(frozen=True, slots=True)
class Disconnected:
    route: str


class Channel:
    """The sockets of one worker. `bind()` acquires; all other methods belong to one thread."""

    def __init__(self, identity: str) -> None:
        """identity: unique per worker life (name and epoch)."""
        self._identity = identity.encode()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._dealers: dict[str, tuple[zmq.Socket[bytes], zmq.Socket[bytes]]] = {}
        self._poller = zmq.Poller()
        self._num_dialed = 0

    def bind(self, host: str, port: int) -> int:
        """Listen on host:port (0 takes a free one); returns the port. Raises ConfigError if that cannot be."""
        self._context = zmq.Context()
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self._router.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"control_port: cannot bind tcp://{host}:{port}: {error.strerror}") from None
        self._poller.register(self._router, zmq.POLLIN)
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        return int(endpoint.rsplit(":", 1)[1])

    def dial(self, address: str) -> str:
        """Open a connection to a peer's ROUTER; returns the route. A failure is reported by `poll`.

        Raises ConfigError for an address that is not tcp://host:port.
        """
        self._num_dialed += 1
        route = f"dial-{self._num_dialed}"
        dealer = self._socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, self._identity + b"/%d" % self._num_dialed)
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
        monitor = dealer.get_monitor_socket(_CUT)
        try:
            if not address.startswith("tcp://"):
                raise ConfigError(f"control address must be tcp://host:port, got {address!r}")
            dealer.connect(address)
        except (zmq.ZMQError, ConfigError) as error:
            dealer.disable_monitor()
            monitor.close()
            dealer.close()
            raise ConfigError(f"cannot dial {address!r}: {error}") from None
        self._dealers[route] = (dealer, monitor)
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        return route

    def send(self, route: str, frame: bytes) -> bool:
        """Queue one frame. False if the peer is gone or has not read for so long that its queue is full."""
        try:
            if route in self._dealers:
                self._dealers[route][0].send(frame, zmq.NOBLOCK)
            elif self._router is not None:
                self._router.send_multipart([bytes.fromhex(route), frame], zmq.NOBLOCK)
            else:
                return False
        except (zmq.Again, zmq.ZMQError, ValueError):
            return False
        return True

    def drop(self, route: str) -> None:
        """Close a dialed connection; what is queued gets 100 ms to leave. Accepted ones are the peer's to close."""
        pair = self._dealers.pop(route, None)
        if pair is not None:
            dealer, monitor = pair
            self._poller.unregister(dealer)
            self._poller.unregister(monitor)
            dealer.disable_monitor()
            monitor.close()
            dealer.close(linger=100)

    def watch(self, fd: int) -> None:
        """Let `poll` also wait for this descriptor to become readable."""
        self._poller.register(fd, zmq.POLLIN)

    def poll(self, timeout_s: float) -> tuple[list[Received | Disconnected], set[int]]:
        """Wait up to `timeout_s`; what arrived, and which watched descriptors are readable."""
        ready = dict(self._poller.poll(max(0, int(timeout_s * 1000))))
        arrived: list[Received | Disconnected] = []
        if self._router is not None and self._router in ready:
            arrived.extend(
                Received(frames[0].hex(), frames[1]) for frames in self._drain(self._router) if len(frames) == 2
            )
        for route, (dealer, monitor) in list(self._dealers.items()):
            if dealer in ready:
                arrived.extend(Received(route, frames[0]) for frames in self._drain(dealer) if len(frames) == 1)
            if monitor in ready:
                recv_monitor_message(monitor, zmq.NOBLOCK)
                arrived.append(Disconnected(route))
        return arrived, {fd for fd in ready if isinstance(fd, int)}

    @staticmethod
    def _drain(socket: zmq.Socket[bytes], limit: int = 256) -> Iterable[list[bytes]]:
        """Messages waiting now, at most `limit` so that one peer cannot keep the loop to itself."""
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
        socket.setsockopt(zmq.RCVHWM, _QUEUE_FRAMES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_NBYTES)
        return socket

    def close(self) -> None:
        """Close every socket without waiting for peers. Safe to call twice."""
        for route in list(self._dealers):
            self.drop(route)
        if self._router is not None:
            self._router.close()
            self._router = None
        if self._context is not None:
            self._context.term()
            self._context = None
