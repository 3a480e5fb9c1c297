"""The deadlines that an operator sets; `pdlink.protocol.deadlines` makes the others of them."""

from __future__ import annotations

from pydantic import Field, model_validator

from pdlink.config.section import Seconds, Section

LEASES_PER_PEER = 10 / 3
"""A lease holds for so many `peer_s`: a peer that is only slow is lost before its promises end."""


class TimeoutConfig(Section):
    """How long this process waits for others."""

    peer_s: Seconds = 3.0
    """A peer that has not been heard for this long is lost. Other deadlines follow from it: a heartbeat every twelfth
    of it, 5/3 of it for a handshake, 10/3 for a promise about memory (lease)."""
    other_leg_s: Seconds = 10.0
    """How long a leg whose transfer the other leg has not begun waits for it, at most for a lease."""
    request_s: Seconds = 600.0
    """One request on one worker."""
    idle_s: float = Field(default=600.0, ge=0)
    """A session in which nothing was received for so long is closed by the side that dialed it, with its connections;
    the next request opens another one. 0 keeps all."""
    drain_s: Seconds = 10.0
    """How long a worker that was told to stop lets running requests finish."""

    @model_validator(mode="after")
    def _ordered(self) -> TimeoutConfig:
        if self.peer_s * LEASES_PER_PEER >= self.request_s:
            raise ValueError(
                f"timeouts.peer_s = {self.peer_s} s makes leases of {self.peer_s * LEASES_PER_PEER:g} s, which must "
                f"be below timeouts.request_s = {self.request_s} s"
            )
        if 0 < self.idle_s < self.peer_s:
            raise ValueError(
                f"timeouts.idle_s = {self.idle_s} s must be 0, or at least timeouts.peer_s = {self.peer_s} s"
            )
        return self


class PatientTimeouts(TimeoutConfig):
    """The same table with another default, because processes of vLLM and SGLang are many and large.

    Forward passes do not hold the GIL, but the whole process may wait for a core: heartbeats of vLLM's worker were
    1.3 s late at a load of 16 on 2 cores, those of a small process 0.2 s. A process that has ended is noticed by its
    connections at once; only a host that vanished or stands still takes `peer_s`, and a false alarm costs a prompt.
    """

    peer_s: Seconds = 10.0
    """A peer that has not been heard for this long is lost. Other deadlines follow from it: a heartbeat every twelfth
    of it, 5/3 of it for a handshake, 10/3 for a promise about memory (lease)."""
