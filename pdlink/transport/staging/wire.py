"""What the two ends of a staging lane tell each other beside the bytes: an invitation, and frames on one connection.

    writer                                   owner
    Hello(session, token)        ───────►    whose connection this is
    Ask(count)                   ───────►    it has so many more slots to fill
                                 ◄───────    Grant(slots): yours, to be filled once each
    (the bytes, over the transport below)
    Staged(number, slot, runs)   ───────►    its bytes are in the slot: place them
                                 ◄───────    Placed(number): visible in the pages; the slot is free

A frame is its length as 4 bytes, the most significant first, and MessagePack.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from pdlink.errors import ProtocolError

TOKEN_NBYTES: Final = 16
MAX_FRAME_NBYTES: Final = 1 << 20
HELLO_NBYTES: Final = 64
"""Most bytes that a peer may send before it has said who it is."""
MAX_RUNS: Final = 8192
"""Runs of one slot: one kernel launch (`cuda.launches.SLOT_NBYTES`), and 128 KiB of a frame."""
_HEADER_NBYTES: Final = 4

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Word = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Nbytes = Annotated[int, msgspec.Meta(ge=1, le=2**62)]


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="pdlink-staging/2"):
    """The whole of an invitation. The tag carries the version: another one is refused by name."""

    host: Annotated[str, msgspec.Meta(max_length=64)]
    """Numeric."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    session: Word
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_NBYTES, max_length=TOKEN_NBYTES)]
    """Good for one connection."""
    regions: Annotated[tuple[_Nbytes, ...], msgspec.Meta(min_length=1, max_length=4096)]
    """Sizes of the device buffers."""
    region: Annotated[int, msgspec.Meta(ge=0, le=4095)]
    """Of the transport below, that is slots, the first one at its beginning."""
    slot_nbytes: Annotated[int, msgspec.Meta(ge=4096, le=2**40)]
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=2**16)]
    below: bytes
    """Invitation of the transport below."""


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    pass


class Hello(_Frame, frozen=True, tag=0):
    session: Word
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_NBYTES, max_length=TOKEN_NBYTES)]


class Ask(_Frame, frozen=True, tag=1):
    count: Count


class Grant(_Frame, frozen=True, tag=2):
    slots: Annotated[tuple[Count, ...], msgspec.Meta(max_length=2**16)]


class Staged(_Frame, frozen=True, tag=3):
    number: Word
    slot: Count
    runs: Annotated[tuple[tuple[Count, bytes], ...], msgspec.Meta(max_length=MAX_RUNS)]
    """Region, and little-endian int64 [n, 2]: offset and nbytes of each run. They lie side by side in the slot."""


class SlotPlaced(_Frame, frozen=True, tag=4):
    number: Word


Frame = Hello | Ask | Grant | Staged | SlotPlaced
_DECODER: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def packed(frame: Frame) -> bytes:
    body = msgspec.msgpack.encode(frame)
    return len(body).to_bytes(_HEADER_NBYTES, "big") + body


class FrameCutter:
    """Bytes of a connection, cut into frames. No I/O."""

    def __init__(self, most_nbytes: int) -> None:
        """most_nbytes: of a frame."""
        self.most_nbytes = most_nbytes
        self._held = bytearray()

    def add(self, received: bytes) -> None:
        self._held += received

    def take(self) -> Frame | None:
        """The next whole frame. Raises ProtocolError."""
        if len(self._held) < _HEADER_NBYTES:
            return None
        nbytes = int.from_bytes(self._held[:_HEADER_NBYTES], "big")
        if nbytes > self.most_nbytes:
            raise ProtocolError(f"staging frame: got {nbytes} bytes; expected at most {self.most_nbytes}")
        end = _HEADER_NBYTES + nbytes
        if len(self._held) < end:
            return None
        body = bytes(self._held[_HEADER_NBYTES:end])
        del self._held[:end]
        try:
            return _DECODER.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"staging frame cannot be read: {error}") from error
