"""`Carried`: a transport with notes for its peers (`TransportNote`), and what carries them, for use on its own.

What an endpoint's session does for it: a thread polls, a connection for each peer brings notes there, and whose
connection ends is lost. Peers are of one host.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from pdlink.errors import ProtocolError, TransportFailure
from pdlink.transport.base import (
    BatchDone,
    BatchStatus,
    Occurrence,
    PeerClosed,
    PeerFailed,
    Probe,
    Transport,
    TransportNote,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.kv.groups import KVGroups
    from pdlink.kv.layout import RunList
    from pdlink.kv.plan import Plan
    from pdlink.memory.buffers import AnyBuffer

LOOK_S = 0.05
"""As often as the loop of an endpoint with a short heartbeat."""


class CarriedInvitation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    path: str
    token: bytes
    inner: bytes


class NoteLine:
    """To one peer: notes with their length before them."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.socket, self.peer, self._held, self.unsent = sock, peer, bytearray(), bytearray()
        sock.setblocking(False)

    def send(self, data: bytes) -> None:
        self.unsent += len(data).to_bytes(4, "big") + data
        self.flush()

    def flush(self) -> None:
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent.clear()

    def notes(self) -> list[bytes] | None:
        """Of one read; None at the end."""
        try:
            received = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            received = b""
        if not received:
            return None
        self._held += received
        found = []
        while len(self._held) >= 4 and len(self._held) >= (end := 4 + int.from_bytes(self._held[:4], "big")):
            found.append(bytes(self._held[4:end]))
            del self._held[:end]
        return found


