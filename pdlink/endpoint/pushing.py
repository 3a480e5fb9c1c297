"""`Pushes`: takes pushes apart, hands the parts to transports in the order of `Order`, and puts their ends together.

A push (one layer of some tokens) has landed when all its parts have. Only parts that fit into the transport's window
are handed over, so what a transfer that is stopped still has waiting is taken back at once: it never was in flight.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdlink.endpoint.order import Order, Part
from pdlink.errors import LayoutMismatch, PdlinkError, TransportFailure
from pdlink.kv.plan import Plan, bind
from pdlink.transport.base import BatchDone, Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.config import SharingConfig
    from pdlink.endpoint.link import Link
    from pdlink.endpoint.peer import Peer
    from pdlink.protocol.actions import Push
    from pdlink.protocol.sending import Sending
    from pdlink.transport.base import Transport

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Flight:
    """One push on its way."""

    peer: Peer
    machine: Sending
    push: Push
    asked_s: float
    """When the machine asked for it."""
    left: int = 0
    """Parts that wait or are in flight. One that was lost counts for ever: only a fence ends it."""
    submitted_s: float = 0.0
    """When its first part was handed to the transport."""
    nbytes: int = 0
    """Of the parts that have landed."""
    whole: bool = True
    """False once waiting parts of it were dropped."""


_Job = tuple[Flight, int, int]
"""A part: tokens [start, end) of a flight's layer."""


@dataclass(slots=True, eq=False)
class _Route:
    """What the pushes of one transfer have in common."""

    order: Order[_Job]
    plans: dict[tuple[int, int], Plan] = field(default_factory=dict)
    """Byte runs by token range: every layer of a chunk uses the same."""


class Pushes:
    """Every push of this worker. Used under the endpoint's lock."""

    def __init__(
        self,
        link: Link,
        sharing: SharingConfig,
        batch_timeout_s: float,
        on_refused: Callable[[Flight, PdlinkError | ValueError], None],
    ) -> None:
        """on_refused: a part of this flight cannot be handed to its transport; the peer is unusable.

        batch_timeout_s: counts from when a part is handed over, not from when it began to wait.
        """
        self._link = link
        self._token_nbytes = link.layout.token_nbytes  # a sum over all layers
        self._sharing = sharing
        self._batch_timeout_s = batch_timeout_s
        self._on_refused = on_refused
        self._orders: dict[str, Order[_Job]] = {}
        """By transport name."""
        self._routes: dict[str, _Route] = {}
        """By transfer id."""
        self._in_flight: dict[tuple[str, int], Part[_Job]] = {}
        """By transport name and ticket."""

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes that `wait` here for their turn, and those `in_flight`."""
        return {
            "waiting": sum(order.waiting_nbytes for order in self._orders.values()),
            "in_flight": sum(order.in_flight_nbytes for order in self._orders.values()),
        }

    def add(self, peer: Peer, machine: Sending, push: Push) -> None:
        """Let this push go as soon as it is its turn, which normally is at once."""
        flight = Flight(peer, machine, push, self._link.now_s())
        if peer.transport is None or peer.template is None or machine.offered is None:
            self._on_refused(flight, TransportFailure(f"no data connection to {peer.name}"))
            return
        name, transfer_id = peer.transport.name, machine.transfer_id
        route = self._routes.get(transfer_id)
        if route is None:
            order = self._orders.get(name) or self._orders.setdefault(name, Order(self._sharing))
            route = self._routes[transfer_id] = _Route(order)
        total_nbytes = (machine.offered.end - machine.offered.start) * self._token_nbytes
        token_nbytes = peer.template.layers[push.layer].token_nbytes
        block_tokens = math.lcm(peer.template.src.block_tokens, peer.template.dst.block_tokens)
        ranges = cut(push.start, push.end, token_nbytes, block_tokens, self._sharing.part_nbytes)
        flight.left = len(ranges)
        for start, end in ranges:
            part = Part(transfer_id, peer.key, (end - start) * token_nbytes, (flight, start, end))
            route.order.add(part, total_nbytes)
        self._release(route.order)

    def ended(self, transport: Transport, done: BatchDone) -> Flight | None:
        """The flight that a batch was part of; if that was the last of it, `left` is zero. None: not one of ours.

        Call `release` afterwards: there may be room now.
        """
        part = self._in_flight.pop((transport.name, done.ticket), None)
        if part is None:
            return None
        self._orders[transport.name].ended(part, self._link.now_s())
        flight = part.job[0]
        if done.status is Status.OK:
            flight.left -= 1
            flight.nbytes += done.nbytes
        return flight

    def release(self) -> None:
        """Hand over what has room."""
        for order in self._orders.values():
            self._release(order)

    def drop(self, transfer_id: str) -> list[int]:
        """Take back what a transfer has waiting, and forget its blocks. Returns the pushes that are over by that.

        Those that have parts in flight end with these, not `whole`.
        """
        route = self._routes.pop(transfer_id, None)
        if route is None:
            return []
        flights = []
        for part in route.order.drop(transfer_id):
            flight = part.job[0]
            flight.left -= 1
            flight.whole = False
            flights.append(flight)
        return list(dict.fromkeys(flight.push.push_id for flight in flights if not flight.left))

    def forget(self, peer: Peer) -> None:
        """This session is fenced: nothing of it waits or is in flight."""
        for order in self._orders.values():
            order.forget(peer.key)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _release(self, order: Order[_Job]) -> None:
        while (part := order.next(self._link.now_s())) is not None:
            self._submit(order, part)

    def _submit(self, order: Order[_Job], part: Part[_Job]) -> None:
        flight, start, end = part.job
        transport = flight.peer.transport
        try:
            if transport is None:
                raise TransportFailure(f"no data connection to {flight.peer.name}")
            plan = self._routes[part.transfer_id].plans.get((start, end)) or self._bind(flight, start, end)
            ticket = transport.submit(part.peer, plan.pieces(flight.push.layer), self._batch_timeout_s)
        except (TransportFailure, LayoutMismatch, ValueError) as error:
            order.ended(part, self._link.now_s())
            log.warning("transfer %s: cannot push layer %d: %s", flight.machine.transfer_id, flight.push.layer, error)
            self._on_refused(flight, error)
            return
        self._in_flight[transport.name, ticket] = part
        flight.submitted_s = flight.submitted_s or self._link.now_s()

    def _bind(self, flight: Flight, start: int, end: int) -> Plan:
        peer, machine = flight.peer, flight.machine
        assert peer.template is not None
        assert machine.offered is not None
        assert machine.blocks is not None
        src_tokens, dst_tokens = peer.template.src.block_tokens, peer.template.dst.block_tokens
        first_dst = start // dst_tokens - machine.offered.start // dst_tokens
        plan = bind(
            peer.template, machine.blocks[start // src_tokens :], machine.offered.blocks[first_dst:], start, end
        )
        self._routes[machine.transfer_id].plans[start, end] = plan
        return plan


def cut(start: int, end: int, token_nbytes: int, block_tokens: int, part_nbytes: int) -> list[tuple[int, int]]:
    """[start, end) in ranges of about equal size that begin at multiples of `block_tokens`, but for the first one.

    As few as `part_nbytes` allows; rounding may make one larger, by less than a block.
    """
    count = -(-(end - start) * token_nbytes // part_nbytes)
    if count <= 1:
        return [(start, end)]
    step = -(-(end - start) // count // block_tokens) * block_tokens
    first = start // block_tokens * block_tokens + step
    edges = [start, *range(first, end, step), end]
    return list(zip(edges, edges[1:], strict=False))
