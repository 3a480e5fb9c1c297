"""Bounds the bytes of unfinished messages that libzmq buffers for a connection.

ZMQ_MAXMSGSIZE bounds one part of a message, ZMQ_RCVHWM the number of whole messages. libzmq 4.3.5 buffers a message
of endless parts without bound, before and after the handshake, also with keys. Socket types without parts (SERVER,
CLIENT) are drafts, and pyzmq's wheels leave them out. But libzmq reports the descriptor of each connection, and the
kernel the bytes received on it (TCP_INFO, Linux 4.1). Bytes since the last whole message are the bytes libzmq holds;
a connection with too many is shut down, and libzmq frees them.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

MAX_HELD_NBYTES = 16 * 2**20
"""Of one connection, at two looks in a row: four times the largest frame."""
MAX_ALL_HELD_NBYTES = 256 * 2**20
"""Of all connections; beyond it the one that holds most is shut down."""
LOOK_S = 0.1
"""Interval of looks. Bytes that come in between are held, too: 40 MB at 400 MB/s."""
_PER_LOOK = 256
"""Connections per look, some 5 µs each; the others follow in the next look."""
_BYTES_RECEIVED = struct.Struct("=Q")
_AT = 128
"""Of tcpi_bytes_received in struct tcp_info (linux/tcp.h)."""

_Ends = tuple[object, object]


@dataclass(slots=True, eq=False)
class _Connection:
    fd: int
    ends: _Ends
    """Both addresses."""
    received_nbytes: int = 0
    base_nbytes: int = 0
    """Received by the last whole message."""
    held_nbytes: int = 0
    suspect: bool = False


class Inflow:
    """Every TCP connection of a channel, by descriptor. libzmq owns and closes them.

    A descriptor that libzmq has closed may be reused, so its two addresses are compared before a shutdown.
    """

    def __init__(self) -> None:
        self._connections: dict[int, _Connection] = {}
        self.delivered: set[int] = set()
        """Descriptors of connections of which libzmq has delivered a whole message since the last look at them."""
        self._turns: deque[_Connection] = deque()
        self.look_at_s = 0.0
        """When the next look is due (time.monotonic)."""

    def __len__(self) -> int:
        return len(self._connections)

    def begun(self, fd: int) -> None:
        """libzmq has accepted or made this connection."""
        ends = _ends(fd)
        self.delivered.discard(fd)
        if ends is not None:
            connection = self._connections[fd] = _Connection(fd, ends)
            self._turns.append(connection)

    def look(self) -> int:
        """Shut down connections that hold too much; returns how many. For every `LOOK_S`."""
        self.look_at_s = time.monotonic() + LOOK_S
        num_ended = 0
        for _ in range(min(_PER_LOOK, len(self._turns))):
            connection = self._turns.popleft()
            if self._connections.get(connection.fd) is not connection:
                continue
            self._measure(connection)
            if connection.received_nbytes == 0 and _ends(connection.fd) != connection.ends:  # libzmq has closed it
                del self._connections[connection.fd]
                continue
            self._turns.append(connection)
            too_much = connection.held_nbytes > MAX_HELD_NBYTES
            if too_much and connection.suspect:
                num_ended += self._shut_down(connection)
            connection.suspect = too_much
        if sum(connection.held_nbytes for connection in self._connections.values()) > MAX_ALL_HELD_NBYTES:
            num_ended += self._shut_down(max(self._connections.values(), key=lambda item: item.held_nbytes))
        return num_ended

    def _measure(self, connection: _Connection) -> None:
        connection.received_nbytes = _received_nbytes(connection.fd)
        if connection.fd in self.delivered:
            self.delivered.remove(connection.fd)
            connection.base_nbytes = connection.received_nbytes
        connection.held_nbytes = max(0, connection.received_nbytes - connection.base_nbytes)

    def _shut_down(self, connection: _Connection) -> int:
        del self._connections[connection.fd]
        if _ends(connection.fd) != connection.ends:
            return 0
        log.warning(
            "control connection with %s shut down: got %d bytes of one unfinished message; expected at most %d",
            connection.ends[1], connection.held_nbytes, MAX_HELD_NBYTES,
        )  # fmt: skip
        try:
            with _borrowed(connection.fd) as borrowed:
                borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset when closed
                borrowed.shutdown(socket.SHUT_RDWR)
        except OSError:
            return 0
        return 1


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A socket object over a descriptor of libzmq. Raises OSError if it is not a socket."""
    borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=fd)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _ends(fd: int) -> _Ends | None:
    try:
        with _borrowed(fd) as borrowed:
            return borrowed.getsockname(), borrowed.getpeername()
    except OSError:
        return None


def _received_nbytes(fd: int) -> int:
    """0 if it is not an open TCP socket, or the kernel does not report it."""
    try:
        borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=fd)
    except OSError:
        return 0
    try:  # no context manager: this runs thousands of times a second
        info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _AT + _BYTES_RECEIVED.size)
    except OSError:
        return 0
    finally:
        borrowed.detach()
    return int(_BYTES_RECEIVED.unpack_from(info, _AT)[0]) if len(info) >= _AT + _BYTES_RECEIVED.size else 0
