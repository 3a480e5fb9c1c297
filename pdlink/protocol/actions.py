"""What a machine asks its driver to do. Machines return lists of these and do nothing themselves."""

from __future__ import annotations

import msgspec

from pdlink.protocol.messages import Body  # noqa: TC001  (msgspec reads the annotation at run time)


class Send(msgspec.Struct, frozen=True):
    """Send this to the peer of the transfer; without one (nobody expected it yet) there is nobody to tell."""

    body: Body


class Push(msgspec.Struct, frozen=True):
    """Copy tokens [start, end) of one layer; report the end with `landed(push_id)` or `lost(push_id)`."""

    push_id: int
    layer: int
    start: int
    end: int


class Deliver(msgspec.Struct, frozen=True):
    """All KV of the transfer is in the offered blocks: the request can run."""

    first_token: int


class Fail(msgspec.Struct, frozen=True):
    """The transfer will not succeed. The request may fall back now; its blocks stay held until `End`."""

    reason: str


class FencePeer(msgspec.Struct, frozen=True):
    """The other side did not say that it is quiet in time: close the data connection to it."""

    reason: str


class End(msgspec.Struct, frozen=True):
    """Terminal, exactly once: nothing touches the blocks of this transfer any more; give them back."""

    reason: str
    """Empty for success."""


Action = Send | Push | Deliver | Fail | FencePeer | End
