"""`Transport`: the contract between the endpoint, which plans copies, and the code that moves the bytes.

One side *invites* a peer to write into its registered buffers; the peer *connects* with that invitation and
*submits* batches of byte runs. `poll()` reports all later occurrences, and `fileno()` is readable when there is one.

Two promises hold for every transport; the state machines rest on them and `tests/conformance` tests them:
  1. `BatchDone` with `BatchStatus.OK` is reported only when the bytes are visible at the destination.
  2. `PeerClosed` is reported only when the fence holds: nothing that the peer started can touch our memory any more,
     and this side will write nothing more of its batches that were not reported OK (an owner that places bytes
     itself, out of slots, may do so until it closes the peer, too). Closing never blocks: if the
     fence must wait (for a suspended process in the middle of a copy), the report comes later, and until then the
     blocks that the peer may write are quarantined.

Every submitted batch is reported exactly once. A peer fails as a whole: after `PeerFailed` its open batches are
reported with an error, new ones are refused, and only `close_peer` and a new invitation help.
Every method may be called from any thread and returns without waiting for the network; `connect` of a transport that
`connects_aside` may wait for the peer.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

import msgspec

from pdlink.capabilities import Capabilities
from pdlink.errors import ProtocolError, TransportUnavailable
from pdlink.kv.layout import RunList as RunList  # noqa: TC001 (exported from here, too)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink._copy import PeerMemory
    from pdlink.capabilities import MemoryKind, Reach, Trust
    from pdlink.config import TransportConfig
    from pdlink.kv.groups import KVGroups
    from pdlink.kv.plan import Plan
    from pdlink.memory.buffers import AnyBuffer


class NotBuilt(TransportUnavailable):
    """This installation was built without the transport."""


@dataclass(frozen=True, slots=True)
class Site:
    memory: MemoryKind = "host"
    """Where its KV is."""
    device_index: int = 0
    """Number of the GPU, if it is on one."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    advertise_host: str | None = None
    """Address that others reach it by; None for `host`."""
    this_host_only: bool = True
    """Other hosts must not reach it."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a transport can work on this machine, and if not, why and what would help."""

    transport: str
    ok: bool
    reason: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    """What `pdlink check` prints: versions, library paths, limits."""


class BatchStatus(enum.Enum):
    OK = "ok"
    TIMEOUT = "timeout"
    PEER_FAILED = "peer_failed"
    CANCELLED = "cancelled"


class BatchDone(msgspec.Struct, frozen=True, gc=False):
    """The one report of a batch."""

    ticket: int
    peer: str
    status: BatchStatus
    nbytes: int
    submitted_s: float
    done_s: float
    """time.monotonic seconds."""
    detail: str = ""


class PeerFailed(msgspec.Struct, frozen=True, gc=False):
    """The data connection to this peer is unusable; call `close_peer` and connect anew."""

    peer: str
    reason: str


class PeerClosed(msgspec.Struct, frozen=True, gc=False):
    """Reported once after each `close_peer`, when promise 2 holds."""

    peer: str


class TransportNote(msgspec.Struct, frozen=True, gc=False):
    """A note to be brought to the same transport at the peer's, in order (`Transport.heard`)."""

    peer: str
    data: bytes


Occurrence = BatchDone | PeerFailed | PeerClosed | TransportNote


