"""Everything about one transfer on its sender, in one object: forgetting the transfer is dropping this."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.endpoint.order import Backlog
    from pdlink.endpoint.peer import Peer
    from pdlink.endpoint.pushing import Job
    from pdlink.kv.plan import Plan
    from pdlink.protocol.leases import Lease
    from pdlink.protocol.messages import Checksum
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
    """Its parts that wait for their turn, from the first push on."""
    plans: dict[tuple[int, int], Plan] = field(default_factory=dict)
    """Byte runs by token range: every layer of a chunk uses the same."""
    checksums: list[Checksum] = field(default_factory=list)
    nbytes: int = 0
    """Landed so far."""
    first_landed_s: float | None = None
    finished_s: float | None = None
    """When prefill ended, on the clock of an awake loop."""

    @property
    def transfer_id(self) -> str:
        return self.machine.transfer_id
