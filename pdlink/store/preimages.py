"""What the keys of records are hashes of, between processes and in a file.

A store tells routers the tokens of what it keeps, and gets them from clients. Nothing is believed: a preimage counts
only if the key is its hash, so that neither a client that lies nor a damaged file can say wrong things of a record.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
from array import array
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from pdlink.kv.hashing import KEY_NBYTES, Origin, Preimage, is_preimage
from pdlink.store import wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pdlink.store.record import RecordShape

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_MAGIC = b"pdlinkP1"
_ENTRY_NBYTES = 80
"""About, beside the tokens."""
_SLACK_NBYTES = 1 << 20
"""Of entries that say nothing any more, beside as much as the others take."""
_MAX_TOKENS, _MAX_KNOWN = 1 << 18, 1 << 14
"""In one message."""


def to_wire(known: Preimage) -> wire.Known | None:
    """None for one that may not be told, or is too long."""
    if not len(known.tokens) or len(known.tokens) > _MAX_TOKENS:
        return None
    tokens = array("I", known.tokens).tobytes()
    if known.parent is not None:
        return wire.Known(known.parent, tokens)
    origin = known.origin
    if origin is None or max(map(len, (origin.model, origin.revision, origin.lora, origin.salt))) > wire.MAX_WORDS:
        return None
    words = origin.model, origin.revision, origin.chunk_tokens, origin.lora, origin.salt
    return wire.Known(wire.ChunkOrigin(*words), tokens)


def commits(
    serials: Sequence[int], preimages: Mapping[int, Preimage | None], *, summed: bool = False
) -> Iterator[wire.Commit]:
    """In as few messages as hold what is known of some of them."""
    if not preimages:
        yield wire.Commit(tuple(serials), summed=summed)
        return
    mine: list[int] = []
    known: list[wire.Known | None] = []
    nbytes = 0
    for serial in serials:
        preimage = preimages.get(serial)
        said = None if preimage is None else to_wire(preimage)
        more_nbytes = 0 if said is None else len(said.tokens)
        if mine and (nbytes + more_nbytes > 4 * _MAX_TOKENS or len(mine) == _MAX_KNOWN):
            yield wire.Commit(tuple(mine), tuple(known), summed)
            mine, known, nbytes = [], [], 0
        mine.append(serial)
        known.append(said)
        nbytes += more_nbytes
    yield wire.Commit(tuple(mine), tuple(known), summed)


def announcements(
    keys: Sequence[bytes], shape: RecordShape, preimages: Sequence[Preimage | None]
) -> Iterator[wire.Preimages]:
    """The same of records that are there."""
    longest = max((len(each.tokens) for each in preimages if each is not None), default=1)
    step = min(_MAX_KNOWN, max(1, _MAX_TOKENS // max(1, longest)))
    for begin in range(0, len(keys), step):
        known = [None if each is None else to_wire(each) for each in preimages[begin : begin + step]]
        yield wire.Preimages(tuple(keys[begin : begin + step]), shape, tuple(known))


def from_wire(said: wire.Known, key: bytes, shape: RecordShape) -> Preimage | None:
    """None for a preimage of another key. Cost: one hash of the tokens."""
    if not said.tokens or len(said.tokens) % 4:
        return None
    tokens = array("I", said.tokens)
    if isinstance(said.before, bytes):
        found = Preimage(said.before, tokens)
    else:
        before = said.before
        if len(tokens) != before.chunk_tokens:
            return None
        origin = Origin(
            before.model, before.revision, shape.dtype, _text(shape), before.chunk_tokens, before.lora, before.salt
        )
        found = _of_origin(origin, tokens)
    return found if is_preimage(found, key) else None


def _of_origin(origin: Origin, tokens: Sequence[int]) -> Preimage:
    return Preimage(None, tokens, tuple(filter(None, (origin.lora, origin.salt))), origin)


@lru_cache(64)
def _text(shape: RecordShape) -> str:
    return shape.text


class _Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    key: bytes
    before: bytes | tuple[str, str, str, str, int, str, str]
    """The parent, or the fields of an `Origin`."""
    tokens: bytes


_decoder = msgspec.msgpack.Decoder(_Entry)


class PreimageFile:
    """Of the records on a disk, so that they can be told after a restart. Holds the token ids of prompts.

    4 bytes a token and about 80 a record, twice that at most. Not thread-safe. What cannot be written is not told
    after the next start, and no error.
    """

    def __init__(self, path: Path) -> None:
        """path: made if it is not there."""
        self.path = path
        self._fd = -1
        self._live_nbytes = self._nbytes = 0

    def load(self) -> dict[bytes, Preimage]:
        """What it says, also of records that have gone. Cost: one hash of the tokens."""
        with contextlib.suppress(OSError):
            return {key: known for key, known in _entries(self.path.read_bytes()) if is_preimage(known, key)}
        return {}

    def add(self, key: bytes, known: Preimage) -> None:
        """After `rewrite`."""
        if self._fd < 0:
            return
        entry = _packed(key, known)
        try:
            if os.write(self._fd, entry) < len(entry):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._failed(error)
        self._live_nbytes += 4 * len(known.tokens) + _ENTRY_NBYTES
        self._nbytes += len(entry)

    def forget(self, known: Preimage) -> bool:
        """A record has gone. Whether to `rewrite` now: more is of no use than is."""
        self._live_nbytes -= 4 * len(known.tokens) + _ENTRY_NBYTES
        return self._fd >= 0 and self._nbytes > 2 * self._live_nbytes + _SLACK_NBYTES

    def rewrite(self, known: Mapping[bytes, Preimage]) -> None:
        """Begin anew with these."""
        self.close()
        fresh = self.path.with_suffix(".new")
        try:
            fresh.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._nbytes = os.write(self._fd, _MAGIC)
            self._live_nbytes = 0
            for key, each in known.items():
                self.add(key, each)
            fresh.rename(self.path)
        except OSError as error:
            self._failed(error)

    def close(self) -> None:
        """Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _failed(self, error: OSError) -> None:
        log.warning("%s cannot be written (%s): tokens on the disk are not known after a restart", self.path, error)
        self.close()


def _packed(key: bytes, known: Preimage) -> bytes:
    assert known.parent is not None or known.origin is not None
    before = known.parent if known.parent is not None else tuple(known.origin or ())
    body = msgspec.msgpack.encode((key, before, array("I", known.tokens).tobytes()))
    return _LENGTH.pack(len(body)) + body


def _entries(data: bytes) -> Iterator[tuple[bytes, Preimage]]:
    """Up to the first entry that is cut, as by a crash."""
    at = len(_MAGIC)
    while data[: len(_MAGIC)] == _MAGIC and at + _LENGTH.size <= len(data):
        (nbytes,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size + nbytes
        try:
            entry = _decoder.decode(data[at - nbytes : at])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        if len(entry.tokens) % 4:
            return
        tokens = array("I", entry.tokens)
        if isinstance(entry.before, bytes):
            if len(entry.before) == KEY_NBYTES:
                yield entry.key, Preimage(entry.before, tokens)
        else:
            yield entry.key, _of_origin(Origin(*entry.before), tokens)
