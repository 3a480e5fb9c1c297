"""What a machine asks its driver to do. Machines return lists of these and do nothing themselves.

Values without cycles, and a dozen per transfer: the garbage collector leaves them out.
"""

from __future__ import annotations

import msgspec

from pdlink.protocol.messages import Body, Offer  # noqa: TC001  (msgspec reads the annotations at run time)
from pdlink.reasons import Reason  # noqa: TC001


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send this to the peer of the transfer; ignored before a peer has shown interest."""

    body: Body


class Push(msgspec.Struct, frozen=True, gc=False):
    """Copy positions [start, end) of some layers; report the end with `landed`, `dropped` or `lost(push_id)`.

    The transport gets all of it in one call.
    """

    push_id: int
    layers: range
    """Of one group."""
    start: int
    end: int
    nbytes: int
    blocks: tuple[int, ...]
    """The source: blocks of the sender for the layers' group, from token 0 on."""
    offer: Offer
    """The destination: `offer.blocks[group]`, the first of which holds position `first`."""
    group: int = 0
    first: int = 0


class Deliver(msgspec.Struct, frozen=True, gc=False):
    """All KV of the transfer is in the offered blocks: the request can run."""

    first_token: int


class DeliverLayer(msgspec.Struct, frozen=True, gc=False):
    """The KV of one layer is in the offered blocks, from the first offered token up to token `end`."""

    layer: int
    end: int
    first_token: int | None
    """Of the answer, once the sender has sampled it."""


class Fail(msgspec.Struct, frozen=True, gc=False):
    """The transfer will not succeed. The request may fall back now; its blocks stay held until `End`."""

    reason: Reason


class FencePeer(msgspec.Struct, frozen=True, gc=False):
    """*quiet* did not come in time: close the data connection to the peer."""

    reason: Reason


class End(msgspec.Struct, frozen=True, gc=False):
    """Terminal, exactly once: nothing touches the blocks of this transfer any more; give them back."""

    reason: Reason | None
    """None after success."""


Action = Send | Push | Deliver | DeliverLayer | Fail | FencePeer | End
