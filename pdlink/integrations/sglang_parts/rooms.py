"""Requests of one SGLang rank ("rooms") and their transfers. Knows no object of SGLang's.

SGLang counts pages; both sides have whole pages of one size, so a transfer's tokens are pages times their size. A
room's pages begin behind the prefix that decode has cached, and arrive from the scheduler in chunks, front to back.
What a model keeps beside its KV (the last pages of sliding windows, states of recurrent layers) travels in transfers
of its own, once the prompt is computed. A prefill rank may serve several decode ranks in one room, and a decode rank
may be served by several of prefill.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdlink.errors import PdlinkError
from pdlink.reasons import Code, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from pdlink.integrations.sglang_parts.ends import NodeEnd
    from pdlink.node.node import Outgoing

KV = -1
"""Number of the part that has the pages of the KV; states count from 0."""


def part_id(transfer_id: str, number: int) -> str:
    """The id of one part's transfer."""
    return transfer_id if number == KV else f"{transfer_id}-{number}"


@dataclass(eq=False)
class _Part:
    """One transfer on its way out."""

    number: int
    end: NodeEnd
    transfer_id: str
    prefix: int
    """Units (pages, or places of a state) that are not sent."""
    num: int
    """Units behind them."""
    outgoing: Outgoing
    published: int = 0
    """Units that the transfer knows."""
    written: list[int] = field(default_factory=list)
    """Per layer: units before this one are reported."""


@dataclass(eq=False)
class _Sent:
    """A room on its way out."""

    parts: dict[str, list[_Part]] = field(default_factory=dict)
    """By the id that decode made up: one for each decode rank. Empty lists where nothing has to travel."""
    ended: bool = False
    """The last chunk is given."""
    concluded: bool = False

    @property
    def all_parts(self) -> list[_Part]:
        return [part for parts in list(self.parts.values()) for part in parts]


