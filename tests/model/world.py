"""A deployment in one thread: prefill and decode workers, a router, a network, a data plane, and whatever goes wrong.

A schedule is a list of numbers. Each picks a move, and whom it concerns. After every move the oracles are asked:
  - no block that a batch may still write to, or read from, has been given back;
  - what was delivered is byte for byte what was offered for, with its own first token (checked in the legs);
  - nobody hears more than one end of a transfer, and nothing after it; one terminal event per transfer and side;
  - a frame of another life or session is dropped;
  - no exception comes out of the loop.
`settle` lets everything arrive and the leases run out: then every gauge is zero, every leg that was taken has ended,
and once the sessions are ended nothing is left of them either. Where nothing was made to go wrong (`gentle`), no
session is lost and every transfer that nobody stopped is delivered.

Nodes talk only through the network and the hub, so a node's turn, an engine's pass, a frame and a byte run are the
steps; time is the schedule's.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdlink.endpoint.channel import Disconnected, Received
from pdlink.errors import PdlinkError
from pdlink.events import Event, HandlingFailed, MessageDropped, PeerChanged, TransferEnded
from pdlink.protocol import messages
from pdlink.reasons import Code, Reason
from tests.loopback import LoopbackHub

from .dice import Dice
from .engine import Request, Violation
from .network import Connection, Frame, Network
from .node import TIMEOUTS, Node, Tracked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.endpoint.peer import Peer

STEP_S = 0.5
JUMPING = {"faulty"}
"""Profiles in which deadlines also run out while a loop stands still; in the others they do as in the product."""
_LATE = {"deadline", "no_request", "no_receiver", "no_offer", "lease_expired"}
"""Reasons for an end that need nobody's fault: it took too long."""


@dataclass(eq=False)
class Leg:
    """What the router has sent to a worker and the worker has not read yet."""

    transfer: Transfer
    role: str


@dataclass(eq=False)
class Transfer:
    """One attempt of the router."""

    transfer_id: str
    number: int
    prefill: int
    decode: int
    num_tokens: int
    prefill_cached: int
    decode_cached: int
    chunk: int
    recompute: bool
    disturbed: bool = False
    """Somebody stopped it, or a leg of it never came: it need not be delivered."""


