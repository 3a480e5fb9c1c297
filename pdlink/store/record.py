"""Records: the KV of one chunk as tiers keep it, in an order that belongs to no engine.

A record is a header of one page and a payload. The payload holds one *group* of layers after the other, each dense as
[layer][part][token][head][element], so that one layer is one range. `RecordShape.layout` says so as a `KVLayout`:
`pdlink.kv.plan` copies between it and the cache of any engine, whatever that one's block size and order of axes.

The header is written by `seal` before a record leaves memory, and `unseal` believes nothing it reads: what is not the
record that was asked for, whole and unchanged, is a `Miss`. Between the two the payload may be packed (`codec.py`).

The header ends with two sums of 64 bits for each layer (`csrc/copy/sums.h`). `Save` makes them while it copies KV
into a record, and `Load` compares them while it copies KV out, before it says that a layer is there. So a checksum
needs no pass of its own.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
import xxhash

from pdlink import _copy
from pdlink.errors import ConfigError
from pdlink.kv.hashing import KEY_NBYTES
from pdlink.kv.layout import KVLayout, LayerLayout, Part
from pdlink.store.codec import RAW, codec_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from pdlink.memory.buffers import Bytes
    from pdlink.store.codec import Codec

    Sums: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.uint64]]
    """[layers, 2], layers by number."""

HEADER_NBYTES = 4096
"""The payload begins on a page, which is what unbuffered reads of a part and DMA want."""

SUM_LINE_NBYTES = 64
"""Sums are over whole lines of a layer; the last one is filled up with zeros."""

SCHEMA = 4
_MAGIC = b"pdlinkKV"
_PREFIX = struct.Struct("<8sHHIQ")
"""Magic, schema, codec, bytes of the body, XXH3-64 of the body."""


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
    order: str = "PTH"
    """How parts, tokens and heads of a layer nest, outermost first; the head vector is innermost."""


@lru_cache(256)
def _payload_nbytes(shape: RecordShape) -> int:
    """Asked for with every record."""
    return sum(shape._group_nbytes(group) for group in shape.groups)


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
        return _payload_nbytes(self)

    @property
    def nbytes(self) -> int:
        """Of a whole record."""
        return HEADER_NBYTES + _payload_nbytes(self)

    def layout(self, index: int, heads: range | None = None) -> KVLayout:
        """Where group `index` lies in a record that begins at byte 0 of region 0: one block of all its tokens.

        heads: only these, for a worker that holds a part of each layer.
        """
        group = self.groups[index]
        base = HEADER_NBYTES + sum(self._group_nbytes(before) for before in self.groups[:index])
        mine = range(group.num_heads) if heads is None else heads
        is_state = group.kind == "state"
        sizes = {"P": group.num_parts, "T": self._tokens(group), "H": group.num_heads}
        strides: dict[str, int] = {}
        nbytes = group.head_nbytes
        for axis in reversed(group.order):
            strides[axis] = nbytes
            nbytes *= sizes[axis]
        first = base + mine.start * strides["H"]
        return KVLayout(
            dtype=self.dtype,
            block_tokens=self.chunk_tokens,
            num_blocks=1,
            num_heads=len(mine),
            head_nbytes=group.head_nbytes,
            layers=tuple(
                LayerLayout(
                    parts=tuple(
                        Part(0, first + layer * nbytes + part * strides["P"]) for part in range(group.num_parts)
                    ),
                    block_stride=nbytes,
                    token_stride=0 if is_state else strides["T"],
                    head_stride=strides["H"],
                )
                for layer in range(len(group.layers))
            ),
            state=is_state,
        )

    def whole(self, heads: range | None = None) -> KVLayout:
        """The record as one layout, layers by number: for groups that differ in nothing but `layers` and `order`."""
        layouts = [self.layout(index, heads) for index in range(len(self.groups))]
        layers = {
            number: layer
            for group, layout in zip(self.groups, layouts, strict=True)
            for number, layer in zip(group.layers, layout.layers, strict=True)
        }
        return replace(layouts[0], layers=tuple(layers[number] for number in sorted(layers)))

    def check(self) -> None:
        """Raises ConfigError for a shape whose header does not fit its page."""
        body = len(_body(self, bytes(KEY_NBYTES), bytes(16))) + _sums_nbytes(self)
        if body > HEADER_NBYTES - _PREFIX.size:
            raise ConfigError(
                f"record header: got {body} bytes; expected at most {HEADER_NBYTES - _PREFIX.size}; "
                "describe fewer layers"
            )

    def _tokens(self, group: Group) -> int:
        return 1 if group.kind == "state" else self.chunk_tokens

    def _group_nbytes(self, group: Group) -> int:
        return len(group.layers) * group.num_parts * self._tokens(group) * group.num_heads * group.head_nbytes


class RecordHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a record says of itself."""

    key: bytes
    shape: RecordShape
    payload_nbytes: int
    sums_xxh3_128: bytes
    """Of the sums at the header's end; empty without them, where only tiers that check by themselves had it."""
    expires_at_s: float
    """When it is a miss, in seconds since 1970."""

    @property
    def is_hashed(self) -> bool:
        """Whether it has sums of the payload."""
        return bool(self.sums_xxh3_128)