class PrefillRooms:
    """Pages on their way out. Every method may be called from any thread."""

    def __init__(self, concluded: Callable[[int, str, str], None], drained: Callable[[int], None]) -> None:
        """concluded(room, transfer id of its first receiver, error): all receivers have everything, or why one never
        will. drained(room): no push of this room reads or writes anything any more. Both are called in a node's
        thread, or in that of a chunk, and must not wait."""
        self._concluded, self._drained = concluded, drained
        self._lock = threading.Lock()
        self._publishing = threading.RLock()
        """Pages of a room come from the scheduler's thread, and on a GPU from the one that layers wait in."""
        self._rooms: dict[int, _Sent] = {}
        self._busy: Counter[int] = Counter()
        """Transfers of a room that may still read or write pages; more than one where a room is used again."""

    def asked(self, room: int, transfer_id: str, prefix_pages: int, ends: Mapping[int, tuple[NodeEnd, int]]) -> bool:
        """Decode has room. False if it has asked by this id already.

        prefix_pages: of the prompt, which it has. ends: by part that has to travel, where from, and how many pages
        behind the prefix, or places of a state. Raises PdlinkError where a node refuses.
        """
        with self._lock:
            sent = self._rooms.setdefault(room, _Sent())
            if transfer_id in sent.parts:
                return False
            made = sent.parts[transfer_id] = []
            try:
                for number, (end, num) in ends.items():
                    prefix = prefix_pages if number == KV else 0
                    name = part_id(transfer_id, number)
                    outgoing = end.port.send(name, name, (prefix + num) * end.unit)
                    made.append(_Part(number, end, name, prefix, num, outgoing, written=[0] * len(end.layers)))
            except PdlinkError as error:
                for part in made:
                    part.end.port.ended(part.transfer_id, error.reason)
                del sent.parts[transfer_id]
                raise
            self._busy[room] += len(made)
        for part in made:
            part.outgoing.done.then(lambda: self._look(room, sent))
            part.outgoing.released.then(lambda: self._released(room))
        return True

    def num_receivers(self, room: int) -> int:
        """Decode ranks that have asked for the room."""
        sent = self._rooms.get(room)
        return len(sent.parts) if sent is not None else 0

    def extend(self, room: int, first_page: int, pages: Sequence[int], *, only: Container[str] | None = None) -> None:
        """Pages [first_page, ...) behind the prefix will be in these of the pool. only: of the room's transfers."""
        with self._publishing:
            for part in self._kv(room, only):
                _extend(part, first_page, pages)

    def written(self, room: int, layer: int, end_page: int, *, only: Container[str] | None = None) -> None:
        """Pages before `end_page` are written in one layer. only: of the room's transfers."""
        with self._publishing:
            for part in self._kv(room, only):
                _written(part, layer, end_page)

    def chunk(
        self,
        room: int,
        first_page: int,
        pages: Sequence[int],
        *,
        last: bool,
        states: Sequence[Sequence[int] | None] | None = None,
    ) -> None:
        """A chunk is computed in all layers. states: with the last one, where what is beside the KV is.

        A state with another number of places than decode has ends the room with an error.
        """
        sent = self._rooms.get(room)
        if sent is None:
            return
        with self._publishing:
            self._chunk(sent, first_page, pages, last=last, states=states)
        if last:
            sent.ended = True
            self._look(room, sent)

    def _chunk(
        self,
        sent: _Sent,
        first_page: int,
        pages: Sequence[int],
        *,
        last: bool,
        states: Sequence[Sequence[int] | None] | None,
    ) -> None:
        for part in sent.all_parts:
            if part.number == KV:
                _extend(part, first_page, pages)
                end = first_page + len(pages)
            elif last:
                places = states[part.number] if states is not None and part.number < len(states) else None
                indices = [] if places is None else list(places)
                if len(indices) != part.num:
                    words = f"state {part.number}: {len(indices)} for {part.num}"
                    part.end.port.ended(part.transfer_id, Reason(Code.BAD_OFFER, words))
                    continue
                _extend(part, 0, indices)
                end = part.num
            else:
                continue
            for layer in range(len(part.end.layers)):
                _written(part, layer, end)
            if last:
                part.end.port.finished(part.transfer_id)

    def transfer_ids(self, room: int) -> tuple[str, ...]:
        """Of each decode rank that has asked."""
        sent = self._rooms.get(room)
        return tuple(sent.parts) if sent is not None else ()

    def is_drained(self, room: int) -> bool:
        """No push of the room is on its way, and none will be."""
        return not self._busy[room]

    def end(self, room: int, reason: Reason | None = None) -> None:
        """SGLang has done with the room. reason: why, if its transfers are not to go on. Its pages may be used again:
        what a push still reads of them reaches pages only that decode keeps until it is quiet."""
        with self._lock:
            sent = self._rooms.pop(room, None)
        for part in sent.all_parts if sent is not None else ():
            part.end.port.ended(part.transfer_id, reason)

    def _kv(self, room: int, only: Container[str] | None) -> list[_Part]:
        sent = self._rooms.get(room)
        parts = [part for part in sent.all_parts if part.number == KV] if sent is not None else []
        return parts if only is None else [part for part in parts if part.transfer_id in only]

    def _look(self, room: int, sent: _Sent) -> None:
        """Whether that was the last thing to wait for."""
        with self._lock:
            parts = sent.all_parts
            reasons = [_reason(part.outgoing) for part in parts if part.outgoing.done.is_set()]
            error = next(filter(None, reasons), "")
            if sent.concluded or not (error or (sent.ended and len(reasons) == len(parts))):
                return
            sent.concluded = True
            first = next(iter(sent.parts), "")
        self._concluded(room, first, error)

    def _released(self, room: int) -> None:
        with self._lock:
            self._busy[room] -= 1
            drained = not self._busy[room]
            if drained:
                del self._busy[room]
        if drained:
            self._drained(room)


def _extend(part: _Part, first: int, places: Sequence[int]) -> None:
    fresh = [int(place) for place in places[max(0, part.published - first) :]]
    groups = part.end.num_groups
    if part.published == 0:
        # What decode has cached is never read: any number stands for it.
        table = [0] * part.prefix + fresh
        part.end.port.admitted(part.transfer_id, [table] * groups, part.prefix * part.end.unit)
    elif fresh:
        part.end.port.extended(part.transfer_id, [fresh] * groups)
    part.published += len(fresh)


def _written(part: _Part, layer: int, end: int) -> None:
    begin, until = part.written[layer], min(end, part.published)
    if begin < until:
        part.written[layer] = until
        first, last = ((part.prefix + place) * part.end.unit for place in (begin, until))
        for number in part.end.layers[layer]:
            part.end.port.layer_written(number, [(part.transfer_id, first, last)])


def _reason(outgoing: Outgoing) -> str:
    return "" if outgoing.error is None else str(outgoing.error.reason)
