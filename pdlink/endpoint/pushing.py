"""`Pushes`: makes parts of pushes, hands them to transports in the order of `Order`, and puts their ends together.

A push (one layer of some tokens) that is large beside the transport's window goes in several parts; small ones that
may go at the same moment share one, because each costs a native call and a wake-up. A push has landed when all its
parts have. Only parts that fit into the window are handed over, so what a transfer that is stopped still has waiting
is taken back at once: it never was in flight.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pdlink.endpoint.order import Order, Part
from pdlink.errors import PdlinkError, TransportFailure
from pdlink.events import HandlingFailed, emit
from pdlink.kv.plan import Plan, bind
from pdlink.transport.base import BatchDone, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.config import SharingConfig
    from pdlink.endpoint.link import Link
    from pdlink.endpoint.peer import Peer
    from pdlink.kv.layout import Piece
    from pdlink.kv.plan import Template
    from pdlink.protocol.actions import Push
    from pdlink.protocol.sending import Sending
    from pdlink.transport.base import Transport

log = logging.getLogger(__name__)

SHARED_NBYTES = 2**20
"""Most bytes of a part that several pushes share: moving as many takes 0.1 ms or more, beside which handing a part
over, up to 0.05 ms, is little (measured, 2 cores)."""


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


class _Slice(NamedTuple):
    """Tokens [start, end) of a flight's layer."""

    flight: Flight
    start: int
    end: int
    nbytes: int


_Job = list[_Slice]
"""A part: one slice of a large push, or several small pushes of one transfer."""


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
        on_refused: Callable[[Sequence[Flight], Exception], None],
        on_impossible: Callable[[Sequence[Flight], Exception], None],
    ) -> None:
        """on_refused: a part of these flights of one transfer cannot be handed over; the peer is unusable.

        on_impossible: there is no plan for a part of these flights, so it never was in flight; their transfer fails.

        batch_timeout_s: counts from when a part is handed over, not from when it began to wait.
        """
        self._link = link
        self._token_nbytes = link.layout.token_nbytes  # a sum over all layers
        self._sharing = sharing
        self._batch_timeout_s = batch_timeout_s
        self._on_refused, self._on_impossible = on_refused, on_impossible
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

    def add(self, peer: Peer, machine: Sending, pushes: Sequence[Push]) -> None:
        """Let these pushes go as soon as it is their turn, which normally is at once."""
        now_s = self._link.now_s()
        flights = [Flight(peer, machine, push, now_s) for push in pushes]
        if peer.transport is None or peer.template is None or machine.offered is None:
            self._on_refused(flights, TransportFailure(f"no data connection to {peer.name}"))
            return
        name, transfer_id = peer.transport.name, machine.transfer_id
        route = self._routes.get(transfer_id)
        if route is None:
            order = self._orders.get(name) or self._orders.setdefault(name, Order(self._sharing))
            route = self._routes[transfer_id] = _Route(order)
        total_nbytes = (machine.offered.end - machine.offered.start) * self._token_nbytes
        for nbytes, job in self._jobs(peer.template, flights):
            route.order.add(Part(transfer_id, peer.key, nbytes, job), total_nbytes)
        self._release(route.order)

    def ended(self, transport: Transport, done: BatchDone) -> list[Flight]:
        """The flights that a batch was part of; those that it was the last part of have nothing `left`.

        All of one transfer; none if the batch is not ours. Call `release` afterwards: there may be room now.
        """
        part = self._in_flight.pop((transport.name, done.ticket), None)
        if part is None:
            return []
        self._orders[transport.name].ended(part, self._link.now_s())
        if done.status is Status.OK:
            for flight, _, _, nbytes in part.job:
                flight.left -= 1
                flight.nbytes += nbytes
        return [piece.flight for piece in part.job]

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
            for flight, _, _, _ in part.job:
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

    def _jobs(self, template: Template, flights: Sequence[Flight]) -> list[tuple[int, _Job]]:
        """Cut what is large, put together what is small; each with its bytes."""
        most_nbytes = min(SHARED_NBYTES, self._sharing.part_nbytes)
        jobs: list[tuple[int, _Job]] = []
        shared: _Job = []
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

    def _submit(self, order: Order[_Job], part: Part[_Job]) -> None:
        first = part.job[0].flight
        transport = first.peer.transport
        in_flight = False
        try:
            if transport is None:
                raise TransportFailure(f"no data connection to {first.peer.name}")
            plans = self._routes[part.transfer_id].plans
            pieces: list[Piece] = []
            for flight, start, end, _ in part.job:
                plan = plans.get((start, end)) or self._bind(flight, start, end)
                pieces.extend(plan.pieces(flight.push.layer))
            in_flight = True
            ticket = transport.submit(part.peer, pieces, self._batch_timeout_s)
        except Exception as error:  # noqa: BLE001  a peer's numbers, in the engine's thread: they cost no more than it
            order.ended(part, self._link.now_s())
            if not isinstance(error, PdlinkError | ValueError):
                emit(HandlingFailed(what="push", error=f"{type(error).__name__}: {error}"))
            log.warning("transfer %s: cannot push layer %d: %s", part.transfer_id, first.push.layer, error)
            flights = [piece.flight for piece in part.job]
            if in_flight or transport is None:
                self._on_refused(flights, error)
            else:
                for flight in flights:
                    flight.left -= 1
                    flight.whole = False
                self._on_impossible(flights, error)
            return
        self._in_flight[transport.name, ticket] = part
        now_s = self._link.now_s()
        for flight, _, _, _ in part.job:
            flight.submitted_s = flight.submitted_s or now_s

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
