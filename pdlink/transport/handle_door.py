"""Where a peer on this host gets the handles of virtual memory: descriptors travel over a Unix socket alone.

An invitation names the door and a secret, which the asker must know. Both sides look at the other process: here for
the same user, there for the process that has invited. Chunks are exported when they are asked for, some at a time,
and the descriptors closed once they are sent: 60 GB in chunks of 20 MiB are 3,000, and no process keeps that many.

pidfd_getfd(2), which torch uses, would need no socket, and the right to trace the process, which containers and Yama
refuse (pytorch#165685).
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import socket
import struct
import time
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec

from pdlink import threads
from pdlink.cuda.virtual import FABRIC_HANDLE_NBYTES, SharedMemory
from pdlink.errors import LocalError, ProtocolError, TransportFailure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdlink.cuda.virtual import Range

log = logging.getLogger(__name__)

SECRET_NBYTES: Final = 16
_MOST_AT_ONCE: Final = 64
"""Chunks in one answer. The kernel passes 253 descriptors with one message (SCM_MAX_FD)."""
_MOST_NBYTES: Final = 16 << 10
_ANSWER_S: Final = 1.0
_AGAIN_S: Final = 0.1
"""For one asker, who may have come to hold the others up."""
_CREDENTIALS: Final = struct.Struct("iii")

Secret = Annotated[bytes, msgspec.Meta(min_length=SECRET_NBYTES, max_length=SECRET_NBYTES)]


class DoorPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a door is; a part of an invitation."""

    name: Annotated[str, msgspec.Meta(max_length=100)]
    """In the abstract namespace, without its zero byte."""
    secret: Secret


