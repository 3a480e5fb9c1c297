"""What happened, as small frozen structs, and the one `emit()` that tells listeners.

Metrics, traces and the timeline are all made from these events (`pdlink/observe`), so a number on a dashboard and
a span in a trace cannot disagree. Emitting costs one call per listener. What every transfer emits is not even made
while `listeners` is empty.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar, cast

import msgspec

log = logging.getLogger(__name__)


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    at_s: float = msgspec.field(default_factory=time.monotonic)
    """Monotonic seconds of this host; on Linux comparable between processes of one host, never between hosts."""


class LayerWritten(Event, frozen=True, kw_only=True, gc=False):
    """The engine has written one layer's KV of tokens [start, end) of a request that is to be sent."""

    transfer_id: str
    layer: int
    start: int
    end: int


class LayerLanded(Event, frozen=True, kw_only=True, gc=False):
    """One layer's KV of tokens [start, end), all of it or what one push had, is visible in the decode worker's pages
    (sender's view)."""

    transfer_id: str
    layer: int
    start: int
    end: int
    nbytes: int
    transport: str
    submitted_s: float
    """When these bytes were handed to the transport, on the clock of `at_s`."""
    asked_s: float
    """When they could have been: before that the layer was not written, or not offered for."""


class TransferEnded(Event, frozen=True, kw_only=True, gc=False):
    """The one terminal event of a transfer on one side."""

    transfer_id: str
    side: str
    """"sender" or "receiver"."""
    peer: str
    state: str
    """Terminal state: DONE, READY or FAILED."""
    reason: str
    """Empty for DONE and READY, otherwise a `pdlink.reasons.Reason` as text."""
    nbytes: int
    transport: str
    started_s: float
    first_landed_s: float | None = None
    exposed_s: float | None = None
    """From the last layer being written until the last one landed; None on the receiver, and where nothing landed."""


class PeerChanged(Event, frozen=True, kw_only=True, gc=False):
    """A peer was connected, lost or refused."""

    peer: str
    state: str
    reason: str = ""


class MessageDropped(Event, frozen=True, kw_only=True, gc=False):
    """A control message was not acted upon: unknown, duplicate, late, malformed or of an old epoch."""

    reason: str


class HandlingFailed(Event, frozen=True, kw_only=True, gc=False):
    """What a peer, a transport or this worker's code gave the endpoint to do raised an unexpected error."""

    what: str
    """"frame", "message", "push", "occurrence", "transport", "command" or "callback"."""
    error: str


class FallbackUsed(Event, frozen=True, kw_only=True, gc=False):
    """A request took its configured second way: "recompute", "retry" or "decode_only"."""

    kind: str
    reason: str
    """A code of `pdlink.reasons`; of the proxy, a sentence."""


class PrefixFound(Event, frozen=True, kw_only=True, gc=False):
    """A store was asked for a prefix. Counts chunks."""

    asked: int
    places: dict[str, int]
    """How many of the leading ones are in memory, and in each tier below it."""
    took_s: float


class RecordsChanged(Event, frozen=True, kw_only=True, gc=False):
    """Records came into a store's memory or went."""

    kind: str
    """"stored", "evicted" or "removed"."""
    records: int
    nbytes: int


class KVCopied(Event, frozen=True, kw_only=True, gc=False):
    """KV was copied between an engine's blocks and the store's memory."""

    direction: str
    """"load", of a prompt, or "store", of a pass."""
    nbytes: int
    took_s: float


class WriteDropped(Event, frozen=True, kw_only=True, gc=False):
    """A record was evicted before a tier that is behind, or takes nothing, had its copy."""

    tier: str


class TierCalled(Event, frozen=True, kw_only=True, gc=False):
    """A call of a tier below memory ended."""

    tier: str
    call: str
    """"contains", "get", "put", "remove" or "clear"."""
    outcome: str
    """"done", "missed" or "failed"."""
    num_records: int
    """That it moved, and their bytes; a call may be for several."""
    nbytes: int
    took_s: float


