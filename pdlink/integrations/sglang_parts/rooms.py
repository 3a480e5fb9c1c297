"""Requests of one SGLang rank ("rooms") and their transfers. Knows no object of SGLang's.

SGLang counts pages; both sides have whole pages of one size, so a transfer's tokens are pages times their size. A
room's pages begin behind the prefix that decode has cached, and arrive from the scheduler in chunks, front to back.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdlink.errors import PdlinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.node.node import Incoming, Outgoing
    from pdlink.node.port import EnginePort


@dataclass(eq=False)
class _Sent:
    transfer_id: str
    prefix_pages: int
    num_pages: int
    """Behind the prefix."""
    outgoing: Outgoing | None
    """None where decode has all of the prompt."""
    published: int = 0
    """Pages that the transfer knows."""
    written: list[int] = field(default_factory=list)
    """Per layer: pages before this one are reported."""


class PrefillRooms:
    """Pages on their way out. Every method may be called from any thread; the chunks of a room from one."""

    def __init__(
        self,
        port: EnginePort,
        page_tokens: int,
        concluded: Callable[[int, str, str], None],
        drained: Callable[[int], None],
    ) -> None:
        """concluded(room, transfer id, error): the receiver has everything, or why it never will.
        drained(room): no push of this room reads or writes anything any more. Both are called in the node's thread
        and must not wait."""
        self._port, self._page_tokens, self._num_layers = port, page_tokens, port.node.groups.num_layers
        self._concluded, self._drained = concluded, drained
        self._lock = threading.Lock()
        self._rooms: dict[int, _Sent] = {}
        self._busy: Counter[int] = Counter()
        """Transfers of a room that may still read or write pages; more than one where a room is used again."""

    def asked(self, room: int, transfer_id: str, prefix_pages: int, num_pages: int) -> bool:
        """Decode wants this many pages behind a prefix of so many. False if it has asked for the room already.

        Raises PdlinkError where the node refuses.
        """
        sent = _Sent(transfer_id, prefix_pages, num_pages, None, written=[0] * self._num_layers)
        with self._lock:
            if room in self._rooms:
                return False
            if num_pages:
                tokens = (prefix_pages + num_pages) * self._page_tokens
                sent.outgoing = self._port.send(transfer_id, transfer_id, tokens)
                self._busy[room] += 1
            self._rooms[room] = sent
        outgoing = sent.outgoing
        if outgoing is not None:
            outgoing.done.then(lambda: self._concluded(room, transfer_id, _reason(outgoing)))
            outgoing.released.then(lambda: self._released(room))
        return True

    def extend(self, room: int, first_page: int, pages: Sequence[int]) -> None:
        """Pages [first_page, ...) behind the prefix will be in these of the pool."""
        sent = self._rooms.get(room)
        if sent is None or sent.outgoing is None:
            return
        fresh = [int(page) for page in pages[max(0, sent.published - first_page) :]]
        if sent.published == 0:
            # What decode has cached is never read: any number stands for it.
            table = [0] * sent.prefix_pages + fresh
            self._port.admitted(sent.transfer_id, table, sent.prefix_pages * self._page_tokens)
        else:
            self._port.extended(sent.transfer_id, fresh)
        sent.published += len(fresh)

    def written(self, room: int, layer: int, end_page: int) -> None:
        """Pages before `end_page` are written in one layer."""
        sent = self._rooms.get(room)
        if sent is None or sent.outgoing is None:
            return
        begin, end = sent.written[layer], min(end_page, sent.published)
        if begin < end:
            sent.written[layer] = end
            tokens = [(sent.prefix_pages + page) * self._page_tokens for page in (begin, end)]
            self._port.layer_written(layer, [(sent.transfer_id, tokens[0], tokens[1])])

    def chunk(self, room: int, first_page: int, pages: Sequence[int], *, last: bool) -> bool:
        """A chunk is computed in all layers. Returns whether that ends a room of which nothing is to be sent."""
        sent = self._rooms.get(room)
        if sent is None:
            return False
        if sent.outgoing is None:
            return last
        self.extend(room, first_page, pages)
        for layer in range(self._num_layers):
            self.written(room, layer, first_page + len(pages))
        if last:
            self._port.finished(sent.transfer_id)
        return False

    def transfer_id(self, room: int) -> str:
        """Empty for a room that decode has not asked for."""
        sent = self._rooms.get(room)
        return sent.transfer_id if sent is not None else ""

    def is_drained(self, room: int) -> bool:
        """No push of the room is on its way, and none will be."""
        return not self._busy[room]

    def end(self, room: int, reason: str = "") -> None:
        """SGLang has done with the room. reason: why, if its transfer is not to go on. Its pages may be used again:
        what a push still reads of them reaches pages only that decode keeps until it is quiet."""
        with self._lock:
            sent = self._rooms.pop(room, None)
        if sent is not None:
            self._port.ended(sent.transfer_id, reason)

    def _released(self, room: int) -> None:
        with self._lock:
            self._busy[room] -= 1
            if not self._busy[room]:
                del self._busy[room]
        self._drained(room)


@dataclass(eq=False)
class _Received:
    transfer_id: str
    prefix_pages: int
    pages: tuple[int, ...]
    aux_row: int
    incoming: Incoming | None = None
    answered: bool = False
    stopped: bool = False


class DecodeRooms:
    """Pages on their way in. Every method may be called from any thread."""

    def __init__(self, port: EnginePort, page_tokens: int, failed: Callable[[int, str], None]) -> None:
        """failed(room, reason): called in the node's thread; must not wait."""
        self._port, self._page_tokens, self._failed = port, page_tokens, failed
        self._lock = threading.Lock()
        self._rooms: dict[int, _Received] = {}

    def open(self, room: int, prefix_pages: int, pages: Sequence[int], aux_row: int) -> str:
        """Pages of the pool for what is missing behind the prefix; the id of the transfer."""
        received = _Received(uuid.uuid4().hex, prefix_pages, tuple(int(page) for page in pages), aux_row)
        with self._lock:
            self._rooms[room] = received
        return received.transfer_id

    def sender_is_at(self, room: int, transfer_id: str, address: str) -> None:
        """Let the node at `address` write. Late news of an earlier request in the room counts for nothing."""
        with self._lock:
            received = self._rooms.get(room)
            if received is None or received.stopped or received.transfer_id != transfer_id or received.incoming:
                return
            received.answered = True
            if not received.pages:
                return
            table = [0] * received.prefix_pages + list(received.pages)
            try:
                incoming = received.incoming = self._port.receive(
                    transfer_id, transfer_id, address, len(table) * self._page_tokens, by_layer=False
                )
                self._port.admitted(transfer_id, table, received.prefix_pages * self._page_tokens)
            except PdlinkError as error:
                received.stopped = True
                reason = str(error)
            else:
                reason = ""
        if reason:
            self._failed(room, reason)
        else:
            incoming.done.then(lambda: self._done(room, transfer_id, incoming))

    def when_done(self, room: int, transfer_id: str, call: Callable[[], None]) -> None:
        """Call when the outcome of the room's transfer is known here, too; never for another request's news."""
        with self._lock:
            received = self._rooms.get(room)
            incoming = received.incoming if received is not None and received.transfer_id == transfer_id else None
            mine = received is not None and received.transfer_id == transfer_id
        if incoming is not None:
            incoming.done.then(call)
        elif mine:
            call()

    def landed(self, room: int, transfer_id: str, place_aux: Callable[[int], None]) -> bool:
        """All is here: write the row by `place_aux(row)`. False if it is not, or is not wanted any more."""
        with self._lock:
            received = self._rooms.get(room)
            if received is None or received.stopped or received.transfer_id != transfer_id:
                return False
            incoming = received.incoming
            if received.pages and (incoming is None or not incoming.done.is_set() or incoming.error is not None):
                return False
            place_aux(received.aux_row)
            return True

    def is_answered(self, room: int) -> bool:
        """Whether prefill has said where its node is; True for a room that is not open."""
        received = self._rooms.get(room)
        return received is None or received.answered

    def is_of(self, room: int, transfer_id: str) -> bool:
        received = self._rooms.get(room)
        return received is not None and received.transfer_id == transfer_id

    def stop(self, room: int, reason: str) -> None:
        """SGLang does not want it any more. Its pages are its own again when `is_quiet`."""
        with self._lock:
            received = self._rooms.get(room)
            if received is None or received.stopped:
                return
            received.stopped = True
        self._port.ended(received.transfer_id, reason)

    def is_quiet(self, room: int) -> bool:
        """Nothing writes to the room's pages, and nothing ever will."""
        with self._lock:
            received = self._rooms.get(room)
            if received is None:
                return True
            if received.incoming is None:
                return received.stopped or not received.pages
            return received.incoming.released.is_set()

    def forget(self, room: int) -> None:
        """The room is closed, and its pages are SGLang's."""
        self.stop(room, "request_ended")
        with self._lock:
            self._rooms.pop(room, None)

    def _done(self, room: int, transfer_id: str, incoming: Incoming) -> None:
        if incoming.error is None:
            return
        with self._lock:
            received = self._rooms.get(room)
            mine = received is not None and received.transfer_id == transfer_id and not received.stopped
        if mine:
            self._failed(room, incoming.error.reason)


def _reason(outgoing: Outgoing) -> str:
    return "" if outgoing.error is None else outgoing.error.reason
