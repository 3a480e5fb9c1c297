"""`StagingLine`: a connection of the staging lane. It never waits: what does not fit into the socket waits here."""

from __future__ import annotations

import contextlib
import select
import socket
from typing import TYPE_CHECKING

from pdlink.transport.staging.wire import HELLO_NBYTES, MAX_FRAME_NBYTES, Frame, FrameCutter, packed

if TYPE_CHECKING:
    from collections.abc import Iterator

_READ_NBYTES = 1 << 15
"""At once: some 5,000 of the shortest frames, which take 10 ms."""


class StagingLine:
    """Used with the lock of its owner held."""

    def __init__(self, sock: socket.socket, epoll: select.epoll, *, known: bool) -> None:
        """The socket belongs to the line. known: the other side has been authenticated (it was dialed)."""
        self._socket, self._epoll = sock, epoll
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._inflow = FrameCutter(MAX_FRAME_NBYTES if known else HELLO_NBYTES)
        self._unsent = bytearray()
        self._ending = False
        self.fd = sock.fileno()
        self.ended = False
        """The other side sends nothing more."""
        self._watched = select.EPOLLIN | (select.EPOLLOUT if known else 0)
        epoll.register(self.fd, self._watched)

    @classmethod
    def dial(cls, host: str, port: int, epoll: select.epoll) -> StagingLine:
        """Begin to connect; what is sent meanwhile waits. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect((host, port))
            return cls(sock, epoll, known=True)
        except BaseException:
            sock.close()
            raise

    def known(self) -> None:
        """The other side has said who it is: frames of every length may come."""
        self._inflow.most_nbytes = MAX_FRAME_NBYTES

    def send(self, frame: Frame) -> None:
        """Never raises: a connection that has broken shows in `frames`."""
        if not self._ending:
            self._unsent += packed(frame)
            if not self._watched & select.EPOLLOUT:  # else the loop does, once it is connected or has room
                self.flush()

    def flush(self) -> None:
        """Send what fits now."""
        if self.fd < 0:
            return
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._unsent.clear()
        wanted = select.EPOLLIN | (select.EPOLLOUT if self._unsent else 0)
        if wanted != self._watched and not self.ended:
            self._watched = wanted
            self._epoll.modify(self.fd, wanted)

    def frames(self) -> Iterator[Frame]:
        """Frames of one read at most; afterwards `ended` may be set. Raises ProtocolError.

        The descriptor stays readable while there is more. Other peers have their turn between two reads, and the
        owner's lock is free then: a peer that sends without end must not keep it.
        """
        for reads in (True, False):
            while not self.ended and (frame := self._inflow.take()) is not None:
                yield frame
            if reads and not self.ended:
                self._read()

    def _read(self) -> None:
        try:
            received = self._socket.recv(_READ_NBYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            received = b""
        if received:
            self._inflow.add(received)
        else:
            self.stop()  # its end would be reported for ever

    def stop(self) -> None:
        """Hear nothing more: the other side does not keep to the protocol."""
        if not self.ended:
            self.ended = True
            self._epoll.unregister(self.fd)

    def end(self) -> None:
        """Send nothing more; what the other side sends still comes."""
        if not self._ending and self.fd >= 0:
            self._ending = True
            self._unsent.clear()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Safe to call twice."""
        if self.fd >= 0:
            if not self.ended:
                self._epoll.unregister(self.fd)
            self.fd, self.ended = -1, True
            self._socket.close()