class PromptSourced(Event, frozen=True, kw_only=True, gc=False):
    """It is known where the KV of a prompt comes from. Counts tokens; every one of the prompt has one source."""

    request_id: str
    cached: int
    """Were in the engine's blocks."""
    loaded: int
    """Came from the store, which had `found` of the prompt."""
    received: int
    """Asked of the prefill worker; computed after all if they do not come, of which another event tells."""
    computed: int
    found: int
    reason: str
    """Why so many were to be loaded: of `pdlink.store.worth.Choice`."""
    load_s: float
    other_s: float
    """Estimates for all that was found and not cached: to load it, and to compute or receive it."""
    began_s: float
    """When the load began."""
    places: dict[str, int] = {}
    """Where the loaded tokens were: memory, disk and so on."""


class RequestEnded(Event, frozen=True, kw_only=True, gc=False):
    """A request of the engine or the proxy reached its end."""

    request_id: str
    role: str
    outcome: str
    """A finish reason ("stop", "length") or an error code."""
    prompt_tokens: int
    completion_tokens: int
    started_s: float
    first_token_s: float | None


Listener = Callable[[Event], None]
listeners: list[Listener] = []
"""Of all events of this process; changed by `listen` only."""


def emit(event: Event) -> None:
    """Tell every listener, in the calling thread. A listener must be quick and must not raise."""
    for listener in listeners:
        listener(event)


def listen(listener: Listener) -> Callable[[], None]:
    """Add a listener for all events of this process; returns the function that removes it."""
    listeners.append(listener)

    def stop() -> None:
        if listener in listeners:
            listeners.remove(listener)

    return stop


_Change = TypeVar("_Change")


class ChangeTeller(Generic[_Change]):
    """Tells the listeners of one object what changed in it: one change after the other, with no lock held.

    The thread that changes the object tells of it, unless another thread is telling: then that one tells this, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: deque[tuple[tuple[Callable[[_Change], None], ...], Iterable[_Change]]] = deque()
        """What nobody has told yet, oldest first, and who is to hear it."""
        self._telling = False
        self.listeners: tuple[Callable[[_Change], None], ...] = ()
        """Changed under the object's lock."""

    def add(self, listener: Callable[[_Change], None], present: Iterable[_Change]) -> None:
        """Tell `listener` what is there, then every change. The caller holds the object's lock, and calls `tell`.

        present: looked at when it is told, without that lock.
        """
        self.listeners = (*self.listeners, listener)
        self._told.append(((listener,), present))

    def note(self, change: _Change) -> None:
        """Something to tell, in this order. The caller holds the object's lock, and calls `tell` later."""
        if self.listeners:
            self._told.append((self.listeners, (change,)))

    def note_all(self, changes: Iterable[_Change]) -> None:
        """The same for many. `tell` goes through them, without that lock, also where nobody listens."""
        self._told.append((self.listeners, changes))

    def tell(self) -> None:
        """Tell what was noted. The caller holds no lock. What a listener raises is logged and lost."""
        if not self._told:  # the usual case costs no lock; what this thread noted is there, or another one has it
            return
        while True:
            with self._lock:
                if self._telling or not self._told:
                    return
                self._telling = True
                listeners, changes = self._told.popleft()
            try:
                for change in changes:
                    for listener in listeners:
                        try:
                            listener(change)
                        except Exception:
                            log.exception("a listener failed at %s", change)
            finally:
                with self._lock:
                    self._telling = False

    def wait_told(self) -> None:
        """Until what was noted by now has been told, by this thread or another one. Not by a listener."""
        if not self.listeners:
            return
        told = threading.Event()

        def reached(_: _Change | None) -> None:
            told.set()

        self._told.append(((reached,), (cast("_Change", None),)))  # behind what was noted
        self.tell()
        told.wait()
