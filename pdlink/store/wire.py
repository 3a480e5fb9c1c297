"""Messages between a store process and its clients, over a Unix socket: frames, types and limits (docs/tiers.md).

A frame is its length (4 bytes, little endian) and one MessagePack array that begins with the tag of its type. What a
client sends is checked here and in `server/desk.py`; what no client has reason to send ends its connection.
"""

from __future__ import annotations

import struct
from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta

from pdlink.errors import ProtocolError
from pdlink.kv.hashing import KEY_NBYTES
from pdlink.store.record import RecordShape  # noqa: TC001
from pdlink.store.scope import Scope  # noqa: TC001
from pdlink.store.sessions import SessionTerms  # noqa: TC001
from pdlink.store.slots import (
    USUAL,
    Retention,
    Share,  # noqa: TC001  (msgspec reads the annotation at run time)
)

VERSION = 9
MAX_KEYS = 1 << 16
"""Of one message; a longer prefix is cut there."""
MAX_TEXT = 256
"""Characters of a name."""
MAX_WORDS = 4096
"""Characters of a model, a revision, a LoRA, a salt."""
MAX_ADDRESS = 512
"""Characters of a store's address, with its key."""
MAX_FRAME_NBYTES = 4 << 20
"""MAX_KEYS with their places, and some."""
_LENGTH = struct.Struct("<I")

Key = Annotated[bytes, Meta(min_length=KEY_NBYTES, max_length=KEY_NBYTES)]
Keys = Annotated[tuple[Key, ...], Meta(max_length=MAX_KEYS)]
Serials = Annotated[tuple[int, ...], Meta(max_length=MAX_KEYS)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Words = Annotated[str, Meta(max_length=MAX_WORDS)]
Timeout = Annotated[float, Meta(ge=0, le=3600)]
Place = Annotated[int, Meta(ge=0)]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=str.lower):
    """The first element is the name of the type, in lower case."""


