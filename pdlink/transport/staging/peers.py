"""What the staging lane knows of each peer, in both directions."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdlink.cuda.driver import CudaFailure

if TYPE_CHECKING:
    from pdlink.kv.plan import IntArray, Plan, Template
    from pdlink.transport.staging.dense import Pages, Piece
    from pdlink.transport.staging.slots import OwnersSlots
    from pdlink.transport.staging.wire import Invitation


@dataclass(eq=False)
class StagedBatch:
    ticket: int
    nbytes: int
    submitted_s: float
    deadline_s: float
    plan: Plan
    pages: Pages
    """Of its source."""
    rest: deque[Piece]
    """Not begun."""
    num_open: int = 0
    """Slots under way."""


@dataclass(eq=False)
class OutgoingSlot:
    """A piece of a batch on its way: gathered, then put, then placed by its owner."""

    peer: StagingPeer
    batch: StagedBatch
    number: int
    piece: Piece
    nbytes: int
    blocks: IntArray
    """The owner's."""
    there: int
    """The owner's slot."""
    slot: int | None
    """Ours, that it is gathered into and put from; None if it is gathered into the owner's."""


@dataclass(eq=False)
class ArrivedSlot:
    """What has arrived in a slot of ours, to be placed."""

    peer: StagingPeer
    number: int
    slot: int
    nbytes: int
    plan: Plan
    numbers: IntArray
    """Of its blocks."""


@dataclass(eq=False)
class WritingTo:
    """We write to the peer."""

    there: Invitation
    direct: OwnersSlots | None = None
    """The owner's slots, where the GPU reaches them."""
    grants: deque[int] = field(default_factory=deque)
    num_asked: int = 0
    """Not granted yet."""
    queue: deque[StagedBatch] = field(default_factory=deque)
    """Not cut in full."""
    told: dict[int, OutgoingSlot] = field(default_factory=dict)
    """The owner knows of them, and has not said that they are placed."""
    num_slots: int = 0
    """Of ours, that it has."""
    pages: dict[int, tuple[Template, Pages]] = field(default_factory=dict)
    """By the id of a template, which was compared with the regions of both sides."""

    def stop(self) -> None:
        """Begin nothing more."""
        for of_it in (self.queue, self.told, self.grants):
            of_it.clear()

    def unpin(self) -> None:
        """The GPU gathers nothing any more."""
        if self.direct is not None:
            with contextlib.suppress(CudaFailure):  # of a dead context: nothing is pinned any more
                self.direct.close()


@dataclass(eq=False)
class Owning:
    """The peer writes to us."""

    arrived: deque[ArrivedSlot] = field(default_factory=deque)
    """Not begun."""
    filled: set[int] = field(default_factory=set)
    """Slots of what has arrived."""


@dataclass(eq=False)
class StagingPeer:
    name: str
    number: int
    """Of those to whom blocks are open."""
    open: dict[int, StagedBatch] = field(default_factory=dict)
    """Not reported, by ticket, in order."""
    failure: str = ""
    closing: bool = False
    unfinished: bool = False
    """The GPU may be copying for it, and the end of that will not be reported."""
    writing: WritingTo | None = None
    owning: Owning | None = None
    closed_below: bool = False
    """The transport below has reported its fence."""

    @property
    def usable(self) -> bool:
        return not self.closing and not self.failure
