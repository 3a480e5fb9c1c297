"""Events, actions and outcomes of a request's flow (`flow.py`)."""

from __future__ import annotations

import enum
from operator import attrgetter
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec


class Word(enum.Enum):
    """Enum's own hash and value are written in Python, and each request asks for them some thirty times."""

    __hash__ = object.__hash__  # members are single objects
    if not TYPE_CHECKING:
        value = property(attrgetter("_value_"))


class Leg(Word):
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Leg:
        return Leg.DECODE if self is Leg.PREFILL else Leg.PREFILL


PREFILL: Final = Leg.PREFILL
DECODE: Final = Leg.DECODE
"""What every request passes uses these, some thirty times: CPython 3.11 takes 65 ns to read `Leg.DECODE`, whose class
has a `__getattr__` written in Python, and 4 for a global."""


class Loss(Word):
    """How a leg ends without an answer."""

    CONNECT = "connect"
    """No connection: refused, unreachable or not in time."""
    RESET = "reset"
    """The connection broke before or in the middle of the answer."""
    STALE = "stale"
    """A pooled connection broke before any byte of the answer: probably the worker closed it as idle."""
    TIMEOUT = "timeout"
    MALFORMED = "malformed"
    """The worker's answer is invalid."""
    DIVERGED = "diverged"
    """It answers in other words than the worker before it: either may be right."""
    ERROR = "error"
    """It sent an error in the middle of a stream."""
    BARRED = "barred"
    """The worker refuses this proxy's key."""
    MISPAIRED = "mispaired"
    """Decode may not connect to this prefill worker."""
    LOCAL = "local"
    """This process is out of sockets or ports; the worker is not to blame."""


class Placed(msgspec.Struct, frozen=True):
    """Workers for the attempt; no prefill means that decode works alone."""

    prefill: str | None
    decode: str


class Unplaced(msgspec.Struct, frozen=True):
    """No worker can take the request now."""

    message: str
    barred: bool = False
    """The workers that could serve it refuse this proxy's key."""
    full: bool = False
    """Too many others wait."""
    unfit: bool = False
    """No worker of this kind could ever serve it."""


class Waits(msgspec.Struct, frozen=True):
    """The request waits for a worker. Placed or Unplaced follows, if it does not give up before."""

    message: str
    until_s: float


class Chunk(msgspec.Struct, frozen=True):
    """Bytes of a leg's event stream."""

    attempt: int
    leg: Leg
    data: bytes


class Ended(msgspec.Struct, frozen=True):
    """A leg's event stream ended properly."""

    attempt: int
    leg: Leg
    data: bytes = b""
    """Its last bytes: as those of a `Chunk`."""


class Answered(msgspec.Struct, frozen=True):
    """A leg's whole answer: to a request that does not stream, or with a status that is not 2xx."""

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
    """The client has closed its connection."""


class Tick(msgspec.Struct, frozen=True):
    """`Flow.deadline_s` may have passed."""


class ShuttingDown(msgspec.Struct, frozen=True):
    """The drain time is over."""


Event: TypeAlias = Placed | Unplaced | Waits | Chunk | Ended | Answered | Lost | ClientLeft | Tick | ShuttingDown


class Why(Word):
    """The reason of an attempt."""

    FIRST = "first"
    RETRY = "retry"
    RESEND = "resend"
    """After a stale connection; costs no retry."""
    RECOVER = "recover"
    """A stream goes on behind what the client has."""


class Place(msgspec.Struct, frozen=True):
    """Choose workers for a new attempt and report Placed, Unplaced or Waits. avoid: workers to take only if there are
    no others, and prefill workers among them only if decode may not serve the request alone."""

    why: Why
    avoid: frozenset[str]
    alone: bool = False
    """Decode must serve it alone."""


FIRST = Place(Why.FIRST, frozenset())
"""With its answer the flow of a request begins."""


class StartLegs(msgspec.Struct, frozen=True):
    """Make a transfer id and send both legs at once; only prefill's if decode's follows it."""

    attempt: int
    prefill: str | None
    decode: str
    at_once: bool = True


class StartDecode(msgspec.Struct, frozen=True):
    """Send decode's leg, after prefill's answer."""

    attempt: int
    params: bytes
    """What it is sent as `kv_transfer_params`, in JSON."""


class CancelLeg(msgspec.Struct, frozen=True):
    """Close the leg's connection now; the worker aborts."""

    attempt: int
    leg: Leg


class BlameLeg(msgspec.Struct, frozen=True):
    """Count and log that the leg failed. Comes before its CancelLeg, and before the Place that follows from it."""

    attempt: int
    leg: Leg
    reason: Loss | int
    """A kind of loss, or its worker's status."""
    detail: str = ""
    """For the log only: clients do not see a worker's texts."""
    then: str = ""
    """How the request goes on."""


class LetGo(msgspec.Struct, frozen=True):
    """The leg is not needed any more, and should end by itself in a moment: close its connection only if it does
    not."""

    attempt: int
    leg: Leg


class TellToStop(msgspec.Struct, frozen=True):
    """Tell the leg's worker that the other leg failed."""

    attempt: int
    leg: Leg
    reason: str


class Forward(msgspec.Struct, frozen=True):
    """Send bytes to the client; the first ones begin the answer."""

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
    Place | StartLegs | StartDecode | CancelLeg | BlameLeg | LetGo | TellToStop | Forward | Respond | EndStream
)


class Outcome(Word):
    """How a request ended, for the client and the metrics."""

    OK = "ok"
    REJECTED = "rejected"
    FAILED = "failed"
    BROKEN = "broken"
    """A stream that ended with an error after some of the answer was sent."""
    CLIENT_LEFT = "client_left"
    UNAVAILABLE = "unavailable"
    """No worker to send it to."""
