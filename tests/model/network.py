"""A control network that a schedule drives: frames wait in queues until somebody delivers, loses or repeats them.

It keeps what ZeroMQ promises and what it does not: within a connection frames are in order and none is missing unless
the connection was cut; a DEALER reconnects by itself, also to the successor of the process it dialed, and its route
at the ROUTER stays the same; the news of a cut comes late or never. Loss, repetition and replay of single frames are
not what TCP does, but what the chaos command does and what a bug may look like.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pdlink.endpoint.channel import Channel, QueueFull
from pdlink.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Frame:
    content: bytes

    @property
    def tells_of_an_end(self) -> bool:
        return any(kind in self.content for kind in (b"quiet", b"done", b"stop"))


@dataclass(eq=False)
class Connection:
    """One dialed connection, which may outlive the process that it was made to."""

    dialer: Port
    dial_route: str
    address: str
    listen_route: str
    to_listener: deque[Frame] = field(default_factory=deque)
    to_dialer: deque[Frame] = field(default_factory=deque)
    open: bool = True
    """False once the dialer has dropped it or has died."""
    known_to: set[Port] = field(default_factory=set)
    """Listeners that have heard of this route, in this life."""
    notices: int = 0
    """Ends of the connection that the dialer has not been told of."""

    @property
    def num_waiting(self) -> int:
        return len(self.to_listener) + len(self.to_dialer)


class Network:
    """Every connection, by number of its making; and who listens where."""

    def __init__(self) -> None:
        self.listening: dict[str, Port] = {}
        self.connections: list[Connection] = []
        self.doomed = b""
        """The next frame with this in it is lost."""

    def cut(self, connection: Connection) -> None:
        """What is under way is lost; the dialer connects again by itself and may be told."""
        connection.to_listener.clear()
        connection.to_dialer.clear()
        connection.notices += 1

    def crash(self, port: Port, *, lose: bool) -> None:
        """The process of this port is gone. lose: with what it had sent."""
        port.alive = False
        if self.listening.get(port.address) is port:
            del self.listening[port.address]
        for connection in self.connections:
            if connection.dialer is port:
                connection.open = False
                connection.to_dialer.clear()
                if lose:
                    connection.to_listener.clear()
            elif connection.address == port.address:
                connection.notices += 1
                connection.to_listener.clear()
                if lose:
                    connection.to_dialer.clear()

    def tidy(self) -> None:
        """Forget connections that can bring nothing any more."""
        self.connections = [item for item in self.connections if item.open or item.to_listener]


class Port(Channel):
    """The channel of one life of a worker: sends go into the network, what arrives is handed to `Endpoint.turn`."""

    def __init__(self, network: Network, identity: str, address: str) -> None:
        super().__init__(identity)
        self.name = identity
        self.address = address
        self.alive = True
        self.full = False
        """Whether the next frame finds its queue full."""
        self._network = network
        self._connections: dict[str, Connection] = {}
        self._dials = 0

    def dial(self, address: str) -> str:
        if not address.startswith("tcp://"):
            raise ConfigError(f"cannot dial {address!r}")
        self._dials += 1
        listen_route = f"{self.name}/{self._dials}".encode().hex()
        connection = Connection(self, f"dial-{self._dials}", address, listen_route)
        self._connections[connection.dial_route] = connection
        self._network.connections.append(connection)
        if address not in self._network.listening:
            connection.notices += 1
        return connection.dial_route

    def accept(self, connection: Connection) -> None:
        """A frame of this connection is about to arrive here: from now on its route can be answered."""
        connection.known_to.add(self)
        self._connections[connection.listen_route] = connection

    def send(self, route: str, frame: bytes) -> bool:
        connection = self._connections.get(route)
        if connection is None:
            return False
        if self.full:
            self.full = False
            raise QueueFull
        if self._network.doomed and self._network.doomed in frame:
            self._network.doomed = b""
            return True
        if connection.dialer is self:
            connection.to_listener.append(Frame(frame))
            return True
        if not connection.open:
            return bool(connection.to_listener)  # the end of the connection has not been read here yet
        connection.to_dialer.append(Frame(frame))
        return True

    def drop(self, route: str) -> None:
        connection = self._connections.get(route)
        if connection is not None and connection.dialer is self:
            del self._connections[route]
            connection.open = False
            connection.to_dialer.clear()