class Carried(Transport):
    kind = "carried"

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.reach, self.memory, self.trust = inner.reach, inner.memory, inner.trust
        self._lock = threading.RLock()
        self._path = f"\0pdlink-carried-{os.getpid()}-{secrets.token_hex(8)}"
        self._expected: dict[bytes, str] = {}
        self._lines: list[NoteLine] = []
        self._lost: dict[str, list[Occurrence]] = {}
        """Peers whose connection has ended, and what is not told of them before they are closed."""
        self._written: set[str] = set()
        self._failed: set[str] = set()
        self._out: list[Occurrence] = []
        self._told = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._over = False
        self.failure: Exception | None = None
        """What a poll has raised."""

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.inner.name

    def probe(self) -> Probe:
        return self.inner.probe()

    def open(self) -> None:
        self.inner.open()
        if self._thread is None:
            self._listen = socket.socket(socket.AF_UNIX)
            self._listen.bind(self._path)
            self._listen.listen(64)
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def register(self, buffer: AnyBuffer) -> int:
        return self.inner.register(buffer)

    def guard(self, groups: KVGroups) -> None:
        self.inner.guard(groups)

    def open_blocks(self, peer: str, blocks: Sequence[Sequence[int]]) -> None:
        self.inner.open_blocks(peer, blocks)

    def close_blocks(self, peer: str, blocks: Sequence[Sequence[int]]) -> None:
        self.inner.close_blocks(peer, blocks)

    def invite(self, peer: str) -> bytes:
        inner, token = self.inner.invite(peer), secrets.token_bytes(16)
        with self._lock:
            self._expected[token] = peer
        return msgspec.msgpack.encode(CarriedInvitation(self._path, token, inner))

    def connect(self, peer: str, invitation: bytes) -> None:
        try:
            there = msgspec.msgpack.decode(invitation, type=CarriedInvitation)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(str(error)) from None
        self.inner.connect(peer, there.inner)
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(there.path)
        except OSError as error:
            self.inner.close_peer(peer)
            raise TransportFailure(str(error)) from None
        line = NoteLine(sock, peer)
        line.send(there.token)
        with self._lock:
            self._written.add(peer)
            self._lines.append(line)

    def submit(self, peer: str, lists: Sequence[RunList], timeout_s: float) -> int:
        with self._lock:
            if peer in self._lost:
                raise TransportFailure(f"peer {peer} has failed: its session has ended")
            return self.inner.submit(peer, lists, timeout_s)

    def submit_plan(
        self, peer: str, plan: Plan, layers: range, timeout_s: float, after: Sequence[tuple[int, int]] = ()
    ) -> int:
        with self._lock:
            if peer in self._lost:
                raise TransportFailure(f"peer {peer} has failed: its session has ended")
            return self.inner.submit_plan(peer, plan, layers, timeout_s, after)

    def poll(self) -> list[Occurrence]:
        with self._lock:
            if self.failure is not None and not self._out:
                raise self.failure
            out, self._out = self._out, []
            if out:
                os.eventfd_read(self._told)
            return out

    def fileno(self) -> int:
        return self._told

    def lane(self, peer: str) -> str:
        return self.inner.lane(peer)

    def close_peer(self, peer: str) -> None:
        with self._lock:
            for line in [line for line in self._lines if line.peer == peer]:
                self._drop(line)
            self._expected = {token: name for token, name in self._expected.items() if name != peer}
            self._tell(self._lost.pop(peer, []))
        self.inner.close_peer(peer)

    def close(self) -> None:
        with self._lock:
            thread, self._thread, self._over = self._thread, None, True
        if thread is not None:
            thread.join()
            self._listen.close()
            for line in list(self._lines):
                self._drop(line)
        self.inner.close()
        if thread is not None:
            with self._lock, contextlib.suppress(Exception):
                self._tell([one for one in self.inner.poll() if not isinstance(one, TransportNote)])

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over:
            with self._lock:
                lines = {line.socket.fileno(): line for line in self._lines}
                full = [fd for fd, line in lines.items() if line.unsent]
            listen = self._listen.fileno()
            ready = select.select([self.inner.fileno(), listen, *lines], full, [], LOOK_S)[0]
            with self._lock:
                for line in self._lines:
                    line.flush()
                for fd in ready:
                    if fd == listen:
                        self._accept()
                    elif fd in lines and lines[fd] in self._lines:
                        self._hear(lines[fd])
                try:
                    occurrences = self.inner.poll()
                except Exception as error:  # noqa: BLE001  as the endpoint's loop
                    self.failure = error
                    os.eventfd_write(self._told, 1)
                    return
                self._act(occurrences)

    def _accept(self) -> None:
        sock = self._listen.accept()[0]
        sock.settimeout(5)
        with contextlib.suppress(OSError):
            token = sock.recv(20, socket.MSG_WAITALL)[4:]
            if token in self._expected:
                self._lines.append(NoteLine(sock, self._expected.pop(token)))
                return
        sock.close()

    def _hear(self, line: NoteLine) -> None:
        notes = line.notes()
        try:
            for note in notes or ():
                self.inner.heard(line.peer, note)
        except ProtocolError:
            notes = None
        if notes is None:
            self._drop(line)
            self._lost.setdefault(line.peer, [])
            self.inner.close_peer(line.peer)
            if line.peer in self._written and line.peer not in self._failed:
                self._tell([PeerFailed(line.peer, "peer closed")])

    def _drop(self, line: NoteLine) -> None:
        if line in self._lines:
            self._lines.remove(line)
            line.socket.close()

    def _act(self, occurrences: list[Occurrence]) -> None:
        for one in occurrences:
            if isinstance(one, TransportNote):
                line = next((line for line in self._lines if line.peer == one.peer), None)
                if line is not None:
                    line.send(one.data)
            elif isinstance(one, BatchDone):
                if one.peer in self._lost and one.status is BatchStatus.CANCELLED:
                    one = msgspec.structs.replace(one, status=BatchStatus.PEER_FAILED)  # noqa: PLW2901
                self._tell([one])
            elif one.peer not in self._lost:
                if isinstance(one, PeerFailed):
                    self._failed.add(one.peer)
                self._tell([one])
            elif isinstance(one, PeerClosed):
                self._lost[one.peer].append(one)

    def _tell(self, occurrences: list[Any]) -> None:
        if occurrences and not self._out:
            os.eventfd_write(self._told, 1)
        self._out += occurrences
