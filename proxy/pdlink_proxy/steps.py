"""What goes into the flow of a request, what comes out, and how it can end. `flow.py` says which follows which."""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec


class Leg(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class Loss(enum.Enum):
    """How a leg ends without an answer."""

    CONNECT = "connect"
    """No connection: refused, unreachable or not in time."""
    RESET = "reset"
    """The connection broke while the answer was awaited or half here."""
    STALE = "stale"
    """A pooled connection broke before any byte of the answer: most likely the worker had closed it as idle."""
    TIMEOUT = "timeout"
    MALFORMED = "malformed"
    """The worker answered something that is no answer."""
    ERROR = "error"
    """It sent an error where a stream should have gone on."""
    BARRED = "barred"
    """The worker does not let this proxy in."""
    MISPAIRED = "mispaired"
    """Decode must not connect to this prefill worker."""
    LOCAL = "local"
    """This process is out of sockets or ports; the worker is not to blame."""


class Started(msgspec.Struct, frozen=True):
    """The client's request is here."""


class Placed(msgspec.Struct, frozen=True):
    """Workers for the attempt that was asked for; no prefill means that decode works alone."""

    prefill: str | None
    decode: str


class Unplaced(msgspec.Struct, frozen=True):
    """No worker can take the request now."""

    message: str
    barred: bool = False
    """The workers that could serve it do not let this proxy in."""


class Chunk(msgspec.Struct, frozen=True):
    """Bytes of a leg's event stream."""

    attempt: int
    leg: Leg
    data: bytes


class Ended(msgspec.Struct, frozen=True):
    """A leg's event stream ended as HTTP says it should."""

    attempt: int
    leg: Leg


class Answered(msgspec.Struct, frozen=True):
    """A leg's whole answer: any answer to a request that does not stream, otherwise one that is not 2xx."""

    attempt: int
    leg: Leg
    status: int
    body: bytes
    content_type: str = "application/json"


class Lost(msgspec.Struct, frozen=True):
    """A leg ended without an answer."""

    attempt: int
    leg: Leg
    loss: Loss
    detail: str


class ClientLeft(msgspec.Struct, frozen=True):
    """Nobody reads any more."""


class Tick(msgspec.Struct, frozen=True):
    """`Flow.deadline_s` may have passed."""


class ShuttingDown(msgspec.Struct, frozen=True):
    """The time that running requests were given to finish is over."""


Event: TypeAlias = Started | Placed | Unplaced | Chunk | Ended | Answered | Lost | ClientLeft | Tick | ShuttingDown


class Why(enum.Enum):
    """What an attempt is made for."""

    FIRST = "first"
    RETRY = "retry"
    RESEND = "resend"
    """After a stale connection; costs no retry."""


class Place(msgspec.Struct, frozen=True):
    """Choose workers for a new attempt and report Placed or Unplaced. avoid: workers to take only if there are no
    others, and prefill workers among them only if decode may not serve the request alone."""

    why: Why
    avoid: frozenset[str]
    alone: bool = False
    """Decode is to serve it alone."""


class StartLegs(msgspec.Struct, frozen=True):
    """Make a transfer id and send both legs, neither waiting for the other; only prefill's if decode is to follow."""

    attempt: int
    prefill: str | None
    decode: str


class StartDecode(msgspec.Struct, frozen=True):
    """Send decode's leg, which has waited for prefill's answer."""

    attempt: int
    params: bytes
    """What it is sent as `kv_transfer_params`, in JSON."""


class CancelLeg(msgspec.Struct, frozen=True):
    """Close the leg's connection now; the worker takes that as an abort."""

    attempt: int
    leg: Leg


class Blame(msgspec.Struct, frozen=True):
    """Count and log that the leg failed. Comes before the Place that it leads to."""

    attempt: int
    leg: Leg
    reason: Loss | int
    """A kind of loss, or the status that its worker answered."""
    detail: str = ""
    """For the log; clients are not told what a worker sent."""
    then: str = ""
    """What becomes of the request."""


class LetGo(msgspec.Struct, frozen=True):
    """Nobody needs the leg any more, but it is expected to end by itself in a moment: close its connection only if it
    does not."""

    attempt: int
    leg: Leg


class TellToStop(msgspec.Struct, frozen=True):
    """Tell the leg's worker that the other side of its transfer will not come."""

    attempt: int
    leg: Leg
    reason: str


class Forward(msgspec.Struct, frozen=True):
    """Send bytes to the client, beginning the answer if these are the first."""

    data: bytes


class Respond(msgspec.Struct, frozen=True):
    """The whole answer to the client. Final."""

    status: int
    body: bytes
    content_type: str = "application/json"


class EndStream(msgspec.Struct, frozen=True):
    """Send these last bytes and end the client's stream. Final."""

    data: bytes


Action: TypeAlias = (
    Place | StartLegs | StartDecode | CancelLeg | Blame | LetGo | TellToStop | Forward | Respond | EndStream
)


class Outcome(enum.Enum):
    """How a request ended, for the client and the metrics."""

    OK = "ok"
    REJECTED = "rejected"
    FAILED = "failed"
    BROKEN = "broken"
    """A stream that ended with an error after some of the answer was sent."""
    CLIENT_LEFT = "client_left"
    UNAVAILABLE = "unavailable"
    """No worker to send it to."""
