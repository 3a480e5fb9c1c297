"""What the two managers of a request tell each other over SGLang's sockets, beside SGLang's own ABORT and its ACK."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdlink.errors import RemoteError

if TYPE_CHECKING:
    from collections.abc import Sequence

TAG = b"PDLINK/3"


class BadMessage(RemoteError):
    """A message that no pdlink of this version sends."""

    code = "bad_message"


class RoomAsked(msgspec.Struct, frozen=True, tag="ask"):
    """Decode has pages for a room."""

    room: int
    transfer_id: str
    host: str
    port: int
    """Where decode's manager listens."""
    prefix_pages: int
    """Of the prompt's first pages, which decode has cached."""
    num_pages: int
    """Behind them."""
    states: tuple[int, ...] = ()
    """Places for each kind of state that the model keeps beside its KV."""
    tp: tuple[int, int] = (0, 1)
    """Decode's rank among the ranks that share the heads, and their number."""
    num_stages: int = 1
    """Pipeline stages of decode."""
    receivers: int = 1
    """Decode ranks that this prefill rank serves in the room."""
    dummy: bool = False
    """It gets everything from another prefill rank, which has the same."""


class PrefillNodes(msgspec.Struct, frozen=True, tag="here"):
    """Where the nodes of the prefill rank are."""

    room: int
    transfer_id: str
    addresses: dict[int, str]
    """By part: -1 is the KV, states count from 0. No KV where another prefill rank sends these heads."""
    tp: tuple[int, int]
    """Prefill's rank among the ranks that share the heads, and their number."""
    heads: tuple[int, int] | None
    """First KV head that comes from here, and how many; None: all that decode has."""
    layers: tuple[int, ...]
    """SGLang's numbers of the layers that come from here."""


class RoomStatus(msgspec.Struct, frozen=True, tag="status"):
    """The end of a room on a prefill rank."""

    room: int
    transfer_ids: tuple[str, ...]
    """Of each decode rank that this rank serves in the room."""
    status: int
    rank: int
    reason: str = ""
    aux: tuple[bytes, ...] = ()
    """With success: the request's row of each of SGLang's metadata buffers."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Nothing: SGLang registers every decode rank with every prefill rank, and pdlink's nodes do that themselves."""


Message = RoomAsked | PrefillNodes | RoomStatus | Hello
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> list[bytes]:
    return [TAG, msgspec.msgpack.encode(message)]


def decode(frames: Sequence[bytes]) -> Message | None:
    """None for messages that are not ours. Raises BadMessage."""
    if not frames or not frames[0].startswith(b"PDLINK/"):
        return None
    if frames[0] != TAG or len(frames) != 2:
        raise BadMessage(f"message: got {frames[0]!r} of {len(frames)} frames; expected {TAG!r} of 2; update pdlink")
    try:
        message: Message = _decoder.decode(frames[1])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadMessage(f"message: got {error}; expected a known one; update pdlink") from None
    return message