class World:
    """Two to five workers; `moves.Played` does something with them. Raises Violation for whatever must not be."""

    def __init__(self, shape: int, profile: str) -> None:
        """profile: a key of `PROFILES`.

        shape: decides how many workers there are, how their clocks run, and how many groups of layers they have.
        """
        dice = Dice(shape)
        self.profile, self.hybrid = profile, bool(shape % 2)
        self.idle = bool(shape // 2 % 2)
        self.hub = LoopbackHub(hold=True)
        self.network = Network()
        self.tracked: list[Tracked] = []
        self.nodes: list[Node] = []
        for role, count in (("prefill", 1 + dice.below(3)), ("decode", 1 + dice.below(2))):
            for index in range(count):
                speed = 1.0 if profile == "gentle" else (1.0, 0.8, 1.3)[dice.below(3)]
                self.nodes.append(self._start(f"{role}-{index}", role, 1, speed))
        self.speeds = [node.time._speed for node in self.nodes]
        self.prefills = [index for index, node in enumerate(self.nodes) if node.role == "prefill"]
        self.decodes = [index for index, node in enumerate(self.nodes) if node.role == "decode"]
        self.num_lives = 1
        self.transfers: list[Transfer] = []
        self.pending: list[Leg] = []
        self.history: deque[tuple[Connection, bool, Frame]] = deque(maxlen=60)
        self.counts: Counter[str] = Counter()
        self._acting: Node | None = None
        self._num_dropped = 0

    # -- what nodes do -----------------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        if isinstance(event, TransferEnded):
            assert self._acting is not None
            self._acting.ends[event.transfer_id, event.side] += 1
            if self._acting.ends[event.transfer_id, event.side] > 1:
                raise Violation(f"{event.transfer_id}: the {event.side} of {self._acting.name} ended twice")
            self.counts[f"{event.side} {event.state}"] += 1
        elif isinstance(event, HandlingFailed):
            raise Violation(f"{self._acting and self._acting.name}: {event.what}: {event.error}")
        elif isinstance(event, MessageDropped):
            self._num_dropped += event.reason in ("old_session", "repeated")
        elif isinstance(event, PeerChanged) and event.state == "lost":
            self.counts["sessions lost"] += 1
            self.counts["sessions idle"] += event.reason.startswith("idle for ")
            meant = event.reason == "shutdown" or event.reason.endswith(": shutdown") or "idle for " in event.reason
            if self.profile == "gentle" and not meant:
                raise Violation(f"nothing went wrong, but {event.peer} was lost: {event.reason}")

    def act(self, node: Node, what: Callable[[], object]) -> None:
        """Let a node do something. Only refusals that its caller must expect may come out."""
        self._acting = node
        try:
            what()
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, PdlinkError) as error:
            raise Violation(f"{node.name}: {type(error).__name__}: {error}") from error
        finally:
            self._acting = None

    def turn(self, node: Node, arrived: Sequence[Received | Disconnected] = ()) -> None:
        self.act(node, lambda: node.endpoint.turn(arrived))
        node.check_timely()

    @property
    def running(self) -> list[Node]:
        return [node for node in self.nodes if node.runs]

    def node_of(self, port: object) -> Node | None:
        return next((node for node in self.nodes if node.port is port and node.alive), None)

    # -- oracles -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """No block is free that somebody may still write to or read from."""
        self.tracked[:] = [item for item in self.tracked if item.dangerous]
        for item in self.tracked:
            for node, blocks, verb in (
                (item.owner, item.dst_blocks, "written to"),
                (item.writer, item.src_blocks, "read"),
            ):
                loose = blocks - node.holds(item.transfer_id)
                if loose:
                    raise Violation(f"{item.transfer_id}: {node.name} gave {sorted(loose)} back, still to be {verb}")

    def _must_be_dropped(self, node: Node, route: str, frame: Frame) -> bool:
        """Whether this frame is of another life or session than the one that the route stands for now, or known."""
        try:
            envelope = messages.decode(frame.content)
        except PdlinkError:
            return False
        if isinstance(envelope.bodies[0], messages.Hello):
            return False
        peer = node.endpoint.sessions.by_route.get(route)
        if peer is None or (envelope.dst_epoch, envelope.session) != (node.endpoint.epoch, peer.session):
            return True
        if isinstance(envelope.bodies[-1], messages.Bye | messages.Refuse):  # whatever its number
            known, same_life = False, peer.dialed  # a successor's: only ends sessions
        else:
            known, same_life = envelope.number < peer.num_taken, False
        same_life |= not peer.epoch or (peer.name, peer.epoch) == (envelope.src, envelope.src_epoch)
        return known or not same_life

    # -- the network -------------------------------------------------------------------------------------------------

    def deliver(self, connection: Connection, to_listener: bool, count: int = 1) -> bool:
        """Hand over the next frames of one direction, if somebody is there; False if nothing moved."""
        queue = connection.to_listener if to_listener else connection.to_dialer
        port = self.network.listening.get(connection.address) if to_listener else connection.dialer
        node = self.node_of(port)
        if not queue or node is None or not node.runs:
            return False
        route = connection.listen_route if to_listener else connection.dial_route
        if to_listener:
            node.port.accept(connection)
        elif not connection.open:
            queue.clear()
            return False
        frames = [queue.popleft() for _ in range(min(count, len(queue)))]
        for frame in frames:
            if self.profile in ("harsh", "lossy") and b"heartbeat" not in frame.content:
                self.history.append((connection, to_listener, frame))
            before, refused = self._num_dropped, self._must_be_dropped(node, route, frame)
            self.turn(node, [Received(route, frame.content)])
            if refused and self._num_dropped == before:
                raise Violation(f"{node.name} acted upon a frame of another life or session, or a second time")
        return True

    def deliver_all(self) -> bool:
        moved = False
        for connection in list(self.network.connections):
            for to_listener in (True, False):
                while self.deliver(connection, to_listener, 4):
                    moved = True
        self.network.tidy()
        return moved

    def notify(self, connection: Connection) -> None:
        node = self.node_of(connection.dialer)
        connection.notices = 0
        if node is not None and node.runs and connection.open:
            self.turn(node, [Disconnected(connection.dial_route)])

    # -- time --------------------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        for node in self.nodes:
            node.time.pass_(seconds)
        self.hub.advance(seconds)

    def calm(self, *, land: bool = True) -> bool:
        """Half a heartbeat in which everything works: all turn, all frames arrive, engines pass, batches land."""
        self.advance(STEP_S)
        moved = False
        for node in self.running:
            node.transport.close_now()
            moved |= self.step_engine(node)
            self.turn(node)
        for _ in range(3):
            busy = self.deliver_all()
            if land:
                busy |= bool(self.hub.open_batches)
                self.hub.deliver_all()
            moved |= busy
            if not busy and not any(node.has_work for node in self.running):
                break
            for node in self.running:
                self.turn(node)
        return moved

    def step_engine(self, node: Node) -> bool:
        if self.hub.now_s < node.busy_until_s:
            return False
        busy = False

        def step() -> None:
            nonlocal busy
            busy = node.engine.step()

        self.act(node, step)
        return busy

    # -- what moves are made of --------------------------------------------------------------------------------------

    def _send_legs(self, transfer: Transfer, dice: Dice, *, new: bool = True) -> None:
        if new:
            self.transfers.append(transfer)
        legs = [Leg(transfer, "prefill"), Leg(transfer, "decode")]
        if dice.below(2):
            legs.reverse()
        self.pending.extend(legs)

    def _dispatch(self, leg: Leg) -> None:
        """A worker reads a leg, and may refuse it; then the router tells the other one."""
        transfer = leg.transfer
        node = self.nodes[transfer.prefill if leg.role == "prefill" else transfer.decode]
        if not node.runs:
            self._lose(leg, tell=True)
            return
        cached = transfer.prefill_cached if leg.role == "prefill" else transfer.decode_cached
        request = Request(transfer.transfer_id, transfer.number, transfer.num_tokens, cached, transfer.chunk)
        address = self.nodes[transfer.prefill].address
        self._acting = node
        try:
            node.submit(request, address, recompute=transfer.recompute)
        except PdlinkError:
            self._acting = None
            if transfer.transfer_id not in node.engine.requests:
                self._lose(leg, tell=True)
        finally:
            self._acting = None

    def _lose(self, leg: Leg, *, tell: bool) -> None:
        transfer = leg.transfer
        transfer.disturbed = True
        other = self.nodes[transfer.decode if leg.role == "prefill" else transfer.prefill]
        if not tell or not other.runs:
            return
        if leg.role == "prefill":
            self.act(other, lambda: other.endpoint.receiver.cancel(transfer.transfer_id, Reason(Code.REQUEST_FAILED)))
        else:
            other.engine.abort(transfer.transfer_id)

    def _crash(self, node: Node, *, lose: bool) -> None:
        node.alive = node.stopped = False
        self.hub.kill(node.transport)
        self.network.crash(node.port, lose=lose)

    def _restart(self, index: int) -> None:
        self.num_lives += 1
        old = self.nodes[index]
        self.nodes[index] = self._start(old.name, old.role, self.num_lives, self.speeds[index])

    def _start(self, name: str, role: str, life: int, speed: float) -> Node:
        roomy, jumps = self.profile == "gentle", self.profile in JUMPING
        return Node(
            self.hub,
            self.network,
            name,
            role,
            life,
            speed,
            self.tracked,
            roomy=roomy,
            jumps=jumps,
            hybrid=self.hybrid,
            idle=self.idle,
        )

    def _resume(self, node: Node) -> None:
        node.stopped = False
        self.hub.resume(node.transport)

    # -- to the end --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Everything that is under way arrives, the leases run out, the sessions end: nothing may be left."""
        for node in self.nodes:
            if node.stopped:
                self._resume(node)
        self.network.doomed, self.hub.fail_next = b"", 0
        for node in self.nodes:
            node.port.full = False
        while self.pending:
            if self.profile == "gentle":
                self._dispatch(self.pending.pop(0))
            else:
                self._lose(self.pending.pop(0), tell=False)
        busy_s = max(0.0, max(node.busy_until_s for node in self.nodes) - self.hub.now_s)
        # Engines compute one request after the other, so each leg has this long after the one before it ended.
        # request_s is longer: no transfer needs it to end.
        longest_s = busy_s + TIMEOUTS.lease_s + 3 * TIMEOUTS.peer_s
        idle_s, num_open = 0.0, self._num_open_legs()
        while self._left() and idle_s * min(self.speeds) < longest_s:
            self.calm()
            self.check()
            num_before, num_open = num_open, self._num_open_legs()
            idle_s = 0.0 if num_open < num_before else idle_s + STEP_S
        if left := self._left():
            raise Violation(f"after everything has run out there is left: {left}")
        self._check_outcomes()
        self._end_sessions()

    def _num_open_legs(self) -> int:
        return sum(len(node.open_legs) for node in self.nodes if node.alive)

    def _left(self, *, sessions: bool = False) -> dict[str, int]:
        """What is not zero yet. sessions: also of what stays as long as they do."""
        return {
            f"{node.name}.{name}": count
            for node in self.nodes
            if node.alive
            for name, count in {**node.gauges(), **(node.session_gauges() if sessions else {})}.items()
            if count
        }

    def _check_outcomes(self) -> None:
        for node in self.nodes:
            if node.alive:
                node.engine.pool.check()
        if self.profile != "gentle":
            return
        for transfer in self.transfers:
            decode = self.nodes[transfer.decode]
            reason, end = decode.reasons.get(transfer.transfer_id, ""), decode.engine.ended.get(transfer.transfer_id)
            if not transfer.disturbed and reason not in _LATE and end != "kv":
                raise Violation(f"{transfer.transfer_id}: nobody stopped it, but it was not delivered: {reason}")

    def _end_sessions(self) -> None:
        """Half of the workers vanish without a word, the others notice; then these leave. No trace may stay."""
        for node in self.nodes[::2]:
            if node.alive:
                self._crash(node, lose=True)
        if self.profile == "gentle":
            self.profile = "ended"
        for _ in range(int(2 * TIMEOUTS.peer_s / STEP_S / min(self.speeds))):
            self.calm()
            gone = self._peers_that_are_gone()
            if not gone:
                break
        if gone:
            raise Violation(f"sessions with workers that are gone: {gone}")
        for node in self.running:
            self.act(node, node.endpoint.leave)
        for _ in range(4):
            self.calm()
            left = self._left(sessions=True)
            if not left:
                break
        if left:
            raise Violation(f"after the sessions have ended there is left: {left}")

    def _peers_that_are_gone(self) -> dict[str, list[Peer]]:
        lives = {node.endpoint.epoch for node in self.running}
        gone = {
            node.name: [peer for peer in node.endpoint.peers() if peer.epoch not in lives] for node in self.running
        }
        return {name: peers for name, peers in gone.items() if peers}
