"""`Pusher`: cuts pushes into parts, hands these to one transport in the order of `Order`, and joins their reports.

A push (some tokens of one layer) goes in several parts if it is large beside the transport's window. Small pushes of
the same moment share a part, because each part costs a native call and a wake-up. A push has landed when all its
parts have. Only parts that fit into the window are handed over; a stopped transfer takes back its waiting parts at
once, because they never were in flight.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pdlink.endpoint.order import Order, Part
from pdlink.errors import PdlinkError
from pdlink.events import HandlingFailed, emit
from pdlink.kv.plan import bind
from pdlink.transport.base import BatchDone, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdlink.config import SharingConfig
    from pdlink.endpoint.peer import Peer
    from pdlink.endpoint.transfers import Outgoing
    from pdlink.kv.layout import Piece
    from pdlink.kv.plan import Plan, Template
    from pdlink.protocol.actions import Push
    from pdlink.transport.base import Transport

log = logging.getLogger(__name__)

SHARED_NBYTES = 2**20
"""Size limit of a part that several pushes share. Moving as many bytes takes 0.1 ms or more; handing over a part
takes up to 0.05 ms (measured, 2 cores)."""


@dataclass(slots=True, eq=False)
class Flight:
    """One push on its way."""

    transfer: Outgoing
    push: Push
    asked_s: float
    """When the machine asked for it."""
    left: int = 0
    """Parts that wait or are in flight. A lost part counts until the fence."""
    submitted_s: float = 0.0
    """When its first part was handed to the transport."""
    nbytes: int = 0
    """Of the parts that have landed."""
    whole: bool = True
    """False once a waiting part of it was taken back."""


class _Slice(NamedTuple):
    """Tokens [start, end) of a flight's layer."""

    flight: Flight
    start: int
    end: int
    nbytes: int


Job = list[_Slice]
"""What is in a part: one slice of a large push, or several small pushes of one transfer."""


class NotSent(NamedTuple):
    """A part that cannot be handed to the transport."""

    flights: list[Flight]
    error: Exception
    in_flight: bool
    """False if there is no plan for it, so that nothing of it can have left."""


