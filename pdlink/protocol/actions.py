"""What a machine asks its driver to do. Machines return lists of these and do nothing themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdlink.protocol.messages import Body


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to the peer of the transfer; without one (nobody expected it yet) there is nobody to tell."""

    body: Body


@dataclass(frozen=True, slots=True)
class Push:
    """Copy tokens [start, end) of one layer; report the end with `landed(push_id)` or `lost(push_id)`."""

    push_id: int
    layer: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """All KV of the transfer is in the offered blocks: the request can run."""

    first_token: int
    finished: bool


@dataclass(frozen=True, slots=True)
class Fail:
    """The transfer will not succeed. The request may fall back now; its blocks stay held until `End`."""

    reason: str


@dataclass(frozen=True, slots=True)
class FencePeer:
    """The other side did not say that it is quiet in time: close the data connection to it."""

    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """Terminal, exactly once: nothing touches the blocks of this transfer any more; give them back."""

    reason: str
    """Empty for success."""


Action = Send | Push | Deliver | Fail | FencePeer | End
