"""`RespConnection` to a server that speaks RESP (Valkey, Redis): payload goes straight from and into the caller's
memory.

Nothing a server sends is believed: every wait ends at the exchange's deadline, every reply is bounded by what the
caller expects, and all else raises `Lying`. After any exception but `CommandRefused` the connection must be closed.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LINE_NBYTES = 16384
"""Longest line; what is read beyond it is copied once more."""
_MOST_NBYTES = 4 << 20
"""Of a reply in arrays and what they hold: its bytes, and _ITEM_NBYTES for each item."""
_ITEM_NBYTES = 64
_MOST_PIECES = 512
"""Of memory in one call of sendmsg; the kernel takes 1,024."""

_LATE = "the server did not answer in time"
_TIMEVAL = struct.Struct("@ll")
_DEEPEST = 3
"""Arrays in arrays."""
_NULLS = (b"$-1", b"*-1", b"_")
"""Of RESP2 and RESP3."""

Reply = Union[bytes, int, None, list["Reply"]]  # noqa: UP007


class CommandRefused(OSError):
    """The server answered a command with an error."""


class Lying(ConnectionError):
    """The server sent what is no answer to what it was asked."""


def command(*words: bytes) -> bytes:
    """One command as it is sent."""
    return b"*%d\r\n" % len(words) + b"".join(map(_word, words))


def command_with(
    words: Sequence[bytes], value: Sequence[memoryview], after: Sequence[bytes]
) -> list[bytes | memoryview]:
    """One command with a value of several pieces between its words, to be sent from where they are."""
    head = b"*%d\r\n" % (len(words) + 1 + len(after)) + b"".join(map(_word, words))
    return [head + b"$%d\r\n" % sum(map(len, value)), *value, b"\r\n" + b"".join(map(_word, after))]


def _word(word: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(word), word)


class RespConnection:
    """For one thread at a time. `until` before each exchange; replies come in the order of the commands."""

    def __init__(self, address: tuple[str, int] | str, timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        """address: host and port, or the path of a Unix socket. Raises OSError if nobody answers in time."""
        self._deadline_s = time.monotonic() + timeout_s
        if isinstance(address, str):
            plain = socket.socket(socket.AF_UNIX)
            plain.settimeout(timeout_s)
        else:
            plain = socket.create_connection(address, timeout_s)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = plain
        try:
            if isinstance(address, str):
                plain.connect(address)
            elif tls is not None:
                plain.settimeout(self._left_s())
                self._socket = tls.wrap_socket(plain, server_hostname=address[0])
        except BaseException:
            plain.close()
            raise
        self._plain = not isinstance(self._socket, ssl.SSLSocket)
        if self._plain:
            self._socket.settimeout(None)  # the kernel keeps the time, see `_limit`
        self._buffer = bytearray(_LINE_NBYTES)
        self._begin = self._end = 0
        """What was received and not yet taken."""

    def until(self, deadline_s: float) -> None:
        """Monotonic time at which every later call fails."""
        self._deadline_s = deadline_s

    def send(self, pieces: Iterable[bytes | memoryview]) -> None:
        left = [memoryview(piece) for piece in pieces if len(piece)]
        while left:
            self._limit(socket.SO_SNDTIMEO)
            try:
                sent = self._socket.sendmsg(left[:_MOST_PIECES]) if self._plain else self._socket.send(left[0])
            except BlockingIOError:
                raise TimeoutError(_LATE) from None
            done = 0
            while done < len(left) and sent >= len(left[done]):
                sent -= len(left[done])
                done += 1
            del left[:done]
            if sent:
                left[0] = left[0][sent:]

    def reply(self) -> Reply:
        """A small reply: status or bulk string, number, null, array of such. Raises Refused for an error."""
        self._left_nbytes = _MOST_NBYTES
        return self._reply(0)

    def bulk_nbytes(self) -> int | None:
        """Length of the bulk string that comes now, whose bytes `bulk_into` must take; None for null."""
        line = self._head()
        if line in _NULLS:
            return None
        if line[:1] != b"$":
            raise Lying(f"got {line[:20]!r}; expected a bulk string")
        return _number(line)

    def bulk_into(self, *pieces: memoryview) -> None:
        """The bytes of the bulk string, whose length is that of the pieces together."""
        for piece in pieces:
            ready = min(len(piece), self._end - self._begin)
            piece[:ready] = memoryview(self._buffer)[self._begin : self._begin + ready]
            self._begin += ready
            left = piece[ready:]
            while left:
                left = left[self._receive(left, whole=True) :]
        if self._line():
            raise Lying("got more than the bulk string's length")

    def skip_bulk(self, most_nbytes: int) -> None:
        """Take a bulk string or null that nobody wants."""
        nbytes = self.bulk_nbytes()
        if nbytes is not None:
            if nbytes > most_nbytes:
                raise Lying(f"got {nbytes} bytes; expected at most {most_nbytes}")
            self.bulk_into(memoryview(bytearray(nbytes)))

    def wake(self) -> None:
        """End what another thread waits for in here, with an error; it closes the connection then."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _reply(self, depth: int) -> Reply:
        line = self._head()
        kind, number = line[:1], _number(line) if line[:1] in b"$:*" and line not in _NULLS else 0
        self._left_nbytes -= _ITEM_NBYTES + len(line) + (number if kind == b"$" else 0)
        if self._left_nbytes < 0 or (kind == b"*" and depth == _DEEPEST):
            raise Lying(f"got a reply without end; expected at most {_MOST_NBYTES} bytes")
        if line in _NULLS:
            return None
        if kind == b"+":
            return line[1:]
        if kind == b":":
            return number
        if kind == b"$":
            text = bytearray(number)
            self.bulk_into(memoryview(text))
            return bytes(text)
        if kind == b"*":
            return [self._reply(depth + 1) for _ in range(number)]
        raise Lying(f"got {line[:20]!r}; expected a reply")

    def _head(self) -> bytes:
        """The first line of a reply that is no error."""
        line = self._line()
        if line[:1] == b"-":
            raise CommandRefused(line[1:200].decode("ascii", "replace"))
        return line

    def _line(self) -> bytes:
        while (at := self._buffer.find(b"\r\n", self._begin, self._end)) < 0:
            waiting = self._end - self._begin
            if waiting == _LINE_NBYTES:
                raise Lying(f"got an endless line; expected at most {_LINE_NBYTES} bytes")
            self._buffer[:waiting] = self._buffer[self._begin : self._end]
            self._begin, self._end = 0, waiting
            self._end += self._receive(memoryview(self._buffer)[waiting:])
        line = bytes(self._buffer[self._begin : at])
        self._begin = at + 2
        return line

    def _receive(self, into: memoryview, *, whole: bool = False) -> int:
        """Fill a part of `into`, at least one byte. whole: all of it is to come, so one call may wait for it."""
        self._limit(socket.SO_RCVTIMEO)
        try:
            nbytes = self._socket.recv_into(into, 0, socket.MSG_WAITALL if whole and self._plain else 0)
        except BlockingIOError:
            raise TimeoutError(_LATE) from None
        if not nbytes:
            raise ConnectionError("the server closed the connection")
        return nbytes

    def _limit(self, option: int) -> None:
        """The next call ends at the deadline. In Python's own way each call would be three of the system's, and none
        could wait for a whole part."""
        left_s = self._left_s()
        if self._plain:
            self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(left_s), int(left_s % 1 * 1e6) or 1))
        else:
            self._socket.settimeout(left_s)

    def _left_s(self) -> float:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(_LATE)
        return left_s


def _number(line: bytes) -> int:
    digits = line[1:]
    if not digits.isdigit() or len(digits) > 12:
        raise Lying(f"got {line[:20]!r}; expected a length")
    return int(digits)
