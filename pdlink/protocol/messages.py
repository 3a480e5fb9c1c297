"""All messages of the control connection: tagged, versioned msgspec structs in MessagePack.

A frame is an `Envelope`: its sender and the sender's life (`src`, `src_epoch`), the life of the other side that it is
for (`dst_epoch`), its session and its number in the session. It carries all bodies of one turn: the structs below,
distinguished by their tags. A field with a default may be added without a new version; a new kind or a changed
meaning needs one (`docs/wire.md`).

The *dialer* is the worker that opened the control connection, always the receiver of KV; the *listener* is the
worker that sends KV.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from pdlink.capabilities import Capabilities, MemoryKind  # noqa: TC001
from pdlink.errors import ProtocolError
from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import KVLayout  # noqa: TC001  (msgspec reads the annotation at run time)

if TYPE_CHECKING:
    from pdlink.reasons import Reason

VERSION = 4
MAX_FRAME_NBYTES = 4 * 2**20
"""ZeroMQ refuses larger frames unread; an offer of 800,000 blocks fits. A peer can make us hold this times the length
of a queue."""
MAX_HELLO_NBYTES = 2**20
"""Of a frame from a peer without a session: longer ones are dropped undecoded. A layout of 40,000 parts fits: vLLM's
attention on CPUs has two a layer and element of a head vector, 32,256 with 126 layers of 128."""
MAX_BODIES = 1000
"""In one frame, which is handled under one lock."""
MAX_GROUPS = 256
"""Of layers in one cache."""

Name = Annotated[str, msgspec.Meta(max_length=256)]
TransferId = Annotated[str, msgspec.Meta(max_length=128)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
"""For people. Our own texts are cut to `MAX_TEXT` characters if they may contain a peer's."""
MAX_TEXT = 1000
Verify = Literal["off", "sample", "all"]


class _Body(msgspec.Struct, frozen=True, gc=False, tag_field="type"):
    """Base of all bodies. Trees of values, so the garbage collector has nothing to find in them."""


class OfTransfer(_Body, frozen=True):
    """Base of the messages about one transfer; all others are about the session."""

    transfer_id: TransferId


class Identity(msgspec.Struct, frozen=True):
    """The properties of a worker that must fit its peer's."""

    version: int
    model: Name
    revision: Name
    num_ranks: int
    """Tensor-parallel ranks that hold the KV heads."""
    layout: KVLayout
    """Of the only group of layers, or of the first one."""
    host: Name
    """Boot id and pid namespace: equal strings mean that the two processes can map each other's memory."""
    content: Name = ""
    """Digest of config, tokenizer and weights (`pdlink.content`)."""
    pid: int = 0
    """Of the process, among those of `host`."""
    memory: MemoryKind = "host"
    """Where the KV is."""
    other_layouts: Annotated[tuple[KVLayout, ...], msgspec.Meta(max_length=MAX_GROUPS - 1)] = ()
    """Of the groups after the first one. Version 2 does not know them, and refuses the number of the version."""

    @property
    def groups(self) -> KVGroups:
        return KVGroups((self.layout, *self.other_layouts))


class Hello(_Body, frozen=True, tag="hello"):
    """Dialer to listener: who I am and what I can do."""

    name: Name
    identity: Identity
    capabilities: Annotated[tuple[Capabilities, ...], msgspec.Meta(max_length=16)] = ()
    """Of the transports that work here, the preferred one first. Version 1 had none, and is refused by its number."""
    control: Annotated[str, msgspec.Meta(max_length=512)] = ""
    """Control address of the dialer: for people who look for two workers of one name."""


class Welcome(_Body, frozen=True, tag="welcome"):
    """Listener to dialer: we fit together; use this transport. Sent again if the last one did not connect."""

    name: Name
    identity: Identity
    transport: Capabilities
    """As the listener has it."""


class Refuse(_Body, frozen=True, tag="refuse"):
    """Either way: we do not fit together. `local` and `remote` from the view of this message's sender."""

    factor: Text
    local: Text
    remote: Text


class Invite(_Body, frozen=True, tag="invite"):
    """Dialer to listener: what your transport needs to write into my registered pages."""

    invitation: Annotated[bytes, msgspec.Meta(max_length=2**20)]
    problem: Text = ""
    """Why there is no invitation to this transport; empty if there is one."""


