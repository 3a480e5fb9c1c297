"""One life of a worker: endpoint, transport, engine and clock, and oracles around what they tell each other.

The world turns the endpoint's loop on virtual time; a `pdlink.Node` turns its own, so handles are made without one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np

from pdlink.endpoint.clock import AwakeClock
from pdlink.endpoint.data_path import Outgoing
from pdlink.endpoint.driver import Endpoint
from pdlink.endpoint.peer import PeerState
from pdlink.endpoint.receiver import Incoming
from pdlink.endpoint.sharing import Sharing
from pdlink.errors import TransportFailure
from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import KVLayout, paged_layout
from pdlink.node.port import EnginePort
from pdlink.protocol.deadlines import Deadlines
from pdlink.protocol.messages import VERSION, Identity
from pdlink.protocol.states import ReceiverState, SenderState
from pdlink.reasons import Reason
from pdlink.serve.stream import DecodeLeg, PrefillLeg
from tests.loopback import LoopbackTransport

from .engine import NUM_LAYERS, NUM_PARTS, ROW_NBYTES, Engine, Request, Violation, first_token, transfer_number
from .kept import NO_BLOCKS, Kept, KeptBlocks, layouts
from .network import Network, Port

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.endpoint.peer import Peer
    from pdlink.engine.engine import Engine as RealEngine
    from pdlink.kv.groups import BlockLists
    from pdlink.kv.layout import RunList
    from pdlink.memory.buffers import Buffer
    from pdlink.node.node import Node as FrontDoor
    from pdlink.protocol.receiving import Receiving
    from pdlink.protocol.sending import Sending
    from pdlink.serve.stream import Stream
    from tests.loopback import LoopbackHub, OpenBatch

TIMEOUTS = Deadlines(heartbeat_s=1.0, peer_s=4.0, connect_s=5.0, lease_s=8.0, request_s=40.0, idle_s=0.0)
IDLE_S = 4.0
"""Where idle sessions are closed; not everywhere, for that also mends what else nobody would mend."""
BATCH_TIMEOUT_S = 6.0
SHARING = Sharing(window_nbytes=200, peer_window_nbytes=160, push_nbytes=64)
"""A layer of all tokens is 144 bytes: it is cut, and a transfer has to wait for itself."""


def _layout(block_tokens: int, num_blocks: int, order: str) -> KVLayout:
    return paged_layout(
        dtype="uint8",
        itemsize=1,
        num_layers=NUM_LAYERS,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        num_heads=1,
        head_dim=ROW_NBYTES,
        order=order,
        num_parts=NUM_PARTS,
    )


LAYOUTS = {
    "prefill": ("LPBTH", _layout(2, 9, "LPBTH")),
    "roomy prefill": ("LPBTH", _layout(2, 400, "LPBTH")),
    "decode": ("BLPTH", _layout(3, 7, "BLPTH")),
    "hybrid prefill": ("LPBTH", _layout(2, 20, "LPBTH")),
    "hybrid decode": ("BLPTH", _layout(3, 16, "BLPTH")),
}
"""Order of axes, and geometry of the first group. Both pools are too small for all requests at once; a prefill
worker that is full of KV which nobody has room for, for requests that a full decode worker does not wait for,
stands still until a deadline, so where nothing may fail it gets more.
"""


class Time:
    """Monotonic, of one life: its own origin and speed, and it may jump forward."""

    def __init__(self, origin_s: float, speed: float) -> None:
        self._now_s, self._speed = origin_s, speed

    def __call__(self) -> float:
        return self._now_s

    def pass_(self, seconds: float) -> None:
        self._now_s += seconds * self._speed

    def jump(self, seconds: float) -> None:
        self._now_s += seconds


class JumpingClock:
    """Counts all time as awake, so that one turn may find every lease and every peer's silence run out at once."""

    def __init__(self, time: Time) -> None:
        self.now_s = self.awake_s = time

    def turn(self) -> None:
        pass


@dataclass(eq=False)
class Tracked:
    """A batch that somebody may still read or write memory for."""

    batch: OpenBatch
    transfer_id: str
    writer: Node
    owner: Node
    src_blocks: set[int]
    dst_blocks: set[int]

    @property
    def dangerous(self) -> bool:
        """Whether bytes of it may still be written. A shut gate ends that, unless a run is under way."""
        link = self.batch.link
        if self.batch.reported and self.batch.num_landed == len(self.batch.runs):
            return False
        if not self.writer.alive or not self.owner.alive:
            return False
        return link.busy or (not link.shut and self.writer.transport.writes_through(link))


