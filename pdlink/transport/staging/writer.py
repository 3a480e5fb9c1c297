"""The writing half of the staging lane: batches cut into slots, gathered, put, and known to be placed.

Where the GPU reaches the owner's slots it gathers into them, and nothing is put.

Used with the lock of the `Stager` held.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from pdlink.errors import PdlinkError, ProtocolError
from pdlink.kv.layout import RunList
from pdlink.transport.base import BatchStatus
from pdlink.transport.staging import wire
from pdlink.transport.staging.dense import blocks_in
from pdlink.transport.staging.peers import OutgoingSlot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.cuda.copies import Copies
    from pdlink.kv.plan import Plan
    from pdlink.transport.base import BatchDone, Transport
    from pdlink.transport.staging.peers import StagedBatch, StagingPeer, WritingTo
    from pdlink.transport.staging.slots import Slots


class Writer:
    def __init__(
        self,
        copies: Copies[OutgoingSlot],
        slots: Slots,
        below: Transport,
        regions: Sequence[tuple[int, int]],
        done: Callable[[StagingPeer, StagedBatch, BatchStatus, str], None],
        fail: Callable[[StagingPeer, str, BatchStatus], None],
        say: Callable[[StagingPeer, wire.Note], None],
    ) -> None:
        """regions: address and bytes of each device buffer. done: reports a batch; fail: a peer."""
        self.copies = copies
        self._slots, self._below, self._regions = slots, below, regions
        self._done, self._fail, self._say = done, fail, say
        self._turns: deque[StagingPeer] = deque()
        """Peers with batches to cut."""
        self._taken: set[int] = set()
        """Slots of ours."""
        self._puts: dict[int, OutgoingSlot] = {}
        """By the ticket of the transport below."""
        self._number = 0

    def add(self, peer: StagingPeer, writing: WritingTo, batch: StagedBatch) -> None:
        writing.queue.append(batch)
        if peer not in self._turns:
            self._turns.append(peer)

    def go_on(self) -> None:
        """Send what is gathered, ask for slots, gather more. Raises CudaFailure."""
        for out in self.copies.take_ended():
            self._gathered(out)
        self._ask()
        self._gather()

    def _ask(self) -> None:
        """Ask owners for the slots that waiting batches will need, and no more than they give to one writer."""
        for peer in self._turns:
            writing = peer.writing
            if writing is not None and peer.usable:
                most = max(1, writing.there.num_slots // 2)
                num_slots = sum(len(batch.rest) for batch in writing.queue)
                missing = min(num_slots, most) - len(writing.grants) - writing.num_asked
                if missing > 0:
                    writing.num_asked += missing
                    self._say(peer, wire.Ask(missing))

    def _gather(self) -> None:
        """Begin to gather into a slot for each peer in turn, as long as there is room. Raises CudaFailure."""
        waiting: list[StagingPeer] = []
        while self._turns and self.copies.has_room:
            peer = self._turns.popleft()
            writing = peer.writing
            if writing is None or not peer.usable or not writing.queue:
                continue
            direct = writing.direct
            if not writing.grants or (direct is None and not self._has_slot(writing)):
                waiting.append(peer)
                continue
            batch = writing.queue[0]
            piece = batch.rest.popleft()
            if not batch.rest:
                writing.queue.popleft()
            self._number += 1
            there, slot = writing.grants.popleft(), None
            if direct is None:
                slot = next(number for number in range(self._slots.count) if number not in self._taken)
                self._taken.add(slot)
                writing.num_slots += 1
            src, dst = blocks_in(batch.plan, piece)
            out = OutgoingSlot(peer, batch, self._number, piece, piece.nbytes(batch.pages.layout), dst, there, slot)
            batch.num_open += 1
            plan = batch.pages.gather(piece, src)
            if direct is not None and not direct.enter():
                self._fail(peer, "peer closed", BatchStatus.PEER_FAILED)
                continue
            self._turns.append(peer)
            try:
                self.copies.begin_plan(out, plan, self._regions, self._place(out, writing, plan))
            except BaseException:
                if direct is not None and not self.copies.is_in_flight(out):
                    direct.leave()
                raise
        self._turns.extend(waiting)

    def _has_slot(self, writing: WritingTo) -> bool:
        """Of ours: a peer that stands still does not keep them from the others."""
        return len(self._taken) < self._slots.count and writing.num_slots < max(1, self._slots.count // 2)

    def _place(self, out: OutgoingSlot, writing: WritingTo, plan: Plan) -> list[tuple[int, int]]:
        """Where to gather to. A slot of ours is sent whole, and is not to tell what it held before."""
        if writing.direct is not None:
            return [(writing.direct.device_ptr(out.there), out.nbytes)]
        assert out.slot is not None
        at, row = self._slots.offset(out.slot), plan.template.src.num_heads * plan.template.src.head_nbytes
        shape = -1, out.piece.num_units, out.piece.unit_tokens * row
        units = self._slots.buffer.array[at : at + out.nbytes].reshape(shape)
        for unit, position in ((0, plan.start), (-1, plan.end)):
            if position % out.piece.unit_tokens:
                units[:, unit] = 0
        return [(self._slots.device_ptr(out.slot), out.nbytes)]

    def _gathered(self, out: OutgoingSlot) -> None:
        """It is in its slot: the owner's, or ours, which is put then."""
        peer, writing = out.peer, out.peer.writing
        assert writing is not None
        if writing.direct is not None:
            writing.direct.leave()
            self._tell(out, writing)
        elif not peer.usable:
            self._free_slot(out)
        else:
            self._put(out, writing)

    def _put(self, out: OutgoingSlot, writing: WritingTo) -> None:
        peer, there = out.peer, writing.there
        assert out.slot is not None
        run = np.array([[self._slots.offset(out.slot), out.there * there.slot_nbytes, out.nbytes]], np.int64)
        left_s = max(0.001, out.batch.deadline_s - time.monotonic())
        try:
            one = RunList(self._slots.region, 0, there.region, 0, run)
            self._puts[self._below.submit(peer.name, [one], left_s)] = out
        except (PdlinkError, ValueError) as error:
            self._free_slot(out)
            self._fail(peer, str(error), BatchStatus.PEER_FAILED)

    def _free_slot(self, out: OutgoingSlot) -> None:
        assert out.peer.writing is not None
        assert out.slot is not None
        out.peer.writing.num_slots -= 1
        self._taken.discard(out.slot)

    def on_put(self, one: BatchDone) -> None:
        """The transport below reports a slot."""
        out = self._puts.pop(one.ticket, None)
        if out is None:
            return
        self._free_slot(out)
        writing = out.peer.writing
        if one.status is not BatchStatus.OK:
            self._fail(out.peer, one.detail or one.status.value, one.status)
        elif writing is not None:
            self._tell(out, writing)

    def _tell(self, out: OutgoingSlot, writing: WritingTo) -> None:
        """The owner's slot is filled."""
        if out.peer.usable:
            writing.told[out.number] = out
            layers, start, end, unit_tokens, heads_first = out.piece
            what = out.batch.plan.template.group, layers.start, len(layers), start, end, unit_tokens, heads_first
            self._say(out.peer, wire.SlotFilled(out.number, out.there, *what, out.blocks.astype("<u4").tobytes()))

    def on_note(self, peer: StagingPeer, writing: WritingTo, note: wire.Grant | wire.SlotPlaced) -> None:
        """What an owner says. Raises ProtocolError."""
        if isinstance(note, wire.Grant):
            limit = writing.there.num_slots
            if any(slot >= limit for slot in note.slots) or len(writing.grants) + len(note.slots) > limit:
                raise ProtocolError(
                    f"grant: got slots {note.slots[:8]} beside {len(writing.grants)}; expected {limit} at most"
                )
            writing.num_asked = max(0, writing.num_asked - len(note.slots))
            writing.grants.extend(note.slots)
        else:
            out = writing.told.pop(note.number, None)
            if out is None:
                raise ProtocolError(f"slot {note.number} is placed, and was not sent")
            out.batch.num_open -= 1
            if not out.batch.num_open and not out.batch.rest and out.batch.ticket in peer.open:
                self._done(peer, out.batch, BatchStatus.OK, "")