class Transport(ABC):
    """One way to move bytes. A constructor only stores; `open()` acquires; `close()` is safe twice.

    The class attributes say what it is; a line in `choice.TRANSPORTS` lets workers use it.
    """

    name: ClassVar[str]
    """In the handshake, in reports."""
    kind: ClassVar[str]
    """In the settings: `transport.kind`, and the section with its own settings, if it has any."""
    reach: Reach
    memory: tuple[MemoryKind, ...]
    trust: Trust
    connects_aside: ClassVar[bool] = False
    """Whether `connect` may ask the peer, or take long: the endpoint calls it in a thread of its own."""
    follows_events: ClassVar[bool] = False
    """Whether `submit_plan` takes events."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(self.name, self.reach, self.memory, self.trust)

    @classmethod
    def configured(cls, config: TransportConfig, site: Site) -> Self:  # noqa: ARG003
        """One with these settings."""
        return cls()

    @classmethod
    def last_resort(cls, config: TransportConfig, site: Site) -> bool:  # noqa: ARG003
        """Whether every other one that works here is better."""
        return False

    @abstractmethod
    def probe(self) -> Probe:
        """Whether this transport can work on this machine. Cheap, has no lasting effect, never raises."""

    @abstractmethod
    def open(self) -> None:
        """Acquire threads and descriptors.

        Raises TransportUnavailable with the reason of `probe()`, and for a transport that was closed.
        """

    @abstractmethod
    def register(self, buffer: AnyBuffer) -> int:
        """Make a buffer usable as source and, for invited peers, as destination; returns its region index (0, 1, …).

        The buffer must outlive the transport. Costs page pinning on RDMA: call once per pool, not per request.
        Raises TransportUnavailable for memory that it cannot move.
        """

    @property
    def no_invitations(self) -> str:
        """Why no peer can be invited to write into what is registered; empty if one can. Sending is not affected."""
        return ""

    def guard(self, groups: KVGroups) -> None:  # noqa: B027  (see the table in docs/security.md)
        """From now on a peer may write only to blocks that are open to it, where this transport can hold that.

        groups: in the buffers registered by now. Once, before anybody is invited. Without it, an invited peer may
        write to all of every region; a staged lane refuses every slot.
        """

    def open_blocks(self, peer: str, blocks: Sequence[Sequence[int]]) -> None:  # noqa: B027
        """Let an invited peer write to these blocks, a list for each group of layers.

        A block that is open to somebody else is so no longer.
        """

    def close_blocks(self, peer: str, blocks: Sequence[Sequence[int]]) -> None:  # noqa: B027
        """The reverse. When this returns, nothing of the peer is being placed there. Unknown peers are ignored.

        Raises TransportFailure if that cannot be said soon: then PeerClosed says it, after `close_peer`.
        """

    @abstractmethod
    def invite(self, peer: str) -> bytes:
        """Open our registered buffers to `peer` and return what it must pass to its `connect()`.

        peer: unique per connection (name, epoch and session); a name is never used twice.
        Raises TransportFailure if it cannot be now (no descriptor left), ProtocolError for a name in use,
        TransportUnavailable if no buffer is registered.
        """

    @abstractmethod
    def connect(self, peer: str, invitation: bytes) -> None:
        """Start connecting to the memory a peer opened to us. Returns at once; batches may be submitted right away.

        Raises ProtocolError for an invitation that cannot be read and for a name in use, TransportFailure for one
        that cannot work from here (another host, another UCX) or now. Nothing else: an invitation is a stranger's
        word. A connection that fails later is reported as PeerFailed.
        """

    @abstractmethod
    def submit(self, peer: str, lists: Sequence[RunList], timeout_s: float) -> int:
        """Copy every run of every list from our memory into the peer's; returns the ticket of the batch.

        One native call whatever the number of runs. The runs are copied before it returns. Bytes land in any order:
        of runs that meet at the destination, in one batch or in two open ones, either may be the last. A batch that
        is not done within `timeout_s` fails the peer. Raises ValueError for a run outside its region on either side
        (checked before anything is written), and of a lane that takes plans only; TransportFailure if the peer is
        failed, closed or unknown.
        """

    def submit_plan(
        self, peer: str, plan: Plan, layers: range, timeout_s: float, after: Sequence[tuple[int, int]] = ()
    ) -> int:
        """As `submit`, of these layers of a plan.

        after: where `follows_events`, events that the GPU waits for before it reads, each with the stream it was
        recorded in. Batches that wait hold up no others; `timeout_s` counts from when all are reached. An event must
        stay as it is until the batch is reported.
        """
        return self.submit(peer, plan.run_lists(layers.start, len(layers)), timeout_s)

    def heard(self, peer: str, data: bytes) -> None:
        """A note of this peer's, once both sides are ready. Raises ProtocolError, which costs the session."""
        raise ProtocolError(f"{self.name}: got a note of {len(data)} bytes from {peer}; it has none")

    @abstractmethod
    def poll(self) -> list[Occurrence]:
        """What happened since the last call, in order of happening per peer. Never waits.

        Call it several times a second: a transport without a thread works, and looks at its deadlines, here.
        """

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable while `poll()` has something to say. Do not read from it."""

    @abstractmethod
    def lane(self, peer: str) -> str:
        """How bytes to this peer really travel ("mapped", "cma", "tcp", "rc_mlx5"); "" while not yet known."""

    def memory_of(self, peer: str) -> PeerMemory | None:  # noqa: ARG002  (most cannot)
        """The regions of a peer that we are connected to, for one who stores there himself; None: only `submit` can.

        Raises TransportFailure as `submit`.
        """
        return None

    def computing(self, on: bool) -> None:  # noqa: B027  (most have nothing to do)
        """This process begins (on) or ends a prefill computation; meanwhile use no other core. Cheap."""

    @abstractmethod
    def close_peer(self, peer: str) -> None:
        """End both directions with this peer: what it was invited to, and what we submitted to it.

        Open batches are reported CANCELLED (or OK if they had landed); then PeerClosed. Unknown peers are ignored.
        """

    @abstractmethod
    def close(self) -> None:
        """Close every peer and release everything, within two seconds. Safe to call twice."""
