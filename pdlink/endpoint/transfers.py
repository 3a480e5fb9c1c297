"""`Outgoing` and `Incoming`: everything about one transfer on its sender and its receiver, in one object each.

`Sender` and `Receiver` find them by transfer id; the session of their peer holds them, too, and ends them with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.endpoint.order import Backlog
    from pdlink.endpoint.peer import Peer
    from pdlink.endpoint.pushing import Job
    from pdlink.kv.plan import Plan
    from pdlink.protocol.leases import Lease
    from pdlink.protocol.messages import Checksum
    from pdlink.protocol.receiving import Receiving
    from pdlink.protocol.sending import Sending


@dataclass(slots=True, eq=False)
class Outgoing:
    machine: Sending
    on_failed: Callable[[str], None]
    on_end: Callable[[], None]
    on_receiver: Callable[[], None]
    lease: Lease
    """How long its KV is kept; held by `peer` once there is one."""
    started_s: float
    peer: Peer | None = None
    """The receiver, once it has shown interest."""
    backlog: Backlog[Job] | None = None
    """Its waiting parts, from the first push on."""
    plans: dict[tuple[int, int], Plan] = field(default_factory=dict)
    """Byte runs by token range: every layer of a chunk uses the same."""
    checksums: list[Checksum] = field(default_factory=list)
    nbytes: int = 0
    """Landed so far."""
    first_landed_s: float | None = None
    finished_s: float | None = None
    """When prefill ended (`Clock.awake_s`)."""

    @property
    def transfer_id(self) -> str:
        return self.machine.transfer_id


class ReceiveHandler(Protocol):
    """Called about one transfer, in the endpoint's thread."""

    def ready(self, first_token: int) -> None:
        """All KV is in the offered blocks."""

    def failed(self, reason: str) -> None:
        """The KV will not come. Fall back now; the offered blocks are quarantined until `released`."""

    def released(self) -> None:
        """Exactly once, after `ready` or `failed`: nothing can write to the offered blocks any more."""


@dataclass(slots=True, eq=False)
class Incoming:
    machine: Receiving
    peer: Peer
    handler: ReceiveHandler
    started_s: float
    deadline_s: float
    """The transfer fails then (`Clock.awake_s`)."""
    on_landed: Callable[[int, int, int | None], None] | None = None
    verifying: bool = False
    """Whether *done* has come, and its checksums are being compared."""

    @property
    def transfer_id(self) -> str:
        return self.machine.transfer_id
