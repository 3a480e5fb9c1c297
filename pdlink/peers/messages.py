"""What stores say to each other: msgspec structs in MessagePack, one in a frame. Payload is none of it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdlink.errors import ProtocolError
from pdlink.kv.hashing import KEY_NBYTES

VERSION = 1
MAX_KEYS = 4096
"""In one question: a million tokens in chunks of 256."""

Key = Annotated[bytes, msgspec.Meta(min_length=KEY_NBYTES, max_length=KEY_NBYTES)]


class _Body(msgspec.Struct, frozen=True, tag_field="type"):
    pass


class PeerAsk(_Body, frozen=True, tag="ask"):
    """Which of these records do you have in memory?"""

    number: int
    """Chosen by the asker; the answer has it, too."""
    keys: Annotated[tuple[Key, ...], msgspec.Meta(max_length=MAX_KEYS)]
    version: int = VERSION


class PeerAnswer(_Body, frozen=True, tag="answer"):
    number: int
    held: Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS)]
    """A byte for each key: 1 for a record that is here."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    """Control port of the node that sends records, on the host and with the key of this connection."""
    version: int = VERSION


class Pull(_Body, frozen=True, tag="pull"):
    """Send this record as a transfer of that id, which the asker receives; it fails if the record is not here."""

    key: Key
    transfer_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    num_pages: Annotated[int, msgspec.Meta(ge=1)]
    """That the asker has room for; a record of another length is refused."""


Body = PeerAsk | PeerAnswer | Pull

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Body] = msgspec.msgpack.Decoder(Body)


def decode(frame: bytes) -> Body:
    """Raises ProtocolError for anything else."""
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"frame of {len(frame)} bytes cannot be read: {error}") from None
