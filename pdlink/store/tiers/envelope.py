"""The 64 bytes before a record in tiers that are shared: which record follows, how long, and its checksum."""

from __future__ import annotations

import struct

import xxhash

from pdlink.kv.hashing import KEY_NBYTES

NBYTES = 64
_FORMAT = struct.Struct("<8s32sQ16s")
_MAGIC = b"pdlinkT1"


def envelope(key: bytes, record: memoryview) -> bytes:
    """What is stored before a record. Cost: one XXH3-128 of it."""
    return _FORMAT.pack(_MAGIC, key, len(record), xxhash.xxh3_128_digest(record))


def opened(stored: bytes | bytearray, key: bytes) -> tuple[int, bytes] | None:
    """Length and XXH3-128 of the record of `key` behind these bytes; None if they announce no such record."""
    if len(stored) != NBYTES:
        return None
    magic, holder, nbytes, digest = _FORMAT.unpack(stored)
    return (nbytes, digest) if magic == _MAGIC and holder == key else None


def key_of(name: str) -> bytes | None:
    """Of a record that is named by its key in hexadecimal; None for another name."""
    try:
        key = bytes.fromhex(name)
    except ValueError:
        return None
    return key if len(key) == KEY_NBYTES and key.hex() == name else None