class Pusher:
    """Every push over one transport. Used under the endpoint's lock."""

    def __init__(
        self, transport: Transport, sharing: SharingConfig, batch_timeout_s: float, now_s: Callable[[], float]
    ) -> None:
        """batch_timeout_s: counts from the hand-over of a part, not from the start of its wait."""
        self._transport, self._sharing = transport, sharing
        self._batch_timeout_s, self._now_s = batch_timeout_s, now_s
        self.order: Order[Job] = Order(sharing)
        self._in_flight: dict[int, Part[Job]] = {}
        """By ticket."""

    def __len__(self) -> int:
        return len(self._in_flight)

    def add(self, transfer: Outgoing, peer: Peer, pushes: Sequence[Push]) -> None:
        """Queue these pushes of one transfer. Call `release` afterwards."""
        assert peer.template is not None
        now_s = self._now_s()
        flights = [Flight(transfer, push, now_s) for push in pushes]
        backlog = transfer.backlog
        if backlog is None:
            if peer.flow is None:
                peer.flow = self.order.flow()
            offer, token_nbytes = pushes[0].offer, peer.template.src.token_nbytes
            backlog = transfer.backlog = self.order.backlog(peer.flow, (offer.end - offer.start) * token_nbytes)
        for nbytes, job in self._jobs(peer.template, flights):
            self.order.add(Part(backlog, nbytes, job))

    def release(self) -> Iterator[NotSent]:
        """Hand over parts as far as there is room; yields parts that cannot be. Call after `add` and `ended`, and
        periodically."""
        while (part := self.order.next(self._now_s())) is not None:
            not_sent = self._submit(part)
            if not_sent is not None:
                yield not_sent

    def ended(self, done: BatchDone) -> list[Flight]:
        """The flights in this batch, all of one transfer; an ended flight has no parts `left`.

        Empty if the batch is not ours. Call `release` afterwards: there may be room now.
        """
        part = self._in_flight.pop(done.ticket, None)
        if part is None:
            return []
        self.order.ended(part, self._now_s())
        if done.status is Status.OK:
            for flight, _, _, nbytes in part.job:
                flight.left -= 1
                flight.nbytes += nbytes
        return [piece.flight for piece in part.job]

    def take_back(self, transfer: Outgoing) -> list[int]:
        """Take back the waiting parts of a transfer, and forget its blocks. Returns the pushes that end by that.

        Pushes with parts in flight end with these parts, not `whole`.
        """
        if transfer.backlog is None:
            return []
        flights = []
        for part in self.order.drop(transfer.backlog):
            for flight, _, _, _ in part.job:
                flight.left -= 1
                flight.whole = False
                flights.append(flight)
        transfer.backlog = None
        transfer.plans.clear()
        return list(dict.fromkeys(flight.push.push_id for flight in flights if not flight.left))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _jobs(self, template: Template, flights: Sequence[Flight]) -> list[tuple[int, Job]]:
        """Jobs with their bytes: large pushes cut, small pushes joined."""
        most_nbytes = min(SHARED_NBYTES, self._sharing.part_nbytes)
        jobs: list[tuple[int, Job]] = []
        shared: Job = []
        shared_nbytes = 0
        for flight in flights:
            push = flight.push
            token_nbytes = template.layers[push.layer].token_nbytes
            nbytes = (push.end - push.start) * token_nbytes
            if nbytes > most_nbytes:
                block_tokens = math.lcm(template.src.block_tokens, template.dst.block_tokens)
                ranges = cut(push.start, push.end, token_nbytes, block_tokens, self._sharing.part_nbytes)
                flight.left = len(ranges)
                for start, end in ranges:
                    piece = _Slice(flight, start, end, (end - start) * token_nbytes)
                    jobs.append((piece.nbytes, [piece]))
                continue
            if shared and shared_nbytes + nbytes > most_nbytes:
                jobs.append((shared_nbytes, shared))
                shared, shared_nbytes = [], 0
            flight.left = 1
            shared.append(_Slice(flight, push.start, push.end, nbytes))
            shared_nbytes += nbytes
        if shared:
            jobs.append((shared_nbytes, shared))
        return jobs

    def _submit(self, part: Part[Job]) -> NotSent | None:
        transfer, first = part.job[0].flight.transfer, part.job[0].flight.push
        peer = transfer.peer
        assert peer is not None
        in_flight = False
        try:
            assert peer.template is not None
            pieces: list[Piece] = []
            for flight, start, end, _ in part.job:
                plan = transfer.plans.get((start, end))
                if plan is None:
                    plan = transfer.plans[start, end] = plan_of(peer.template, flight.push, start, end)
                pieces.extend(plan.pieces(flight.push.layer))
            in_flight = True
            ticket = self._transport.submit(peer.key, pieces, self._batch_timeout_s)
        except Exception as error:  # noqa: BLE001  a peer's numbers, in the engine's thread: they cost only the peer
            self.order.ended(part, self._now_s())
            if not isinstance(error, PdlinkError | ValueError):
                emit(HandlingFailed(what="push", error=f"{type(error).__name__}: {error}"))
            log.warning("transfer %s: cannot push layer %d: %s", transfer.transfer_id, first.layer, error)
            flights = [piece.flight for piece in part.job]
            if not in_flight:
                for flight in flights:
                    flight.left -= 1
                    flight.whole = False
            return NotSent(flights, error, in_flight)
        self._in_flight[ticket] = part
        now_s = self._now_s()
        for flight, _, _, _ in part.job:
            flight.submitted_s = flight.submitted_s or now_s
        return None


def plan_of(template: Template, push: Push, start: int, end: int) -> Plan:
    """Byte runs of tokens [start, end) of a push."""
    src_tokens, dst_tokens = template.src.block_tokens, template.dst.block_tokens
    first_dst = start // dst_tokens - push.offer.start // dst_tokens
    return bind(template, push.blocks[start // src_tokens :], push.offer.blocks[first_dst:], start, end)


def cut(start: int, end: int, token_nbytes: int, block_tokens: int, part_nbytes: int) -> list[tuple[int, int]]:
    """[start, end) in about equal ranges; all but the first begin at multiples of `block_tokens`.

    As few ranges as `part_nbytes` allows; rounding may make one larger, by less than a block.
    """
    count = -(-(end - start) * token_nbytes // part_nbytes)
    if count <= 1:
        return [(start, end)]
    step = -(-(end - start) // count // block_tokens) * block_tokens
    first = start // block_tokens * block_tokens + step
    edges = [start, *range(first, end, step), end]
    return list(zip(edges, edges[1:], strict=False))