class _Question(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    secret: Secret
    region: Annotated[int, msgspec.Meta(ge=0)]


class _Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Some chunks, the first ones first. Descriptors come beside it."""

    sizes: Annotated[tuple[Annotated[int, msgspec.Meta(ge=1, le=2**62)], ...], msgspec.Meta(max_length=_MOST_AT_ONCE)]
    fabric: tuple[
        Annotated[bytes, msgspec.Meta(min_length=FABRIC_HANDLE_NBYTES, max_length=FABRIC_HANDLE_NBYTES)], ...
    ]
    refused: str = ""


class _Caller(NamedTuple):
    pid: int
    uid: int
    gid: int


class HandleDoor:
    """Of one transport. Its thread ends with `close`."""

    def __init__(self) -> None:
        """Raises OSError."""
        self.place = DoorPlace(f"pdlink-{os.getpid()}-{secrets.token_hex(8)}", secrets.token_bytes(SECRET_NBYTES))
        self._ranges: dict[int, Range] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(_address(self.place))
            self._listener.listen()
        except BaseException:
            self._listener.close()
            raise
        self._closed, self._pid = False, os.getpid()
        # Without it peers are refused at once, and take another lane.
        self._thread = threads.guarded("pdlink-handles", self._serve, lambda _: self._listener.close())
        self._thread.start()

    def add(self, region: int, memory: Range) -> None:
        self._ranges[region] = memory

    def close(self) -> None:
        """Safe to call twice, and in a forked child, which leaves the door to its parent."""
        if not self._closed:
            self._closed = True
            if os.getpid() == self._pid:
                with contextlib.suppress(OSError):  # its thread has died
                    self._listener.shutdown(socket.SHUT_RDWR)
                self._thread.join(_ANSWER_S)
            self._listener.close()

    def _serve(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # no descriptor is left
                if not self._closed:
                    log.warning("pdlink: handles of GPU memory: %s; peers that connect take another lane", error)
                    time.sleep(_AGAIN_S)
                continue
            with connection:
                try:
                    connection.settimeout(_ANSWER_S)
                    self._answer(connection)
                except (OSError, LocalError, msgspec.DecodeError) as error:
                    log.debug("pdlink: a peer got no handles of GPU memory: %s: %s", type(error).__name__, error)
                except Exception:
                    log.exception("pdlink: a peer got no handles of GPU memory")

    def _answer(self, connection: socket.socket) -> None:
        if _caller(connection).uid not in (0, os.geteuid()):
            return
        question = msgspec.msgpack.decode(connection.recv(_MOST_NBYTES), type=_Question)
        memory = self._ranges.get(question.region)
        if memory is None or not hmac.compare_digest(question.secret, self.place.secret):
            connection.send(msgspec.msgpack.encode(_Answer((), (), "no such memory is shared with you")))
            return
        for first in range(0, len(memory.chunks), _MOST_AT_ONCE):
            shared: list[SharedMemory] = []
            try:
                try:
                    for chunk in memory.chunks[first : first + _MOST_AT_ONCE]:
                        shared.append(memory.export(chunk))  # noqa: PERF401  of a failure the first ones are closed
                except LocalError as error:
                    connection.send(msgspec.msgpack.encode(_Answer((), (), str(error))))
                    raise
                sizes = tuple(one.nbytes for one in shared)
                fabric = tuple(one.handle for one in shared if isinstance(one.handle, bytes))
                message = msgspec.msgpack.encode(_Answer(sizes, fabric))
                socket.send_fds(connection, [message], _descriptors(shared))
            finally:
                _close(_descriptors(shared))


def handles(place: DoorPlace, pid: int, region: int, nbytes: int, deadline_s: float) -> Iterator[SharedMemory]:
    """The chunks of a region that a process offers, `nbytes` together or more. Each is the caller's from then on.

    deadline_s: of `time.monotonic`. Raises TransportFailure, ProtocolError for what is no answer, OSError.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        _limit(connection, deadline_s)
        try:
            connection.connect(_address(place))
        except ConnectionRefusedError as error:
            raise TransportFailure(
                f"handles of GPU memory: {error}: the peer has ended, or is in another network namespace; run both "
                "in one, or take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF"
            ) from None
        if _caller(connection).pid != pid:
            raise ProtocolError("handles of GPU memory: another process listens there than the one that has invited")
        connection.send(msgspec.msgpack.encode(_Question(place.secret, region)))
        while nbytes > 0:
            _limit(connection, deadline_s)
            chunks = _received(connection)
            try:
                while chunks:
                    nbytes -= chunks[0].nbytes
                    yield chunks.pop(0)
            finally:
                _close(_descriptors(chunks))


def _limit(connection: socket.socket, deadline_s: float) -> None:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("handles of GPU memory: the peer takes too long")
    connection.settimeout(left_s)


def _received(connection: socket.socket) -> list[SharedMemory]:
    message, descriptors, flags, _ = socket.recv_fds(connection, _MOST_NBYTES, _MOST_AT_ONCE, socket.MSG_CMSG_CLOEXEC)
    try:
        if flags & socket.MSG_CTRUNC:
            raise TransportFailure(
                "handles of GPU memory: got fewer descriptors than were sent; raise the limit on open files of this "
                "process (ulimit -n)"
            )
        if not message:
            raise TransportFailure("handles of GPU memory: the peer has closed the connection")
        try:
            answer = msgspec.msgpack.decode(message, type=_Answer)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"handles of GPU memory: {error}") from error
        if answer.refused:
            raise TransportFailure(f"handles of GPU memory: {answer.refused}")
        given: list[int | bytes] = [*answer.fabric, *descriptors]
        if not answer.sizes or len(given) != len(answer.sizes):
            raise ProtocolError(f"handles of GPU memory: got {len(given)} for {len(answer.sizes)} chunks")
    except BaseException:
        _close(descriptors)
        raise
    return [SharedMemory(size, handle) for size, handle in zip(answer.sizes, given, strict=True)]


def _caller(connection: socket.socket) -> _Caller:
    """The process on the other side: the one that has connected, or called listen(2)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _Caller(*_CREDENTIALS.unpack(raw))


def _address(place: DoorPlace) -> str:
    return f"\0{place.name}"


def _descriptors(shared: list[SharedMemory]) -> list[int]:
    return [one.handle for one in shared if isinstance(one.handle, int)]


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