class Ready(_Body, frozen=True, tag="ready"):
    """Listener to dialer: I am connected to your pages; transfers may begin."""


class Expect(OfTransfer, frozen=True, tag="expect"):
    """Receiver to sender: I shall offer blocks for this transfer; keep its KV while I am alive."""


class Offer(OfTransfer, frozen=True, tag="offer"):
    """Receiver to sender: write tokens [start, end) into these blocks.

    The range is authoritative: the receiver needs exactly these tokens. In a group of layers that do not keep all
    tokens, that is a part of the range (`KVLayout.needed`).
    """

    start: int
    end: int
    blocks: Annotated[
        tuple[Annotated[tuple[int, ...], msgspec.Meta(max_length=2**20)], ...], msgspec.Meta(max_length=MAX_GROUPS)
    ]
    """By group, of the receiver's block size: all that hold a token that is needed there, in order of tokens."""
    num_layers: int
    per_layer: bool = False
    """Send a `Landed` for every layer."""
    verify: Verify = "off"
    """"all": send a checksum of every push with `Done`; "sample": of some; "off": of none."""


class Landed(OfTransfer, frozen=True, tag="landed"):
    """Sender to receiver: tokens up to `end` of this layer are visible in your pages."""

    layer: int
    end: int
    first_token: int | None = None
    """As in `Done`, once prefill has ended: decode may begin with the layers that are visible."""


class Checksum(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """XXH3-64 of tokens [start, end) of one layer, ordered by token, part, head (`pdlink.memory.checksums`)."""

    layer: int
    start: int
    end: int
    xxh3: int


class Done(OfTransfer, frozen=True, tag="done"):
    """Sender to receiver: everything offered is visible in your pages, and this is the first token."""

    start: int
    end: int
    num_layers: int
    nbytes: int
    first_token: int
    checksums: Annotated[tuple[Checksum, ...], msgspec.Meta(max_length=2**18)] = ()
    """What the offer's `verify` asked for, taken from the source blocks after the push had landed."""


class Ack(OfTransfer, frozen=True, tag="ack"):
    """Receiver to sender: I have it."""


class Stop(OfTransfer, frozen=True, tag="stop"):
    """Either way: this transfer ends here, because of `reason`."""

    reason: Text
    """A `Reason` as text."""

    @classmethod
    def because(cls, transfer_id: str, reason: Reason) -> Stop:
        return cls(transfer_id, str(reason)[:MAX_TEXT])


class Quiet(OfTransfer, frozen=True, tag="quiet"):
    """Sender to receiver: nothing of this transfer is in flight any more, nor will be."""


class Note(_Body, frozen=True, tag="note"):
    """Either way: for the transport of this session. Only transports whose invitation says so have any."""

    data: Annotated[bytes, msgspec.Meta(max_length=2**18)]


class Heartbeat(_Body, frozen=True, tag="heartbeat"):
    """Either way: I am alive. One per peer, whatever the number of transfers; it renews all their leases."""


class Bye(_Body, frozen=True, tag="bye"):
    """Either way: this session is over; close the data connection and fence your pages."""

    reason: Text


Body = (
    Hello
    | Welcome
    | Refuse
    | Invite
    | Ready
    | Expect
    | Offer
    | Landed
    | Done
    | Ack
    | Stop
    | Quiet
    | Note
    | Heartbeat
    | Bye
)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    version: int
    src: Name
    src_epoch: Name
    dst_epoch: Name
    """Empty in `Hello`."""
    session: int
    """Chosen by the dialer, rising with each connection it opens."""
    number: int
    """Counts its sender's frames in this session, from 0 on: a gap is a loss."""
    bodies: Annotated[tuple[Body, ...], msgspec.Meta(min_length=1, max_length=MAX_BODIES)]
    """In the order of sending."""


encode = msgspec.msgpack.Encoder().encode
"""The frame of an envelope."""
_decoder = msgspec.msgpack.Decoder(Envelope)


def decode(frame: bytes) -> Envelope:
    """The envelope of one frame. Raises ProtocolError (remote) for any other bytes."""
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"frame of {len(frame)} bytes cannot be read: {error}") from None
