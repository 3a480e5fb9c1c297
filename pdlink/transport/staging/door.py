"""Who comes to the staging lane's socket, until they have said who they are. Used under the `Stager`'s lock."""

from __future__ import annotations

import hmac
import logging
import select
import time
from typing import TYPE_CHECKING, Final

from pdlink.errors import ProtocolError
from pdlink.transport.staging.line import StagingLine
from pdlink.transport.staging.wire import Hello

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from pdlink.transport.staging.peers import Owning, StagingPeer

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S: Final = 5.0
MAX_WAITING: Final = 256
"""Connections that have not said who they are; more are ended at once."""
_RETRY_S: Final = 0.2
"""How long nobody is let in when there is no descriptor for them."""


class Door:
    def __init__(self, listen: socket.socket, epoll: select.epoll, peers: Mapping[str, StagingPeer]) -> None:
        """listen: belongs to the door."""
        self._listen, self._epoll, self._peers = listen, epoll, peers
        self._waiting: dict[int, tuple[StagingLine, float]] = {}
        """By descriptor, and until when they may be silent."""
        self._deaf_until_s: float | None = None
        epoll.register(listen.fileno(), select.EPOLLIN)

    @property
    def until_s(self) -> list[float]:
        """When to call `expire`, if nothing happens before."""
        until_s = [until_s for _, until_s in self._waiting.values()]
        return until_s if self._deaf_until_s is None else [*until_s, self._deaf_until_s]

    def accept(self, fd: int) -> bool:
        """Let somebody in, if this is the socket's descriptor."""
        if fd != self._listen.fileno():
            return False
        try:
            sock, _ = self._listen.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):  # they left again
            return True
        except OSError:  # no descriptor: the socket would be reported for ever
            self._epoll.unregister(fd)
            self._deaf_until_s = time.monotonic() + _RETRY_S
            return True
        if len(self._waiting) >= MAX_WAITING:
            sock.close()
            return True
        line = StagingLine(sock, self._epoll, known=False)
        self._waiting[line.fd] = line, time.monotonic() + HELLO_TIMEOUT_S
        return True

    def waits(self, fd: int) -> bool:
        return fd in self._waiting

    def hear(self, fd: int) -> StagingPeer | None:
        """The peer whose line this has turned out to be."""
        line, _ = self._waiting[fd]
        try:
            for frame in line.frames():
                peer, owning = self._invited(frame)
                del self._waiting[fd]
                owning.line, owning.dialed = line, True
                line.known()
                return peer
        except ProtocolError as error:
            log.info("a connection to the staging lane was ended: %s", error)
            self._drop(fd)
        if line.ended:
            self._drop(fd)
        return None

    def expire(self, now: float) -> None:
        if self._deaf_until_s is not None and self._deaf_until_s <= now:
            self._deaf_until_s = None
            self._epoll.register(self._listen.fileno(), select.EPOLLIN)
        for fd in [fd for fd, (_, until_s) in self._waiting.items() if until_s <= now]:
            self._drop(fd)

    def close(self) -> None:
        for fd in list(self._waiting):
            self._drop(fd)
        if self._deaf_until_s is None:
            self._epoll.unregister(self._listen.fileno())
        self._listen.close()

    def _drop(self, fd: int) -> None:
        if fd in self._waiting:
            line, _ = self._waiting.pop(fd)
            line.close()

    def _invited(self, frame: object) -> tuple[StagingPeer, Owning]:
        """Raises ProtocolError."""
        if not isinstance(frame, Hello):
            raise ProtocolError("it did not say whose it is")
        for peer in self._peers.values():
            owning = peer.owning
            if owning is not None and owning.session == frame.session and not owning.dialed and not peer.closing:
                if hmac.compare_digest(owning.token, frame.token):
                    return peer, owning
                break
        raise ProtocolError("it was not invited")
