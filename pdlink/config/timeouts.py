"""Every deadline of a worker, in one table."""

from __future__ import annotations

from pydantic import Field, model_validator

from pdlink.config.section import Seconds, Section


class TimeoutConfig(Section):
    """One table of deadlines: heartbeat < peer < lease < request < proxy, checked at start."""

    heartbeat_s: Seconds = 0.25
    """Time between two signs of life to a peer."""
    peer_s: Seconds = 3.0
    """A peer that has not been heard for this long is lost."""
    connect_s: Seconds = 5.0
    """Handshake, from the first message to the data connection."""
    lease_s: Seconds = 10.0
    """How long a promise about memory holds without a sign of life from the other side."""
    other_leg_s: Seconds = 10.0
    """How long a leg whose transfer the other leg has not begun waits for it; `lease_s`, if that is less. Both leave
    the proxy at once, so what counts is how unlike the two servers' queues in front of the engine are."""
    offer_s: Seconds = 5.0
    """While requests wait for blocks here, a finished prompt whose receiver offers nothing for this long is given up,
    so that two full workers that hold what the other waits for do not stand still; decode falls back."""
    request_s: Seconds = 600.0
    """One request on one worker."""
    idle_s: float = Field(default=600.0, ge=0)
    """A session in which nothing was received for so long is closed by the side that dialed it, with its connections;
    the next request opens another one. 0 keeps all."""
    drain_s: Seconds = 10.0
    """How long a worker that was told to stop lets running requests finish."""

    @model_validator(mode="after")
    def _ordered(self) -> TimeoutConfig:
        table = [("heartbeat_s", self.heartbeat_s), ("peer_s", self.peer_s), ("lease_s", self.lease_s)]
        table.append(("request_s", self.request_s))
        for (name, value), (later, limit) in zip(table, table[1:], strict=False):
            if value >= limit:
                raise ValueError(f"timeouts.{name} = {value} s must be below timeouts.{later} = {limit} s")
        if 0 < self.idle_s < self.peer_s:
            raise ValueError(
                f"timeouts.idle_s = {self.idle_s} s must be 0, or at least timeouts.peer_s = {self.peer_s} s"
            )
        return self


class PatientTimeouts(TimeoutConfig):
    """The same table with other defaults, because processes of vLLM and SGLang are many and large.

    Forward passes do not hold the GIL, but the whole process may wait for a core: heartbeats of vLLM's worker were
    1.3 s late at a load of 16 on 2 cores, those of a small process 0.2 s. A process that has ended is noticed by its
    connections at once; only a host that vanished or stands still takes `peer_s`, and a false alarm costs a prompt.
    """

    peer_s: Seconds = 10.0
    """A peer that has not been heard for this long is lost."""
    connect_s: Seconds = 10.0
    """Handshake, from the first message to the data connection."""
    lease_s: Seconds = 30.0
    """How long a promise about memory holds without a sign of life from the other side."""
