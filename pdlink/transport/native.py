"""`NativeTransport`: what the transports with an engine in `csrc/` share.

Such a transport starts its engine (`_start`), adds buffers to it (`_add`) and describes its own invitations;
submitting, reports and the end of a peer are one binding in C++ (`csrc/common/native_py.h`) and this class in Python.
Errors of the engine are translated here and in `edge.translated`, nowhere else.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from pdlink.errors import TransportFailure, TransportUnavailable
from pdlink.transport.base import BatchDone, BatchStatus, Occurrence, PeerClosed, PeerFailed, Transport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.kv.layout import RunList
    from pdlink.kv.plan import Plan
    from pdlink.memory.buffers import AnyBuffer


class NativeEngine(Protocol):
    """The part of a native engine that all of them have; `_copy.pyi` says what each method does."""

    def submit(self, peer: str, lists: Sequence[RunList], timeout_s: float) -> int: ...
    def poll(self) -> list[tuple[str, str, int, str, int, float, float, str]]: ...
    def fileno(self) -> int: ...
    def connected(self, peer: str) -> bool: ...
    def close_peer(self, peer: str) -> None: ...
    def close(self, grace_s: float) -> object: ...


AnyEngine = TypeVar("AnyEngine", bound=NativeEngine)
Kept = TypeVar("Kept", bound="AnyBuffer")


_STATUS = {status.value: status for status in BatchStatus}
"""A look-up takes a tenth of the time of `BatchStatus(value)`."""

CLOSE_GRACE_S = 1.0
"""How long `close()` waits for peers that are not quiet yet; the promise is two seconds in all."""


class NativeTransport(Transport, Generic[AnyEngine, Kept]):
    """One engine, and the buffers that it may use."""

    def __init__(self) -> None:
        self._native: AnyEngine | None = None
        self._closed = False
        self._buffers: list[Kept] = []
        """In the order of their region indices; kept so that the pages stay while the engine may use them."""
        self._registering = threading.Lock()

    @property
    def _engine(self) -> AnyEngine:
        if self._native is None or self._closed:
            raise TransportFailure(f"the {self.name} transport is {'closed' if self._closed else 'not open'}")
        return self._native

    @abstractmethod
    def _start(self) -> AnyEngine:
        """Raises TransportUnavailable."""

    @abstractmethod
    def _add(self, buffer: Kept) -> int:
        """The region index of a buffer of a kind that is in `memory`."""

    def open(self) -> None:
        if self._closed:
            raise TransportUnavailable(f"the {self.name} transport was closed; make a new one")
        if self._native is None:
            self._native = self._start()
            _OPENED.add(self)

    def register(self, buffer: AnyBuffer) -> int:
        if buffer.kind not in self.memory:
            moved = " and ".join(self.memory)
            raise TransportUnavailable(f"buffer: got {buffer.kind} memory; {self.name} moves {moved} memory only")
        with self._registering:
            try:
                index = self._add(cast("Kept", buffer))
            except RuntimeError as error:  # `PeerUnusable` of this engine
                raise TransportFailure(str(error)) from error
            self._buffers.append(cast("Kept", buffer))
        return index

    def _require_buffers(self) -> None:
        if not self._buffers:
            raise TransportUnavailable("register a buffer before inviting a peer to it")

    def submit(self, peer: str, lists: Sequence[RunList], timeout_s: float) -> int:
        native = self._native
        if native is None or self._closed:
            native = self._engine  # says why there is none
        try:
            return native.submit(peer, lists, timeout_s)
        except (RuntimeError, TypeError) as error:
            raise refused(error) from error

    def submit_plan(
        self, peer: str, plan: Plan, layers: range, timeout_s: float, after: Sequence[tuple[int, int]] = ()
    ) -> int:
        native = self._native
        if native is None or self._closed:
            native = self._engine
        try:  # and no call of `submit`, in the engine's thread
            return native.submit(peer, plan.run_lists(layers.start, len(layers)), timeout_s)
        except (RuntimeError, TypeError) as error:
            raise refused(error) from error

    def poll(self) -> list[Occurrence]:
        """As in the contract; what was not fetched before `close()` can still be fetched after it."""
        return [] if self._native is None else [_occurrence(*report) for report in self._native.poll()]

    def fileno(self) -> int:
        return self._engine.fileno()

    def lane(self, peer: str) -> str:
        return self.name if self._native is not None and self._native.connected(peer) else ""

    def close_peer(self, peer: str) -> None:
        if self._native is not None:
            self._native.close_peer(peer)

    def close(self) -> None:
        """As in the contract. No PeerClosed is reported of a peer that is not quiet in time.

        A writer that was stopped in the middle of a range, for instance. What it still stores reaches memory files
        only, and it keeps these alive.
        """
        self._closed = True
        if self._native is not None:
            self._native.close(CLOSE_GRACE_S)


_OPENED: weakref.WeakSet[NativeTransport[Any, Any]] = weakref.WeakSet()


def _keep_engines_of_parent() -> None:
    """A child never destroys them, because the fork may have met their threads amid a change."""
    for each in _OPENED:  # what a list holds would be destroyed at the end of the interpreter
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each._native))


os.register_at_fork(after_in_child=_keep_engines_of_parent)


def refused(error: RuntimeError | TypeError) -> Exception:
    """What `submit` raises for an error of the engine."""
    if isinstance(error, RuntimeError):  # `PeerUnusable` of this engine
        return TransportFailure(str(error))
    return ValueError(
        f"lists need 64-bit numbers and C-contiguous int64 runs [n, 3], plans int32 pairs [n, 2]: {error}"
    )


def _occurrence(
    kind: str, peer: str, ticket: int, status: str, nbytes: int, submitted_s: float, done_s: float, detail: str
) -> Occurrence:
    """The occurrence of one report of a native engine (`csrc/common/outbox.h`)."""
    if kind == "batch_done":
        return BatchDone(ticket, peer, _STATUS[status], nbytes, submitted_s, done_s, detail)
    return PeerFailed(peer, detail) if kind == "peer_failed" else PeerClosed(peer)
