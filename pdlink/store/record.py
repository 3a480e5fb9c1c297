"""Records: the KV of one chunk as tiers keep it, in an order that belongs to no engine.

A record is a header of one page and a payload. The payload holds one *group* of layers after the other, each dense as
[layer][part][token][head][element], so that one layer is one range. `RecordShape.layout` says so as a `KVLayout`:
`pdlink.kv.plan` copies between it and the cache of any engine, whatever that one's block size and order of axes.

The header is written by `seal` before a record leaves memory, and `unseal` believes nothing it reads: what is not the
record that was asked for, whole and unchanged, is a `Miss`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec
import xxhash

from pdlink.errors import ConfigError
from pdlink.kv.hashing import KEY_NBYTES
from pdlink.kv.layout import KVLayout, LayerLayout, Part

if TYPE_CHECKING:
    from pdlink.memory.buffers import Bytes

HEADER_NBYTES = 4096
"""The payload begins on a page, which is what unbuffered reads of a part and DMA want."""

SCHEMA = 1
_MAGIC = b"pdlinkKV"
_PREFIX = struct.Struct("<8sHHIQ")
"""Magic, schema, codec, bytes of the body, XXH3-64 of the body."""

RAW = 0
"""Codec of a payload as it is. No other codec is written yet; a record of one is a miss."""


class Group(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Layers of one geometry that are kept and needed alike."""

    kind: Literal["full", "sliding", "latent", "state"]
    """Which tokens before a position its attention reads: all, the last `window_tokens`, all (as one latent part), or
    a recurrent state, of which a record holds one: that after the chunk's last token."""
    layers: tuple[int, ...]
    """The model's layers, ascending."""
    num_parts: int
    """2 for K and V, 1 for a latent or a state."""
    num_heads: int
    head_nbytes: int
    window_tokens: int = 0


class RecordShape(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the records of a model look like. Part of the namespace of their keys, so that one key has one shape."""

    dtype: str
    chunk_tokens: int
    groups: tuple[Group, ...]

    @property
    def text(self) -> str:
        """For the namespace of keys: equal for equal shapes."""
        return f"{SCHEMA} {msgspec.json.encode(self).decode()}"

    @property
    def payload_nbytes(self) -> int:
        return sum(self._group_nbytes(group) for group in self.groups)

    @property
    def nbytes(self) -> int:
        """Of a whole record."""
        return HEADER_NBYTES + self.payload_nbytes

    def layout(self, index: int, heads: range | None = None) -> KVLayout:
        """Where group `index` lies in a record that begins at byte 0 of region 0: one block of all its tokens.

        heads: only these, for a worker that holds a part of each layer.
        """
        group = self.groups[index]
        base = HEADER_NBYTES + sum(self._group_nbytes(before) for before in self.groups[:index])
        mine = range(group.num_heads) if heads is None else heads
        tokens = self._tokens(group)
        token_stride = group.num_heads * group.head_nbytes
        part_nbytes = tokens * token_stride
        return KVLayout(
            dtype=self.dtype,
            block_tokens=tokens,
            num_blocks=1,
            num_heads=len(mine),
            head_nbytes=group.head_nbytes,
            layers=tuple(
                LayerLayout(
                    parts=tuple(
                        Part(
                            0, base + (layer * group.num_parts + part) * part_nbytes + mine.start * group.head_nbytes
                        )
                        for part in range(group.num_parts)
                    ),
                    block_stride=part_nbytes,
                    token_stride=token_stride,
                    head_stride=group.head_nbytes,
                )
                for layer in range(len(group.layers))
            ),
        )

    def check(self) -> None:
        """Raises ConfigError for a shape whose header does not fit its page."""
        body = len(_body(self, bytes(KEY_NBYTES), bytes(16)))
        if body > HEADER_NBYTES - _PREFIX.size:
            raise ConfigError(
                f"record header: got {body} bytes; limit {HEADER_NBYTES - _PREFIX.size}; describe fewer groups"
            )

    def _tokens(self, group: Group) -> int:
        return 1 if group.kind == "state" else self.chunk_tokens

    def _group_nbytes(self, group: Group) -> int:
        return len(group.layers) * group.num_parts * self._tokens(group) * group.num_heads * group.head_nbytes


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    key: bytes
    shape: RecordShape
    payload_nbytes: int
    payload_xxh3_128: bytes


_decoder = msgspec.msgpack.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class Miss:
    """Bytes that are not the record; `reason` is for logs and counters' labels."""

    reason: str


def shape_of(layout: KVLayout, chunk_tokens: int) -> RecordShape:
    """The shape for an engine whose layers all attend to all tokens, whatever its order of axes and block size."""
    parts = {len(layer.parts) for layer in layout.layers}
    if len(parts) != 1:
        raise ConfigError(f"tiers: got layers of {sorted(parts)} parts; limit one number in a group")
    num_parts = parts.pop()
    group = Group(
        "latent" if num_parts == 1 else "full",
        tuple(range(len(layout.layers))),
        num_parts,
        layout.num_heads,
        layout.head_nbytes,
    )
    return RecordShape(layout.dtype, chunk_tokens, (group,))


def seal(record: Bytes, key: bytes, shape: RecordShape) -> None:
    """Write the header before the payload that is in `record` ([shape.nbytes]). Cost: one hash of the payload."""
    digest = xxhash.xxh3_128_digest(record[HEADER_NBYTES : shape.nbytes].data)
    body = _body(shape, key, digest)
    header = _PREFIX.pack(_MAGIC, SCHEMA, RAW, len(body), xxhash.xxh3_64_intdigest(body)) + body
    record[:HEADER_NBYTES] = memoryview(header.ljust(HEADER_NBYTES, b"\0"))


def unseal(record: Bytes, key: bytes, shape: RecordShape) -> Miss | None:
    """None if these bytes, from wherever, begin with the record of `key`, whole and unchanged; else why not."""
    if len(record) < shape.nbytes:
        return Miss("short")
    magic, schema, codec, body_nbytes, digest = _PREFIX.unpack(record[: _PREFIX.size].tobytes())
    if magic != _MAGIC or body_nbytes > HEADER_NBYTES - _PREFIX.size:
        return Miss("not_a_record")
    if schema != SCHEMA:
        return Miss("schema")
    if codec != RAW:
        return Miss("codec")
    text = record[_PREFIX.size : _PREFIX.size + body_nbytes].tobytes()
    if xxhash.xxh3_64_intdigest(text) != digest:
        return Miss("header_checksum")
    try:
        body = _decoder.decode(text)
    except msgspec.MsgspecError:
        return Miss("not_a_record")
    if body.key != key:
        return Miss("other_key")
    if body.shape != shape or body.payload_nbytes != shape.payload_nbytes:
        return Miss("other_shape")
    if xxhash.xxh3_128_digest(record[HEADER_NBYTES : shape.nbytes].data) != body.payload_xxh3_128:
        return Miss("payload_checksum")
    return None


def _body(shape: RecordShape, key: bytes, payload_xxh3_128: bytes) -> bytes:
    return msgspec.msgpack.encode(_Body(key, shape, shape.payload_nbytes, payload_xxh3_128))
