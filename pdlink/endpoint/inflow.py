"""Ends connections of which libzmq holds much that it cannot give us.

ZMQ_MAXMSGSIZE bounds one part of a message and ZMQ_RCVHWM the number of whole messages. A message whose parts never
end is read and kept without bound, before and after the handshake, with keys too (libzmq 4.3.5). The sockets that
have no parts (SERVER, CLIENT) are drafts, which pyzmq's wheels lack. But libzmq tells the descriptor of each
connection, and the kernel how many bytes came on it (TCP_INFO, Linux 4.1). What came since the last whole message is
what libzmq keeps: a connection on which that is too much is shut down, and libzmq frees it.
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
"""Of all together: then the one with most is ended."""
LOOK_S = 0.1
"""Between two looks. What comes in between is held, too: 40 MB at 400 MB/s."""
_PER_LOOK = 256
"""Connections that are looked at, some 5 us each; the others have their turn next time."""
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
    """Received when the last whole message was noticed."""
    held_nbytes: int = 0
    fresh: bool = False
    """Whether a whole message came since the last look."""
    suspect: bool = False


class Inflow:
    """Every TCP connection of a channel, by descriptor. libzmq owns these; nothing here closes one.

    A descriptor that libzmq has closed may be that of anything else, so before one is shut down its two addresses are
    compared with those it had.
    """

    def __init__(self) -> None:
        self._connections: dict[int, _Connection] = {}
        self._turns: deque[_Connection] = deque()
        self._next_look_s = 0.0

    def __len__(self) -> int:
        return len(self._connections)

    def begun(self, fd: int) -> None:
        """libzmq has accepted or made this connection."""
        ends = _ends(fd)
        if ends is not None:
            connection = self._connections[fd] = _Connection(fd, ends)
            self._turns.append(connection)

    def delivered(self, fd: int) -> None:
        """A whole message of this connection was given to us."""
        connection = self._connections.get(fd)
        if connection is not None:
            connection.fresh = True

    def look(self) -> int:
        """Shut down what holds too much, if it is time to look; returns how many."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return 0
        self._next_look_s = now_s + LOOK_S
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

    @staticmethod
    def _measure(connection: _Connection) -> None:
        connection.received_nbytes = _received_nbytes(connection.fd)
        if connection.fresh:
            connection.base_nbytes, connection.fresh = connection.received_nbytes, False
        connection.held_nbytes = max(0, connection.received_nbytes - connection.base_nbytes)

    def _shut_down(self, connection: _Connection) -> int:
        del self._connections[connection.fd]
        if _ends(connection.fd) != connection.ends:
            return 0
        log.warning(
            "control connection with %s is ended: it has sent %d bytes of a message that does not end, limit %d",
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
    """A socket that somebody else closes. Raises OSError if it is none."""
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
    """0 where it is not a TCP socket, not open, or the kernel does not tell."""
    try:
        borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=fd)
    except OSError:
        return 0
    try:  # no context manager: this is done thousands of times a second
        info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _AT + _BYTES_RECEIVED.size)
    except OSError:
        return 0
    finally:
        borrowed.detach()
    return int(_BYTES_RECEIVED.unpack_from(info, _AT)[0]) if len(info) >= _AT + _BYTES_RECEIVED.size else 0
