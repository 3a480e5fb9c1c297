"""The owning half of the staging lane: who may fill which slot, and what is in a filled one put into the pages.

Used with the lock of the `Stager` held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdlink.errors import ProtocolError
from pdlink.transport.staging import wire
from pdlink.transport.staging.credit import Credit
from pdlink.transport.staging.peers import ArrivedSlot
from pdlink.transport.staging.rest import starts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdlink.cuda.copies import Copies
    from pdlink.kv.layout import RunArray
    from pdlink.transport.base import Transport
    from pdlink.transport.staging.open_blocks import Ints, OpenBlocks
    from pdlink.transport.staging.peers import Owning, StagingPeer
    from pdlink.transport.staging.slots import Slots


class Owner:
    guard: OpenBlocks | None = None
    """What blocks are open to whom; without it all are to everybody invited."""

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

    def places(self, peer: StagingPeer, numbers: Ints) -> bool:
        """Whether a slot of the peer's is being placed, or waits for it, in one of these blocks."""
        arrived = () if peer.owning is None else peer.owning.arrived
        slots = [*arrived, *(one.work for one in self.copies.in_flight if one.work.peer is peer)]
        return any(one.blocks is not None and np.isin(one.blocks, numbers).any() for one in slots)

    def on_note(self, peer: StagingPeer, owning: Owning, note: wire.Ask | wire.SlotFilled) -> None:
        """What a writer says. Raises ProtocolError."""
        if isinstance(note, wire.Ask):
            self._credit.ask(peer.name, note.count)
            self._grant()
        else:
            if not self._credit.holds(peer.name, note.slot) or note.slot in owning.filled:
                raise ProtocolError(f"slot {note.slot} is not granted to it")
            self._below.close_blocks(peer.name, [[note.slot]])
            runs, blocks = self._runs_in(peer, note)
            owning.filled.add(note.slot)
            owning.arrived.append(ArrivedSlot(peer, note.number, note.slot, runs, blocks))

    def _grant(self) -> None:
        given: dict[str, list[int]] = {}
        for name, slot in self._credit.grants():
            given.setdefault(name, []).append(slot)
        for name, slots in given.items():
            peer = self._peers[name]
            self._below.open_blocks(name, [slots])
            self._say(peer, wire.Grant(tuple(slots)))

    def _runs_in(self, peer: StagingPeer, note: wire.SlotFilled) -> tuple[RunArray, Ints | None]:
        """The runs of a slot, and the blocks that they touch. Raises ProtocolError for one that they may not."""
        if any(len(packed) % 16 for _, packed in note.runs):
            raise ProtocolError("runs of a slot: their bytes are no multiple of 16")
        counts = [len(packed) // 16 for _, packed in note.runs]
        if not 0 < sum(counts) <= wire.MAX_RUNS:  # before any of them is looked up
            raise ProtocolError(f"a slot has {sum(counts)} runs; 1 to {wire.MAX_RUNS} are expected")
        runs = np.frombuffer(b"".join(packed for _, packed in note.runs), "<i8").astype(np.int64).reshape(-1, 2)
        if int(np.clip(runs[:, 1], 0, self._slots.nbytes + 1).sum()) > self._slots.nbytes:
            raise ProtocolError(f"the runs are larger than their slot of {self._slots.nbytes} bytes")
        regions = np.repeat([region for region, _ in note.runs], counts)
        blocks, whole = [], np.empty((len(runs), 3), np.int64)
        for region in np.unique(regions).tolist():  # however many lists a peer makes of its runs
            if region >= len(self._regions):
                raise ProtocolError(f"a run is for region {region}; there are {len(self._regions)}")
            of_it = regions == region
            offsets, nbytes = runs[of_it].T
            address, size = self._regions[region]
            if ((offsets < 0) | (nbytes <= 0) | (nbytes > size) | (offsets > size - nbytes)).any():
                raise ProtocolError(f"a run is outside region {region}, which has {size} bytes")
            if self.guard is not None:
                blocks.append(self.guard.require(peer.number, region, offsets, nbytes))
            whole[of_it, 1] = offsets + address
        whole[:, 2] = runs[:, 1]
        whole[:, 0] = self._slots.device_ptr(note.slot) + starts(whole[:, 2])
        return whole, np.concatenate(blocks) if blocks else None

    def _scatter(self) -> None:
        """Raises CudaFailure."""
        for peer in self._peers.values():
            owning = peer.owning
            while owning is not None and owning.arrived and self.copies.has_room:
                one = owning.arrived.popleft()
                self.copies.begin(one, one.runs)

    def _answer(self, one: ArrivedSlot) -> None:
        owning = one.peer.owning
        assert owning is not None
        owning.filled.discard(one.slot)
        self._credit.give_back(one.peer.name, one.slot)
        if one.peer.usable:
            self._say(one.peer, wire.SlotPlaced(one.number))
        self._grant()