_decoder = msgspec.msgpack.Decoder(RecordHeader)


@dataclass(frozen=True, slots=True)
class Miss:
    """Bytes that are not the record; `reason` is for logs and counters' labels."""

    reason: str


def shape_of(
    layout: KVLayout,
    chunk_tokens: int,
    num_heads: int | None = None,
    orders: Sequence[str] = ("PTH",),
) -> RecordShape:
    """The shape for one group of layers of an engine, whatever its order of axes and block size.

    A window or a state is what `layout` says. Every group of a model has records of its own, under keys of its own:
    a prefix needs all chunks of full attention, the last ones of a window, and one state.

    num_heads: of the model, where `layout` holds a part of them.
    orders: of the axes of the first layers in the record, and so on in turn: for pages whose smallest piece is an
    element, which are slow to put into another order.
    """
    parts = {len(layer.parts) for layer in layout.layers}
    if len(parts) != 1:
        raise ConfigError(f"tiers: got layers of {sorted(parts)} parts; expected one number in a group")
    num_parts = parts.pop()
    kind: Literal["full", "sliding", "latent", "state"] = "latent" if num_parts == 1 else "full"
    if layout.window:
        kind = "sliding"
    if layout.state:
        kind = "state"
    groups = tuple(
        Group(
            kind,
            tuple(range(first, len(layout.layers), len(orders))),
            num_parts,
            num_heads or layout.num_heads,
            layout.head_nbytes,
            layout.window,
            order,
        )
        for first, order in enumerate(orders)
    )
    return RecordShape(layout.dtype, chunk_tokens, groups)


@lru_cache(64)
def layer_ranges(shape: RecordShape) -> tuple[tuple[int, int], ...]:
    """Where the layers lie in a record, by number: offset and bytes."""
    found, at = [], HEADER_NBYTES
    for group in shape.groups:
        nbytes = shape._group_nbytes(group) // len(group.layers)
        found += [(number, at + index * nbytes, nbytes) for index, number in enumerate(group.layers)]
        at += nbytes * len(group.layers)
    return tuple((begin, nbytes) for _, begin, nbytes in sorted(found))


def sums_of(record: Bytes, shape: RecordShape) -> Sums:
    """The sums of the payload as it is. Reads all of it: 0.06 CPU s per GB on a core of an EPYC."""
    return np.array([_copy.sum_bytes(record[at : at + nbytes]) for at, nbytes in layer_ranges(shape)], np.uint64)


def said_sums(record: Bytes, shape: RecordShape) -> Sums:
    """Those in the header, to read or to write, without a copy."""
    return record[HEADER_NBYTES - _sums_nbytes(shape) : HEADER_NBYTES].view(np.uint64).reshape(-1, 2)


def holds(record: Bytes, shape: RecordShape) -> bool:
    """Whether the payload has the sums that its header says."""
    return np.array_equal(sums_of(record, shape), said_sums(record, shape))


def seal(
    record: Bytes,
    key: bytes,
    shape: RecordShape,
    expires_at_s: float = float("inf"),
    *,
    hashed: bool = True,
    summed: bool = False,
) -> None:
    """Write the header before the payload that is in `record` ([shape.nbytes]).

    expires_at_s: when it is a miss for everybody, in seconds since 1970.
    hashed: with sums of the payload; without them `unseal` takes the record only as `verified`.
    summed: they are in the header already; else they cost one pass over the payload.
    """
    said = said_sums(record, shape)
    if hashed and not summed:
        said[:] = sums_of(record, shape)
    sums = said.tobytes()
    body = _body(shape, key, xxhash.xxh3_128_digest(sums) if hashed else b"", expires_at_s)
    header = _PREFIX.pack(_MAGIC, SCHEMA, RAW, len(body), xxhash.xxh3_64_intdigest(body)) + body
    front_nbytes = HEADER_NBYTES - len(sums)  # others may read the sums meanwhile
    record[:front_nbytes] = memoryview(header.ljust(front_nbytes, b"\0"))


