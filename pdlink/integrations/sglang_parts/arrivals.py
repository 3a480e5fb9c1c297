"""Rooms of one SGLang rank on their way in; what a room is, and out: `rooms.py`. Knows no object of SGLang's."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from pdlink.errors import PdlinkError
from pdlink.integrations.sglang_parts.rooms import KV, part_id
from pdlink.reasons import Code, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdlink.integrations.sglang_parts.ends import NodeEnd
    from pdlink.node.node import Incoming


@dataclass(eq=False)
class _Received:
    """What one prefill rank sends for a room."""

    prefix_pages: int
    places: dict[int, tuple[int, ...]]
    """By part, where it is to land; parts of nothing are left out."""
    aux_row: int
    incoming: dict[int, Incoming] = field(default_factory=dict)
    ports: list[tuple[NodeEnd, str]] = field(default_factory=list)
    answered: bool = False
    stopped: bool = False

    @property
    def arrived(self) -> bool:
        there = list(self.incoming.values())
        return len(there) == len(self.places) and all(one.done.is_set() and one.error is None for one in there)


class DecodeRooms:
    """Pages on their way in. Every method may be called from any thread."""

    def __init__(self, failed: Callable[[int, Reason], None]) -> None:
        """failed(room, reason): called in a node's thread; must not wait."""
        self._failed = failed
        self._lock = threading.Lock()
        self._rooms: dict[int, dict[str, _Received]] = {}
        """By room, and by the id of what one prefill rank sends for it."""

    def open(
        self,
        room: int,
        prefix_pages: int,
        pages: Sequence[int],
        aux_row: int,
        states: Sequence[Sequence[int] | None] = (),
        *,
        dummy: bool = False,
    ) -> str:
        """Pages of the pool for what is missing behind the prefix, places for states; the id for one prefill rank.

        Called again for the next rank that serves the room. dummy: one that sends nothing.
        """
        places = {KV: tuple(map(int, pages))}
        places |= {number: tuple(map(int, one)) for number, one in enumerate(states) if one is not None}
        received = _Received(
            prefix_pages, {number: one for number, one in places.items() if one}, aux_row, answered=dummy
        )
        transfer_id = uuid.uuid4().hex
        with self._lock:
            self._rooms.setdefault(room, {})[transfer_id] = received
        return transfer_id

    def sender_is_at(
        self, room: int, transfer_id: str, senders: Mapping[int, tuple[NodeEnd, str]], *, needs_kv: bool = True
    ) -> None:
        """Let the nodes at these addresses write, by part. Late news of an earlier request counts for nothing.

        needs_kv: False for a prefill rank whose heads another one sends, for the same pages.
        """
        signals = []
        reason: Reason | None = None
        with self._lock:
            received = self._of(room, transfer_id)
            if received is None or received.stopped or received.answered:
                return
            received.answered = True
            if not needs_kv:
                received.places.pop(KV, None)
            try:
                for number, places in received.places.items():
                    end, address = senders[number]
                    signals.append(_receive(received, number, end, part_id(transfer_id, number), address, places))
            except (PdlinkError, KeyError) as error:
                received.stopped = True
                missing = Reason(Code.REQUEST_FAILED, f"prefill sends no part {error}")
                reason = error.reason if isinstance(error, PdlinkError) else missing
        for incoming in signals:
            incoming.done.then(partial(self._done, room, transfer_id, incoming))
        if reason is not None:
            for end, name in received.ports:
                end.port.ended(name, reason)
            self._failed(room, reason)

    def when_done(self, room: int, transfer_id: str, call: Callable[[], None]) -> None:
        """Call when the outcome of what this rank sends is known here, too; never for another request's news."""
        with self._lock:
            received = self._of(room, transfer_id)
            waited = list(received.incoming.values()) if received is not None else []
        if received is None:
            return
        left = Counter(left=len(waited))

        def one_more() -> None:
            with self._lock:
                left["left"] -= 1
                last = left["left"] == 0
            if last:
                call()

        for incoming in waited:
            incoming.done.then(one_more)
        if not waited:
            call()

    def landed(self, room: int, transfer_id: str, place_aux: Callable[[int], None]) -> bool:
        """All of one rank is here: write the row by `place_aux(row)`. False if it is not, or is not wanted."""
        with self._lock:
            received = self._of(room, transfer_id)
            if received is None or received.stopped or not received.arrived:
                return False
            place_aux(received.aux_row)
            return True

    def is_answered(self, room: int) -> bool:
        """Whether every prefill rank has said where its node is; True for a room that is not open."""
        return all(received.answered for received in self._all(room))

    def which(self, room: int, transfer_ids: Sequence[str]) -> str:
        """Which of these ids is one of the room's; empty for none."""
        with self._lock:
            here = self._rooms.get(room, {})
            return next((one for one in transfer_ids if one in here), "")

    def stop(self, room: int, reason: Reason) -> None:
        """SGLang does not want it any more. Its pages are its own again when `is_quiet`."""
        with self._lock:
            stopped = [one for one in self._rooms.get(room, {}).values() if not one.stopped]
            for received in stopped:
                received.stopped = True
        for received in stopped:
            for end, name in received.ports:
                end.port.ended(name, reason)

    def is_quiet(self, room: int) -> bool:
        """Nothing writes to the room's pages, and nothing ever will."""
        return all(
            (received.stopped or not received.places or len(received.incoming) == len(received.places))
            and all(incoming.released.is_set() for incoming in list(received.incoming.values()))
            for received in self._all(room)
        )

    def forget(self, room: int) -> None:
        """The room is closed, and its pages are SGLang's."""
        self.stop(room, Reason(Code.ABORTED, "the request has ended"))
        with self._lock:
            self._rooms.pop(room, None)

    def _all(self, room: int) -> list[_Received]:
        with self._lock:
            return list(self._rooms.get(room, {}).values())

    def _of(self, room: int, transfer_id: str) -> _Received | None:
        return self._rooms.get(room, {}).get(transfer_id)

    def _done(self, room: int, transfer_id: str, incoming: Incoming) -> None:
        if incoming.error is None:
            return
        with self._lock:
            received = self._of(room, transfer_id)
            mine = received is not None and not received.stopped
        if mine:
            self._failed(room, incoming.error.reason)


def _receive(
    received: _Received, number: int, end: NodeEnd, name: str, address: str, places: Sequence[int]
) -> Incoming:
    prefix = received.prefix_pages if number == KV else 0
    table = [0] * prefix + list(places)
    incoming = received.incoming[number] = end.port.receive(
        name, name, address, len(table) * end.unit, by_layer=False
    )
    received.ports.append((end, name))
    end.port.admitted(name, [table] * end.num_groups, prefix * end.unit)
    return incoming