class Wire(LoopbackTransport):
    """The loopback transport, which tells the world of every batch, and closes a peer only when it is let."""

    def __init__(self, hub: LoopbackHub, node: Node) -> None:
        super().__init__(hub)
        self.node = node
        self.to_close: list[str] = []
        """Peers that are to be closed: until then bytes may land, as where a writer cannot be stopped at once."""

    def close_peer(self, peer: str) -> None:
        if peer not in self.to_close:
            self.to_close.append(peer)

    def close_now(self) -> None:
        while self.to_close:
            super().close_peer(self.to_close.pop())

    def submit(self, peer: str, lists: Sequence[RunList], timeout_s: float) -> int:
        if peer in self.to_close:
            raise TransportFailure(f"{peer} is closed")
        ticket = super().submit(peer, lists, timeout_s)
        if self.hub.open_batches and self.hub.open_batches[-1].ticket == ticket:
            self._track(self.hub.open_batches[-1], lists)
        return ticket

    def writes_through(self, link: object) -> bool:
        return any(item is link for item in self._out.values())

    def num_peers(self) -> int:
        """Peers of which anything is kept."""
        return len({*self._in, *self._out, *self._failed, *self._closing})

    def _track(self, batch: OpenBatch, lists: Sequence[RunList]) -> None:
        owner = batch.link.owner
        assert isinstance(owner, Wire)
        src = {
            block
            for run_list in lists
            for block in _blocks(
                self.node.groups.layouts[run_list.src_region],
                [(run_list.src_base + int(run[0]), int(run[2])) for run in run_list.runs],
            )
        }
        dst = {
            block
            for run_list in lists
            for block in _blocks(
                owner.node.groups.layouts[run_list.dst_region],
                [(run_list.dst_base + int(run[1]), int(run[2])) for run in run_list.runs],
            )
        }
        transfer_id = self.node.transfer_of.get(transfer_number(batch.runs[0][1]), "unwritten")
        self.node.tracked.append(Tracked(batch, transfer_id, self.node, owner.node, src, dst))