class ChunkOrigin(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Of a prompt's first chunk, beside what the record's shape says: see `pdlink.kv.hashing.Origin`."""

    model: Words
    revision: Words
    chunk_tokens: int
    lora: Words
    salt: Words


class Known(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the key of a record is the hash of."""

    before: Key | ChunkOrigin
    """The key of the chunk before; of a first chunk where its prompt comes from."""
    tokens: bytes
    """Little-endian uint32."""


# --- From a client. What has a `call` is answered, by a message with the same number; the rest is not.


class Hello(Message, frozen=True):
    """The first message of a connection."""

    version: int
    client: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """Names one client of one process for its life, also when it connects again."""
    name: Text
    writing: Serials
    """Reservations that it goes on with; its others end."""


class Lookup(Message, frozen=True):
    call: int
    keys: Keys
    timeout_s: Timeout
    each: bool = False
    """Answer for every key, also behind one that is not known."""


class ComesFrom(Message, frozen=True):
    """Look-ups of these keys that follow ask the store at this address, too."""

    keys: Keys
    address: Annotated[str, Meta(min_length=1, max_length=MAX_ADDRESS)]


class Preimages(Message, frozen=True):
    """What keys of records that came from other stores are hashes of, for a store that publishes events."""

    keys: Keys
    shape: RecordShape
    known: Annotated[tuple[Known | None, ...], Meta(max_length=MAX_KEYS)]
    """As of `Commit`, of each key."""


class FetchRecords(Message, frozen=True, tag="fetch"):
    """Answered by `Coming` whenever more is there, and by `Fetched` when all is there or no more comes."""

    call: int
    keys: Keys
    places: Annotated[tuple[Place, ...], Meta(max_length=MAX_KEYS)]
    shape: RecordShape
    request: Text
    retention: Retention = USUAL
    checks: bool = False
    """Whether the client compares the sums of the chunks that the answer calls unchecked."""


class Release(Message, frozen=True):
    """Give back what a fetch keeps."""

    call: int
    fetch: int
    """The call of the fetch."""
    wrong: Serials = ()
    """Slots whose sums are not those of what was read."""


class Reserve(Message, frozen=True):
    call: int
    keys: Keys
    shape: RecordShape
    share: Share
    retention: Retention = USUAL


class Commit(Message, frozen=True):
    serials: Serials
    known: Annotated[tuple[Known | None, ...], Meta(max_length=MAX_KEYS)] = ()
    """Of each serial, if the store publishes events; None where the client may not tell (images)."""
    summed: bool = False
    """Whether the headers have the sums of the records."""


class Abandon(Message, frozen=True):
    serials: Serials


class HoldSession(Message, frozen=True):
    call: int
    session: SessionTerms
    keys: Keys
    sizes: Annotated[tuple[Annotated[int, Meta(gt=0)], ...], Meta(min_length=1, max_length=64)]
    """Bytes of a record, in turns."""
    waits: bool


class EndSession(Message, frozen=True):
    call: int
    name: Text
    tenant: Text
    owner: Text | None


class Clear(Message, frozen=True):
    call: int
    keys: Keys | None
    places: Annotated[tuple[Text, ...], Meta(max_length=64)] | None
    ending: Annotated[bytes, Meta(max_length=KEY_NBYTES)] = b""
    """Instead of keys: how they end; empty for all."""


class Flush(Message, frozen=True):
    call: int
    timeout_s: Timeout


class Know(Message, frozen=True):
    """How the keys of an engine are made, for operators."""

    scope: Scope


class Ping(Message, frozen=True):
    """Answered by `Count`: the store's process is alive."""

    call: int


# --- From the store


class Welcome(Message, frozen=True):
    """Answers `Hello`, with the descriptor of the arena beside it."""

    version: int
    incarnation: bytes
    """Names this life of the store: slots of another one are in another arena."""
    arena_nbytes: int
    committed_nbytes: int
    """From the start of the arena: what has memory."""
    places: tuple[str, ...]
    events: str = ""
    """Where the store publishes what it keeps: ENDPOINT or ENDPOINT,REPLAY; empty if it does not."""
    wants_sums: bool = False
    """Whether who fills a record should write its sums."""
    lends_at: str = ""
    """As `AnyStore.lends_at`."""


class Places(Message, frozen=True):
    """They are these now, instead of those of `Welcome`; never fewer."""

    places: tuple[str, ...]


class Refused(Message, frozen=True):
    """Answers `Hello`."""

    reason: str


class FoundAt(Message, frozen=True):
    call: int
    places: tuple[int, ...]
    """Of the leading keys; of every key if each was asked for, -1 where it is not known."""


class Reserved(Message, frozen=True):
    call: int
    slots: tuple[tuple[int, int, int], ...]
    """Index of the key, serial, offset."""
    committed_nbytes: int
    """As in `Welcome`, by now."""


class Coming(Message, frozen=True):
    """What can be read of a fetch before `Fetched`, which names it again."""

    call: int
    first: int
    """The index of the key that `slots` begins with: those before it were told."""
    slots: tuple[tuple[int, int, int], ...]
    """As of `Fetched`."""
    unchecked: tuple[int, ...] = ()
    """As of `Fetched`: by index among all keys."""


class Fetched(Message, frozen=True):
    call: int
    slots: tuple[tuple[int, int, int], ...]
    """Of the leading keys: serial, offset, bytes."""
    unchecked: tuple[int, ...] = ()
    """Which of them, by index, the client compares with their sums, since it said that it would."""


class Forgot(Message, frozen=True):
    call: int
    records: int
    """That were in the arena."""
    durable: bool
    """Whether the store knows of the clear after a restart."""


class Count(Message, frozen=True):
    call: int
    value: int


Request = (
    Hello
    | Lookup
    | ComesFrom
    | Preimages
    | FetchRecords
    | Release
    | Reserve
    | Commit
    | Abandon
    | HoldSession
    | EndSession
    | Clear
    | Flush
    | Know
    | Ping
)
Reply = Welcome | Places | Refused | FoundAt | Reserved | Coming | Fetched | Forgot | Count

_encoder = msgspec.msgpack.Encoder()
REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_T = TypeVar("_T")


def frame(message: Message) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames(Generic[_T]):
    """Messages from the bytes of a stream, however they were cut."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[_T]) -> None:
        self._decoder = decoder
        self._held = bytearray()

    def take(self, more: bytes) -> list[_T]:
        """What is whole with these bytes. Raises ProtocolError for what is no message."""
        self._held += more
        found, at = [], 0
        while len(self._held) - at >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(self._held, at)
            if nbytes > MAX_FRAME_NBYTES:
                raise ProtocolError(
                    f"a frame: got {nbytes} bytes; expected at most {MAX_FRAME_NBYTES}; send a shorter one"
                )
            if len(self._held) - at < _LENGTH.size + nbytes:
                break
            body = bytes(self._held[at + _LENGTH.size : at + _LENGTH.size + nbytes])
            at += _LENGTH.size + nbytes
            try:
                found.append(self._decoder.decode(body))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise ProtocolError(f"a frame: {error}; expected a message of docs/tiers.md") from None
        del self._held[:at]
        return found
