"""What is sent, and its way. `Outgoing`: the KV of one request on its way to the worker that decodes it. `DataPath`:
brings its pushes to their transports, and the ends of pushes back to its machine.

`Outgoing.layer_ready` is the hot path: one lock, one decision of the machine, and one native call if the offer is
there and the transport has room. It never waits for a peer.

A push is one batch of its transport. Pushes over one transport leave in the order of its `Order`: what fits into the
window is handed over, the rest waits. What may not be written yet stays out of it (`Marks`). A stopped transfer takes
back its waiting pushes at once, because they never were in flight. A push that cannot be handed over fails its
transfer if it has no plan; otherwise bytes may have left, and its session ends.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from pdlink.endpoint.half import Half, Transfer
from pdlink.endpoint.order import Order, QueuedPush
from pdlink.endpoint.signals import Signal
from pdlink.errors import PdlinkError
from pdlink.events import HandlingFailed, LayerLanded, LayerWritten, emit, listeners
from pdlink.kv.plan import bind
from pdlink.logs import about
from pdlink.protocol.sending import Sending
from pdlink.protocol.states import SENDER_ENDS
from pdlink.reasons import ABORTED, Code, Reason
from pdlink.transport.base import BatchStatus

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from types import TracebackType

    from pdlink.endpoint.half import Common
    from pdlink.endpoint.marks import Mark
    from pdlink.endpoint.order import Backlog
    from pdlink.endpoint.peer import Peer
    from pdlink.endpoint.sharing import Sharing
    from pdlink.endpoint.verifying import Verifier
    from pdlink.kv.groups import BlockLists
    from pdlink.kv.plan import Plan, Template
    from pdlink.protocol.actions import Action, Push
    from pdlink.protocol.messages import Checksum
    from pdlink.protocol.sending import Lease
    from pdlink.transport.base import BatchDone, Transport

log = logging.getLogger(__name__)


class SenderPort(Half["Outgoing"], ABC):
    """What one transfer knows of `Sender`, which says what each does."""

    cut_at_nbytes: int

    @abstractmethod
    def announce(self, transfer: Outgoing) -> None: ...
    @abstractmethod
    def act(self, transfer: Outgoing, actions: Sequence[Action]) -> None: ...
    @abstractmethod
    def on_peer_lost(self, peer: Peer, reason: Reason) -> None: ...
    @abstractmethod
    def wait_idle(self, transfer: Outgoing, timeout_s: float) -> bool: ...


class Outgoing(Transfer):
    """The sending end of a transfer, made by `Node.send`.

    `done` is set when the receiver has everything, `released` right after it; when the transfer fails, `released`
    follows as soon as no push reads the blocks any more.
    """

    accepted: Signal
    """Set when the receiver has asked for this transfer, in a session whose handshake holds."""

    # For the endpoint, under its lock:
    machine: Sending
    lease: Lease
    """How long its KV is kept; held by `peer` once there is one."""
    peer: Peer | None = None
    """The receiver, once it has shown interest."""
    backlog: Backlog[PushBatch] | None = None
    """Its waiting pushes, from the first one on."""
    marks: dict[int, dict[int, Mark]]
    """Of device memory, by layer and stream: the latest behind what is reported as written."""
    held: dict[PushBatch, None]
    """Its pushes that wait for their marks here. The keys only."""
    plans: dict[tuple[int, int, int], Plan]
    """Byte runs by group and token range: every layer of a chunk uses the same."""
    checksums: list[Checksum]
    nbytes = 0
    """Landed so far."""
    first_landed_s: float | None = None
    last_landed_s: float | None = None
    written_s: float | None = None
    """When the last layer so far was written, on the clock of events; kept for listeners."""
    finished_s: float | None = None
    """When prefill ended (`Clock.awake_s`)."""

    _failure = "its KV was not sent"
    _finished = False

    def __init__(self, sender: SenderPort, transfer_id: str) -> None:
        """Raises InvalidRequest for a used id, TransferFailed if the transfer was stopped already."""
        super().__init__(sender, transfer_id)
        self.accepted = Signal()
        self._sender = sender
        self.machine = Sending(transfer_id, sender.groups, sender.cut_at_nbytes)
        self.plans, self.checksums, self.marks, self.held = {}, [], {}, {}
        self.started_s = sender.clock.now_s()
        sender.announce(self)

    def publish(self, blocks: BlockLists, num_tokens: int, num_cached_tokens: int = 0) -> None:
        """The KV of the request's `num_tokens` tokens will be in these blocks, from token 0 on.

        blocks: one list for each group of layers. Where a group does not keep all
        tokens, blocks that hold none of those it keeps may be anything.
        num_cached_tokens: the first so many are in them already, for all layers. The blocks must stay as they are
        until `released`; with a pool the node holds a reference of its own, so they do.
        """
        self.num_tokens = num_tokens
        mine = self._sender.groups.by_group(blocks)
        with self._sender.lock:
            if self.machine.state not in SENDER_ENDS:
                self._hold(mine)
                self._sender.act(self, self.machine.publish(mine, num_tokens, num_cached_tokens))

    def extend(self, blocks: BlockLists) -> None:
        """More blocks behind those published, for an engine that reserves them chunk by chunk."""
        mine = self._sender.groups.by_group(blocks)
        with self._sender.lock:
            if self.machine.state not in SENDER_ENDS:
                self._hold(mine)
                self.machine.extend(mine)

    def layer_ready(self, layer: int, start: int = 0, end: int | None = None) -> None:
        """Tokens [start, end) of `layer` are in the published blocks; `end` None stands for all tokens.

        Each layer is reported front to back, once for every chunk. If the receiver's offer is here the bytes are
        handed to the transport before this returns: one lock and one native call, no waiting. On a GPU it is enough
        that the kernels which write the layer were launched in this thread's current stream.
        Raises InvalidRequest for a layer that the layouts do not have.
        """
        if not 0 <= layer < self._sender.groups.num_layers:
            raise self._sender.groups.no_layer(layer)
        if end is None:
            end = self.num_tokens
        with self._sender.lock:
            if self.machine.state not in SENDER_ENDS:
                if listeners:
                    event = LayerWritten(transfer_id=self.transfer_id, layer=layer, start=start, end=end)
                    self.written_s = event.at_s
                    emit(event)
                self._sender.act(self, self.machine.written(layer, start, end))

    def finish(self, first_token: int = 0) -> None:
        """The prompt is computed; `first_token`, the first of the answer, goes to the receiver with the last byte.

        A transfer whose layers have not all been reported by now fails.
        """
        self._finished = True
        with self._sender.lock:
            self.finished_s = self._sender.clock.awake_s()
            self._sender.act(self, self.machine.finish(first_token))

    def withdraw(self, timeout_s: float) -> None:
        """Wait until no push reads the published blocks any more, and take them back (preemption).

        Publish again to go on; what has landed is pushed again, too (`Sending.withdraw`). A transfer whose pushes do
        not end within `timeout_s` fails: later writes only reach pages that the receiver keeps in quarantine. Not for
        a callback, nor for the endpoint's thread.
        """
        with self._sender.lock:
            if self._sender.wait_idle(self, timeout_s):
                again = self.machine.withdraw()
                self.checksums = [each for each in self.checksums if each.layer not in again]
        self._let_go()

    def cancel(self, reason: Reason = ABORTED) -> None:
        with self._sender.lock:
            self._sender.act(self, self.machine.stop(reason))

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the receiver has everything. Raises TransferFailed, DeadlineExceeded after `timeout_s`."""
        self._wait(self.done, timeout_s, "the receiver did not have all of it")

    def __await__(self) -> Generator[object, None, None]:
        yield from self.done.__await__()
        self._raise()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A finished transfer goes on without its caller: the receiver may still take its time to offer blocks."""
        if kind is not None or not self._finished:
            super().__exit__(kind, error, trace)


@dataclass(slots=True, eq=False)
class PushBatch(QueuedPush):
    """A push on its way: it waits for room, and then is one batch of the transport."""

    transfer: Outgoing
    push: Push
    asked_s: float
    """When the machine asked for it; of what was held, when its marks were reached."""
    submitted_s: float = 0.0
    after: Sequence[Mark] = ()
    """The GPU waits for these. Not in the `Order`, which has no room for what may be late."""


@dataclass(slots=True, eq=False)
class PushLane:
    """What goes over one transport."""

    transport: Transport
    order: Order[PushBatch]
    in_flight: dict[int, PushBatch] = field(default_factory=dict)
    """By ticket."""


class DataPath:
    """Used under the endpoint's lock."""

    def __init__(self, sender: SenderPort, common: Common, batch_timeout_s: float, sharing: Sharing) -> None:
        """batch_timeout_s: counts from the hand-over of a push, not from the start of its wait."""
        self._now_s, self._sessions, self._verifier = common.clock.now_s, common.sessions, common.verifier
        self._sender, self._batch_timeout_s, self._sharing = sender, batch_timeout_s, sharing
        self._groups, self._marks = common.groups, common.marks
        self.lanes: dict[str, PushLane] = {}
        """By name of the transport."""
        self._ended, self._num_waiting = threading.Condition(common.work.lock), 0

    def push(self, transfer: Outgoing, pushes: Sequence[Push]) -> None:
        """Hand over these pushes as far as there is room."""
        peer, now_s = transfer.peer, self._now_s()
        assert peer is not None
        assert peer.transport is not None
        lane = self.lanes.get(peer.transport.name)
        if lane is None:
            lane = self.lanes[peer.transport.name] = PushLane(peer.transport, Order(self._sharing))
        backlog = transfer.backlog
        if backlog is None:
            if peer.flow is None:
                peer.flow = lane.order.flow()
            backlog = transfer.backlog = lane.order.backlog(peer.flow, transfer.machine.nbytes)
        batches = [PushBatch(backlog, push.nbytes, transfer, push, now_s) for push in pushes]
        if transfer.marks:
            self._push_after(lane, transfer, batches)
        else:
            for batch in batches:
                lane.order.add(batch)
        if lane.order.waiting_nbytes:
            self._release(lane)

    def take_back(self, transfer: Outgoing) -> None:
        """Drop the waiting pushes of this transfer, which never were in flight, and forget its blocks."""
        if transfer.backlog is None:
            return
        assert transfer.peer is not None
        assert transfer.peer.transport is not None
        lane = self.lanes.get(transfer.peer.transport.name)  # None once the endpoint is closed
        batches = [*(lane.order.drop(transfer.backlog) if lane is not None else ()), *transfer.held]
        transfer.backlog = None
        transfer.held.clear()
        transfer.plans.clear()
        for batch in batches:
            self._sender.act(transfer, transfer.machine.dropped(batch.push.push_id))

    def release(self) -> None:
        """Hand over what has room now. Call periodically."""
        for lane in self.lanes.values():
            self._release(lane)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of a push; False if none ends within `timeout_s`."""
        self._num_waiting += 1
        try:
            return self._ended.wait(timeout_s)
        finally:
            self._num_waiting -= 1

    def notify(self) -> None:
        """A push has ended, or all of a peer's were fenced."""
        if self._num_waiting:
            self._ended.notify_all()

    def nbytes(self) -> dict[str, int]:
        """KV bytes `waiting` for room on their transport, and those `in_flight`."""
        lanes = self.lanes.values()
        return {
            "waiting": sum(lane.order.waiting_nbytes for lane in lanes),
            "in_flight": sum(batch.nbytes for lane in lanes for batch in lane.in_flight.values()),
        }

    def handed(self) -> dict[str, set[int]]:
        """Layers of which a transport has a push now, by transfer id."""
        found: dict[str, set[int]] = {}
        for lane in self.lanes.values():
            for batch in lane.in_flight.values():
                found.setdefault(batch.transfer.transfer_id, set()).update(batch.push.layers)
        return found

    def ended(self, transport: Transport, done: BatchDone) -> None:
        """A push has ended."""
        lane = self.lanes.get(transport.name)
        batch = lane.in_flight.pop(done.ticket, None) if lane is not None else None
        if lane is None or batch is None:
            return
        transfer, push, order = batch.transfer, batch.push, lane.order
        if not batch.after:
            order.ended(batch, self._now_s())
        if self._num_waiting:
            self.notify()
        if done.status is not BatchStatus.OK:
            self._sender.act(
                transfer,
                transfer.machine.lost(push.push_id, Reason(Code.PUSH_FAILED, f"{done.status.value}: {done.detail}")),
            )
        if order.waiting_nbytes:
            self._release(lane)  # before the reports: the link must not run dry
        if done.status is not BatchStatus.OK:
            return
        peer = transfer.peer
        assert peer is not None
        if not peer.lane:
            peer.lane = transport.lane(done.peer)
        transfer.nbytes += done.nbytes
        if transfer.first_landed_s is None:
            transfer.first_landed_s = done.done_s
        transfer.last_landed_s = done.done_s
        if listeners:
            _report(batch, peer.lane, self._groups.layer_nbytes, done.done_s)
        if push.offer.verify != "off" and self._verifier is not None and self._verifier.wants(push):
            self._compute_checksums(self._verifier, transfer, push)
        else:
            self._sender.act(transfer, transfer.machine.landed(push.push_id))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _push_after(self, lane: PushLane, transfer: Outgoing, batches: Sequence[PushBatch]) -> None:
        """Pushes of what may not be written yet. The transport waits for the marks of a layer that is reported now.

        Several layers were reported before, and most of them are written: they wait here, and then take turns.
        """
        first = batches[0].push.layers
        if lane.transport.follows_events and len(first) == 1 and first == batches[-1].push.layers:
            after = tuple(transfer.marks[first.start].values())
            for batch in batches:
                batch.after = after
                lane.order.pass_by(batch)
                self._release(lane, batch)
            return
        assert self._marks is not None
        for layers, same in groupby(batches, lambda batch: batch.push.layers):
            held = list(same)
            transfer.held.update(dict.fromkeys(held))
            marks = {mark for layer in layers for mark in transfer.marks[layer].values()}
            self._marks.when_reached(tuple(marks), partial(self._written, lane, held), transfer.cancel)

    def _written(self, lane: PushLane, batches: Sequence[PushBatch]) -> None:
        """The marks of pushes that wait here are reached. Not under the lock."""
        with self._sender.lock:
            held = batches[0].transfer.held
            for batch in batches:
                if batch in held:  # else it was taken back
                    del held[batch]
                    batch.asked_s = self._now_s()
                    lane.order.add(batch)
            self._release(lane)

    def _release(self, lane: PushLane, batch: PushBatch | None = None) -> None:
        """Hand over this push, and others as far as there is room."""
        order = lane.order
        while batch is not None or (order.waiting_nbytes and (batch := order.next(self._now_s())) is not None):
            transfer, push, planned = batch.transfer, batch.push, False
            peer = transfer.peer
            assert peer is not None
            try:
                plan = transfer.plans.get((push.group, push.start, push.end))
                if plan is None:
                    plan = plan_of(peer.templates[push.group], push)
                    transfer.plans[push.group, push.start, push.end] = plan
                first = self._groups.index_of[push.layers.start]
                layers = range(first, first + len(push.layers))
                planned, batch.submitted_s = True, self._now_s()
                events = [(mark.event.handle, mark.event.stream) for mark in batch.after]
                ticket = lane.transport.submit_plan(peer.key, plan, layers, self._batch_timeout_s, events)
                lane.in_flight[ticket] = batch
            except Exception as error:  # noqa: BLE001  a peer's numbers, in the engine's thread: they cost only it
                if not batch.after:
                    order.ended(batch, self._now_s())
                self._refused(transfer, push, error, planned=planned)
            batch = None

    def _refused(self, transfer: Outgoing, push: Push, error: Exception, *, planned: bool) -> None:
        """A push cannot be handed to the transport. Without a plan for it nothing of it can have left."""
        if not isinstance(error, PdlinkError | ValueError):
            emit(HandlingFailed(what="push", error=f"{type(error).__name__}: {error}"))
        name, layer = transfer.transfer_id, push.layers.start
        log.warning("transfer %s: cannot push layer %d: %s", name, layer, error, extra=about(transfer_id=name))
        machine, peer = transfer.machine, transfer.peer
        if not planned:
            self._sender.act(transfer, machine.stop(Reason(Code.PUSH_FAILED, f"impossible: {error}")))
            self._sender.act(transfer, machine.dropped(push.push_id))
            return
        self._sender.act(transfer, machine.lost(push.push_id, Reason(Code.PUSH_FAILED, f"refused: {error}")))
        assert peer is not None
        reason = Reason(Code.PEER_LOST, str(error))
        self._sessions.lose(peer, reason)
        self._sender.on_peer_lost(peer, reason)  # now, or all its other pushes would fail one by one

    def _compute_checksums(self, verifier: Verifier, transfer: Outgoing, push: Push) -> None:
        """Until they are there the push counts as in flight: its blocks are read, and *done* waits for it."""
        machine = transfer.machine

        def computed(checksums: Sequence[Checksum]) -> None:
            if machine.state not in SENDER_ENDS:
                transfer.checksums += checksums
                self.notify()
                self._sender.act(transfer, machine.landed(push.push_id))

        def failed(reason: Reason) -> None:
            if machine.state not in SENDER_ENDS:
                self._sender.act(transfer, machine.stop(reason))
                self.notify()
                self._sender.act(transfer, machine.landed(push.push_id))

        verifier.compute(push, computed, failed)


def plan_of(template: Template, push: Push) -> Plan:
    """The copies of a push, the same blocks for each of its group's layers."""
    src_tokens, dst_tokens = template.src.block_tokens, template.dst.block_tokens
    first_dst = push.start // dst_tokens - push.first // dst_tokens
    dst_blocks = push.offer.blocks[push.group][first_dst:]
    return bind(template, push.blocks[push.start // src_tokens :], dst_blocks, push.start, push.end)


def _report(batch: PushBatch, lane: str, layer_nbytes: Sequence[int], done_s: float) -> None:
    push = batch.push
    for layer in push.layers:
        emit(
            LayerLanded(
                at_s=done_s,
                transfer_id=batch.transfer.transfer_id,
                layer=layer,
                start=push.start,
                end=push.end,
                nbytes=(push.end - push.start) * layer_nbytes[layer],
                transport=lane,
                submitted_s=batch.submitted_s,
                asked_s=batch.asked_s,
            )
        )