def _blocks(layout: KVLayout, spans: list[tuple[int, int]]) -> set[int]:
    """Blocks that byte spans of this group's region lie in."""
    stride, count = layout.layers[0].block_stride, layout.num_blocks
    return {at // stride % count for start, nbytes in spans for at in range(start, start + nbytes, ROW_NBYTES)}


class _CheckedOutgoing(Outgoing):
    """A sending end, with what its endpoint tells it checked."""

    def __init__(self, node: Node, transfer_id: str) -> None:
        self._node, self._heard = node, Counter[str]()
        super().__init__(node.endpoint.sender, transfer_id)
        node.open_legs.add((transfer_id, "sender"))

    def on_failed(self, reason: Reason) -> None:
        self._heard["failed"] += 1
        if self._heard["failed"] > 1 or self._heard["end"]:
            raise Violation(f"{self.transfer_id}: the sender failed after {dict(self._heard)}")
        super().on_failed(reason)

    def on_end(self) -> None:
        self._heard["end"] += 1
        if self._heard["end"] > 1:
            raise Violation(f"{self.transfer_id}: the sender ended twice")
        self._node.open_legs.discard((self.transfer_id, "sender"))
        super().on_end()


class _CheckedIncoming(Incoming):
    """A receiving end, with what its endpoint tells it checked."""

    def __init__(self, node: Node, request: Request, address: str, *, by_layer: bool) -> None:
        self._node, self._request = node, request
        self._heard: list[str] = []
        super().__init__(node.endpoint.receiver, request.transfer_id, address, by_layer=by_layer)
        node.open_legs.add((request.transfer_id, "receiver"))

    def offer(self, blocks: BlockLists, tokens: range) -> None:
        self._blocks = self._node.groups.by_group(blocks)
        super().offer(blocks, tokens)

    def on_ready(self, first_token_: int) -> None:
        self._tell("ready")
        request = self._request
        groups, engine = self._node.groups, self._node.engine
        offered = [
            [0] * (first // layout.block_tokens) + list(table)
            for layout, table, (first, _) in zip(
                groups.layouts, self._blocks, groups.needed(request.num_cached, request.num_tokens), strict=True
            )
        ]
        kept = KeptBlocks(tuple(offered[1]), offered[2][-1]) if engine.kept and all(offered) else NO_BLOCKS
        asked = replace(request, blocks=offered[0], kept=kept)
        if not all(
            engine.has(asked, request.num_cached, request.num_tokens, layer) for layer in range(engine.num_layers)
        ):
            raise Violation(f"{request.transfer_id}: delivered without, or with other, bytes")
        if first_token_ != first_token(request.number):
            raise Violation(f"{request.transfer_id}: delivered with the first token of another")
        super().on_ready(first_token_)

    def on_failed(self, reason: Reason) -> None:
        self._tell("failed")
        self._node.reasons[self._request.transfer_id] = str(reason)
        super().on_failed(reason)

    def on_end(self) -> None:
        if len(self._heard) != 1:
            raise Violation(f"{self._request.transfer_id}: released after {self._heard}")
        self._heard.append("released")
        self._node.open_legs.discard((self._request.transfer_id, "receiver"))
        super().on_end()

    def _tell(self, what: str) -> None:
        if self._heard:
            raise Violation(f"{self._request.transfer_id}: {what} after {self._heard}")
        self._heard.append(what)


class _FrontDoor:
    """What a port takes for its worker's `pdlink.Node`: the same handles, over an endpoint that the world turns."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.groups = node.groups

    def send(self, transfer_id: str) -> Outgoing:
        return _CheckedOutgoing(self._node, transfer_id)

    def receive(self, transfer_id: str, address: str, *, by_layer: bool) -> Incoming:
        return _CheckedIncoming(self._node, self._node.requests[transfer_id], address, by_layer=by_layer)


@dataclass
class _NoClient:
    """The stream of a request whose answer nobody reads."""

    request_id: str
    num_prompt_tokens: int
    holds = False

    def let_pass(self) -> None: ...


class Node:
    """One life. A restarted worker is another Node with the same name and address."""

    def __init__(
        self,
        hub: LoopbackHub,
        network: Network,
        name: str,
        role: str,
        life: int,
        speed: float,
        tracked: list[Tracked],
        *,
        roomy: bool,
        jumps: bool,
        hybrid: bool,
        idle: bool,
    ) -> None:
        """roomy: never short of blocks, if it prefills. jumps: whether its deadlines run on while it stands still.
        idle: whether it closes idle sessions.

        hybrid: with groups of layers that do not keep all tokens.
        """
        self.name, self.role = name, role
        self.address = f"tcp://{name}:1"
        order, self.layout = LAYOUTS[
            "roomy prefill" if roomy and role == "prefill" else f"hybrid {role}" if hybrid else role
        ]
        self.groups = KVGroups((self.layout, *(layouts(self.layout) if hybrid else ())))
        self.time = Time(1000.0 * life, speed)
        self.transport = Wire(hub, self)
        self.transport.open()
        memory = [np.full(self.groups.extent(region), 0xEE, np.uint8) for region in range(self.groups.num_regions)]
        for array in memory:
            self.transport.register(cast("Buffer", SimpleNamespace(array=array)))
        _, *others = self.groups.layouts
        kept = Kept(others[0], others[1], (memory[1], memory[2])) if hybrid else None
        self.engine = Engine(self.layout, order, memory[0], kept)
        self.engine.port = EnginePort(cast("FrontDoor", _FrontDoor(self)))
        self.requests: dict[str, Request] = {}
        """That ever came, by transfer."""
        self.port = Port(network, f"{name}@{life}", self.address)
        self.endpoint = Endpoint(
            name,
            Identity(VERSION, "model", "main", 1, self.layout, "host", other_layouts=self.groups.layouts[1:]),
            [self.transport],
            replace(TIMEOUTS, idle_s=IDLE_S if idle else 0.0),
            batch_timeout_s=BATCH_TIMEOUT_S,
            sharing=SHARING,
            channel=lambda _: self.port,
            clock=JumpingClock(self.time) if jumps else AwakeClock(TIMEOUTS.heartbeat_s, self.time),
            short_of_blocks=lambda: any(request.state == "waiting" for request in self.engine.requests.values()),
            pool=self.engine.pool,
        )
        self.endpoint.local.epoch = f"{name}-life-{life}"
        self.endpoint.sessions.known.jitter = lambda: 0.5
        self.endpoint.local.address = self.address
        network.listening[self.address] = self.port
        self.alive, self.stopped = True, False
        self.busy_until_s = 0.0
        """Its engine is in one long pass until then, by the hub's clock; its endpoint goes on."""
        self.tracked = tracked
        self.transfer_of: dict[int, str] = {}
        self.legs: dict[str, PrefillLeg | DecodeLeg] = {}
        self.open_legs: set[tuple[str, str]] = set()
        """Legs that were taken and have not ended."""
        self.ends: Counter[tuple[str, str]] = Counter()
        """Terminal events by transfer and side."""
        self.reasons: dict[str, str] = {}
        """Why decode legs failed."""

    @property
    def runs(self) -> bool:
        return self.alive and not self.stopped

    @property
    def has_work(self) -> bool:
        """Whether its loop would go round at once."""
        return bool(self.endpoint.work.commands or self.endpoint.work.callbacks)

    def submit(self, request: Request, address: str, *, recompute: bool) -> None:
        """Take a leg. Raises what the leg raises."""
        self.transfer_of[request.number] = request.transfer_id
        self.requests[request.transfer_id] = request
        engine, port = cast("RealEngine", self.engine), self.engine.port
        stream = cast("Stream", _NoClient(request.transfer_id, request.num_tokens))
        if self.role == "prefill":
            request.leg = PrefillLeg(stream, request.transfer_id, engine, port)
        else:
            request.leg = DecodeLeg(stream, request.transfer_id, address, engine, port, recompute=recompute)
        if request.transfer_id in self.legs:
            raise Violation(f"{request.transfer_id}: {self.name} took it a second time")
        self.legs[request.transfer_id] = request.leg
        self.engine.requests[request.transfer_id] = request
        request.leg.submitted()

    def holds(self, transfer_id: str) -> set[int]:
        """Blocks that the endpoint keeps for this transfer."""
        leg = self.legs.get(transfer_id)
        transfer = leg.outgoing if isinstance(leg, PrefillLeg) else leg.incoming if leg is not None else None
        return set(transfer._held) if transfer is not None else set()

    def check_timely(self) -> None:
        """Right after a turn: what has run out is gone, and no transfer goes on with a session that has ended."""
        now, late_s = self.endpoint.clock.awake_s(), TIMEOUTS.heartbeat_s
        sender, receiver = self.endpoint.sender, self.endpoint.receiver
        for outgoing in sender._transfers.values():
            lease, peer = outgoing.lease, outgoing.peer
            renewed_s = max(lease.from_s, peer.heard_s if peer else lease.from_s)
            end_s = min(lease.limit_s, renewed_s + lease.length_s)
            if outgoing.machine.state is not SenderState.DRAINING and now - end_s > late_s:
                raise Violation(f"{outgoing.transfer_id}: a lease of {self.name} has outlived its end")
        for transfer_id in sender._early:
            early = sender._early.get(transfer_id)
            if early and now - early.since_s - min(TIMEOUTS.other_leg_s, TIMEOUTS.lease_s) > late_s:
                raise Violation(f"{transfer_id}: an early offer to {self.name} has outlived its end")
        for incoming in receiver._transfers.values():
            machine = incoming.machine
            if machine.state is not ReceiverState.DRAINING and now - incoming.deadline_s > late_s:
                raise Violation(f"{machine.transfer_id}: {self.name} has missed its deadline")
            if now - machine._quiet_by_s > late_s:
                raise Violation(f"{machine.transfer_id}: {self.name} waits for a quiet that does not come")
        sides: list[tuple[Peer | None, Sending | Receiving]] = []
        sides += [(item.peer, item.machine) for item in sender._transfers.values()]
        sides += [(item.peer, item.machine) for item in receiver._transfers.values()]
        for session, side in sides:
            if session and session.state is PeerState.LOST and side.state.name != "DRAINING":
                raise Violation(f"{side.transfer_id}: {self.name} goes on in a session that is over")

    def gauges(self) -> dict[str, int]:
        """Everything that must be zero when no transfer is left. Sessions may stay."""
        sender, receiver, endpoint = self.endpoint.sender, self.endpoint.receiver, self.endpoint
        return {
            **{f"sender.{name}": count for name, count in sender.states().items()},
            **{f"receiver.{name}": count for name, count in receiver.states().items()},
            "sender.pushes": sum(len(lane.in_flight) for lane in sender.data_path.lanes.values()),
            **{f"sender.{name}_nbytes": count for name, count in sender.push_nbytes().items()},
            "closing": endpoint.num_closing(),
            "transport.closing": len(self.transport._closing) + len(self.transport.to_close),
            "transport.peers": max(0, self.transport.num_peers() - len(endpoint.peers()) - endpoint.num_closing()),
            "transport.failed": len(self.transport._failed),
            "pool.held": self.engine.pool.num_held,
            "requests": len(self.engine.requests),
            "legs": len(self.open_legs),
        }

    def session_gauges(self) -> dict[str, int]:
        """Everything that must be zero when no session is left either."""
        endpoint = self.endpoint
        known = [*endpoint.sessions.known.dialed.values(), *endpoint.sessions.known.accepted.values()]
        return {
            "peers": len(endpoint.peers()),
            "queued": endpoint.queued_nbytes() + len(endpoint.sessions.waiting),
            "routes": len(endpoint.sessions.by_route),
            "known": sum(not (peer.refusal or peer.unusable) for peer in known),
            "closing": endpoint.num_closing(),
            "transport.peers": self.transport.num_peers(),
            "early": len(endpoint.sender._early),
            "flows": sum(len(lane.order._flying) for lane in endpoint.sender.data_path.lanes.values()),
            "dials": sum(item.dialer is self.port for item in self.port._connections.values()),
        }