def pack(record: Bytes, shape: RecordShape, codec: Codec | None) -> Bytes:
    """A sealed record for a tier: packed where that makes it shorter, else as it is."""
    if codec is None:
        return record[: shape.nbytes]
    payload = codec.pack(record[HEADER_NBYTES : shape.nbytes], shape.dtype)
    if len(payload) >= shape.payload_nbytes:
        return record[: shape.nbytes]
    magic, schema, _, *rest = _PREFIX.unpack(record[: _PREFIX.size].tobytes())
    header = record[:HEADER_NBYTES].copy()
    header[: _PREFIX.size] = memoryview(_PREFIX.pack(magic, schema, codec.number, *rest))
    return np.concatenate([header, np.frombuffer(payload, np.uint8)])


def unseal(
    record: Bytes, key: bytes, shape: RecordShape, nbytes: int | None = None, *, verified: bool = False
) -> Miss | None:
    """As `header_of`: None, or why these bytes are not the record."""
    found = header_of(record, key, shape, nbytes, verified=verified)
    return found if isinstance(found, Miss) else None


def header_of(
    record: Bytes, key: bytes, shape: RecordShape, nbytes: int | None = None, *, verified: bool = False
) -> RecordHeader | Miss:
    """Its header, if these bytes, from wherever, begin with the record of `key`, whole and unchanged; else why not.

    A payload that is packed is unpacked in place.
    nbytes: of the record as it came, if `record` is longer.
    verified: the bytes are the ones that were put, or the caller sees to that: the payload is not read.
    """
    came = len(record) if nbytes is None else nbytes
    if came < _PREFIX.size or len(record) < shape.nbytes:
        return Miss("short")
    magic, schema, codec, body_nbytes, digest = _PREFIX.unpack(record[: _PREFIX.size].tobytes())
    if magic != _MAGIC or body_nbytes > HEADER_NBYTES - _PREFIX.size:
        return Miss("not_a_record")
    if schema != SCHEMA:
        return Miss("schema")
    if came < (shape.nbytes if codec == RAW else HEADER_NBYTES):
        return Miss("short")
    text = record[_PREFIX.size : _PREFIX.size + body_nbytes].tobytes()
    if xxhash.xxh3_64_intdigest(text) != digest:
        return Miss("header_checksum")
    try:
        body = _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Miss("not_a_record")
    if body.key != key:
        return Miss("other_key")
    if body.shape != shape or body.payload_nbytes != shape.payload_nbytes:
        return Miss("other_shape")
    payload = record[HEADER_NBYTES : shape.nbytes]
    if codec != RAW:
        unpacker = codec_of(codec)
        if unpacker is None or not unpacker.unpack_into(payload, record[HEADER_NBYTES:came].tobytes(), shape.dtype):
            return Miss("codec")
        record[: _PREFIX.size] = memoryview(_PREFIX.pack(magic, schema, RAW, body_nbytes, digest))
    sums = said_sums(record, shape)
    if body.sums_xxh3_128 and xxhash.xxh3_128_digest(sums.tobytes()) != body.sums_xxh3_128:
        return Miss("header_checksum")
    if not verified and not (body.sums_xxh3_128 and holds(record, shape)):
        return Miss("payload_checksum")
    return body


def ends_at_s(record: memoryview) -> float:
    """When a sealed record, as a tier gets it, is a miss; never for what is no record. Costs some microseconds."""
    front = record[:HEADER_NBYTES]
    if len(front) < HEADER_NBYTES:
        return inf
    magic, _, _, body_nbytes, _ = _PREFIX.unpack_from(front)
    if magic != _MAGIC or body_nbytes > HEADER_NBYTES - _PREFIX.size:
        return inf
    try:
        return _decoder.decode(front[_PREFIX.size : _PREFIX.size + body_nbytes]).expires_at_s
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return inf


def _body(shape: RecordShape, key: bytes, sums_xxh3_128: bytes, expires_at_s: float = float("inf")) -> bytes:
    return msgspec.msgpack.encode(RecordHeader(key, shape, shape.payload_nbytes, sums_xxh3_128, expires_at_s))


@lru_cache(256)
def _sums_nbytes(shape: RecordShape) -> int:
    return 16 * sum(len(group.layers) for group in shape.groups)
