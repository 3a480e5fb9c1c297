"""What the two ends of a staged lane tell each other beside the bytes: an invitation, and notes in their session.

writer                                   owner
Ask(count)                   ───────►    it has so many more slots to fill
                             ◄───────    Grant(slots): yours, to be filled once each
(the bytes, into the slot)
SlotFilled(number, slot, …)  ───────►    place it: some layers of a range of positions, in these blocks
                             ◄───────    SlotPlaced(number): visible in the pages; the slot is free
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdlink.errors import ProtocolError
from pdlink.transport.staging.dense import MAX_UNITS

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Word = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Nbytes = Annotated[int, msgspec.Meta(ge=1, le=2**62)]


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="pdlink-staging/4"):
    """The whole of an invitation. The tag carries the version: another one is refused by name."""

    regions: Annotated[tuple[_Nbytes, ...], msgspec.Meta(min_length=1, max_length=4096)]
    """Sizes of the device buffers."""
    region: Annotated[int, msgspec.Meta(ge=0, le=4095)]
    """Of the transport below, that is slots, the first one at its beginning."""
    slot_nbytes: Annotated[int, msgspec.Meta(ge=4096, le=2**40)]
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=2**16)]
    below: bytes
    """Invitation of the transport below."""


class _Note(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    pass


class Ask(_Note, frozen=True, tag=1):
    count: Count


class Grant(_Note, frozen=True, tag=2):
    slots: Annotated[tuple[Count, ...], msgspec.Meta(max_length=2**16)]


class SlotFilled(_Note, frozen=True, tag=3):
    number: Word
    slot: Count
    group: Count
    first_layer: Count
    """Of the group."""
    num_layers: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    start: Word
    end: Word
    """Positions that are copied."""
    unit_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**62)]
    """The slot holds whole units of so many positions, one after the other for each part of each layer. A block of
    the owner's is some of them."""
    heads_first: bool
    """Of a unit, one head after the other; otherwise one position after the other."""
    blocks: Annotated[bytes, msgspec.Meta(min_length=4, max_length=4 * MAX_UNITS)]
    """The owner's, little-endian uint32, from the one on that holds `start`."""


class SlotPlaced(_Note, frozen=True, tag=4):
    number: Word


Note = Ask | Grant | SlotFilled | SlotPlaced
_DECODER: msgspec.msgpack.Decoder[Note] = msgspec.msgpack.Decoder(Note)
encode = msgspec.msgpack.encode


def decode(data: bytes) -> Note:
    """Raises ProtocolError."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"note of a staged lane cannot be read: {error}") from error
