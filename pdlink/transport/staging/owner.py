"""The owning half of the staging lane: who may fill which slot, and what is in a filled one put into the pages.

Used with the lock of the `Stager` held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdlink.errors import ProtocolError
from pdlink.kv.layout import MAX_OFFSET
from pdlink.transport.staging import wire
from pdlink.transport.staging.credit import Credit
from pdlink.transport.staging.dense import MAX_UNITS, Pages, Piece
from pdlink.transport.staging.peers import ArrivedSlot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdlink.cuda.copies import Copies
    from pdlink.kv.groups import KVGroups
    from pdlink.kv.plan import IntArray
    from pdlink.transport.base import Transport
    from pdlink.transport.staging.open_blocks import OpenBlocks
    from pdlink.transport.staging.peers import Owning, StagingPeer
    from pdlink.transport.staging.slots import Slots


class Owner:
    open_blocks: OpenBlocks | None = None
    """What is open to whom. Without it nothing can be placed."""

    def __init__(
        self,
        copies: Copies[ArrivedSlot],
        slots: Slots,
        below: Transport,
        regions: Sequence[tuple[int, int]],
        peers: Mapping[str, StagingPeer],
        say: Callable[[StagingPeer, wire.Note], None],
    ) -> None:
        """regions: address and bytes of each device buffer."""
        self.copies = copies
        self._slots, self._below, self._regions, self._peers = slots, below, regions, peers
        self._say = say
        self._credit = Credit(slots.count)
        self._pages: list[Pages] = []
        """By group."""

    def guard(self, groups: KVGroups, open_blocks: OpenBlocks) -> None:
        """Before anybody is invited."""
        self._pages = [Pages(layout) for layout in groups.layouts]
        self.open_blocks, self._credit = open_blocks, Credit(self._slots.count)

    def go_on(self) -> None:
        """Answer for what is placed, and place more. Raises CudaFailure."""
        for one in self.copies.take_ended():
            self._answer(one)
        self._scatter()

    def stop(self, peer: StagingPeer, owning: Owning) -> None:
        """Begin nothing more for it."""
        owning.arrived.clear()
        self._credit.ask_no_more(peer.name)

    def forget(self, peer: StagingPeer) -> None:
        """Nothing of the peer can be written to a slot any more."""
        self._credit.forget(peer.name)
        self._grant()

    def places(self, peer: StagingPeer, numbers: IntArray) -> bool:
        """Whether a slot of the peer's is being placed, or waits for it, in one of these blocks."""
        arrived = () if peer.owning is None else peer.owning.arrived
        slots = [*arrived, *(one.work for one in self.copies.in_flight if one.work.peer is peer)]
        return any(np.isin(one.numbers, numbers).any() for one in slots)

    def on_note(self, peer: StagingPeer, owning: Owning, note: wire.Ask | wire.SlotFilled) -> None:
        """What a writer says. Raises ProtocolError."""
        if isinstance(note, wire.Ask):
            self._credit.ask(peer.name, note.count)
            self._grant()
        else:
            if not self._credit.holds(peer.name, note.slot) or note.slot in owning.filled:
                raise ProtocolError(f"slot {note.slot} is not granted to it")
            self._below.close_blocks(peer.name, [[note.slot]])
            arrived = self._checked(peer, note)
            owning.filled.add(note.slot)
            owning.arrived.append(arrived)

    def _grant(self) -> None:
        given: dict[str, list[int]] = {}
        for name, slot in self._credit.grants():
            given.setdefault(name, []).append(slot)
        for name, slots in given.items():
            peer = self._peers[name]
            self._below.open_blocks(name, [slots])
            self._say(peer, wire.Grant(tuple(slots)))

    def _checked(self, peer: StagingPeer, note: wire.SlotFilled) -> ArrivedSlot:
        """How a slot is placed, by our own layout. Raises ProtocolError for what it may not touch."""
        if note.group >= len(self._pages) or self.open_blocks is None:
            raise ProtocolError(f"slot: group {note.group}; there are {len(self._pages)}")
        pages, blocks = self._pages[note.group], np.frombuffer(note.blocks[: len(note.blocks) & ~3], "<u4")
        layout, layers = pages.layout, range(note.first_layer, note.first_layer + note.num_layers)
        if layers.stop > len(layout.layers):
            raise ProtocolError(f"slot: layers {layers.start} to {layers.stop - 1}; there are {len(layout.layers)}")
        unit_tokens = 1 if layout.state else layout.block_tokens
        if unit_tokens % note.unit_tokens or not note.start < note.end < MAX_OFFSET:
            raise ProtocolError(f"slot: [{note.start}, {note.end}) by {note.unit_tokens} of blocks of {unit_tokens}")
        if layout.state and note.end - note.start != 1:
            raise ProtocolError(f"slot: [{note.start}, {note.end}) of a state; expected one position")
        piece = Piece(layers, note.start, note.end, note.unit_tokens, note.heads_first)
        nbytes, covering = piece.nbytes(layout), layout.blocks_of(note.start, note.end)
        if piece.num_units > MAX_UNITS or nbytes > self._slots.nbytes:  # before anything of that size is made
            raise ProtocolError(f"slot: {nbytes} bytes of {piece.num_units} units; it has {self._slots.nbytes} bytes")
        if len(note.blocks) != 4 * (covering.stop - covering.start):
            raise ProtocolError(f"slot: {len(note.blocks)} bytes of blocks; 4 for each of {covering} are expected")
        try:
            pages.require_countable()
            plan = pages.scatter(piece, blocks)
            pairs = plan.pairs  # now: what cannot be numbered costs the peer alone
        except ValueError as error:
            raise ProtocolError(f"slot: {error}") from None
        assert len(pairs) == piece.num_units
        numbers = self.open_blocks.require(peer.number, note.group, plan.dst_blocks)
        return ArrivedSlot(peer, note.number, note.slot, nbytes, plan, numbers)

    def _scatter(self) -> None:
        """Raises CudaFailure."""
        for peer in self._peers.values():
            owning = peer.owning
            while owning is not None and owning.arrived and self.copies.has_room:
                one = owning.arrived.popleft()
                slot = [(self._slots.device_ptr(one.slot), one.nbytes)]
                self.copies.begin_plan(one, one.plan, slot, self._regions)

    def _answer(self, one: ArrivedSlot) -> None:
        owning = one.peer.owning
        assert owning is not None
        owning.filled.discard(one.slot)
        self._credit.give_back(one.peer.name, one.slot)
        if one.peer.usable:
            self._say(one.peer, wire.SlotPlaced(one.number))
        self._grant()
