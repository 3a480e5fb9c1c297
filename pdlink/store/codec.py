"""Codecs: how a record's payload is packed in the tiers below memory; memory keeps records as they are.

Floats are packed by planes: first the lowest byte of every element, then the next one. Exponents vary little and lie
in one plane, so normally distributed bfloat16 packs to 0.70 of its size, and to 0.81 without planes.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pdlink.errors import ConfigError
from pdlink.extras import installing

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.memory.buffers import Bytes

RAW = 0
_ZSTD = 1


class Codec(NamedTuple):
    number: int
    """In the header of a record."""
    pack: Callable[[Bytes, str], bytes]
    """A payload, and its dtype."""
    unpack_into: Callable[[Bytes, bytes, str], bool]
    """Whether bytes were what `pack` made of a payload of that length, which holds it then."""


def make_codec(name: str, setting: str = "tiers.codec") -> Codec | None:
    """None for "raw". Raises ConfigError, about `setting`, for a name that is no codec, or without its library."""
    if name == "raw":
        return None
    if name != "zstd":
        raise ConfigError(f"{setting}: got {name!r}; expected raw or zstd; use one of them")
    try:
        return _zstd()
    except ImportError as error:
        raise ConfigError(
            f"{setting}: got {name!r}, which needs a library ({error}); {installing('store')}, or use raw"
        ) from error


def codec_of(number: int) -> Codec | None:
    """For a number in a record's header; None for one that is not known, or whose library is missing."""
    try:
        return _zstd() if number == _ZSTD else None
    except ImportError:
        return None


def _itemsize(dtype: str, nbytes: int) -> int:
    bits = re.search(r"16|32|64", dtype)
    size = int(bits.group()) // 8 if bits else 1
    return size if nbytes % size == 0 else 1


def _zstd() -> Codec:
    zstd = importlib.import_module("zstandard")

    def pack(payload: Bytes, dtype: str) -> bytes:
        planes = payload.reshape(-1, _itemsize(dtype, len(payload))).T.tobytes()
        result: bytes = zstd.ZstdCompressor(level=1).compress(planes)
        return result

    def unpack_into(payload: Bytes, stored: bytes, dtype: str) -> bool:
        try:
            if zstd.frame_content_size(stored) != len(payload):  # looked at first: it is what decompress allocates
                return False
            planes: bytes = zstd.ZstdDecompressor().decompress(stored)
        except zstd.ZstdError:
            return False
        size = _itemsize(dtype, len(payload))
        payload.reshape(-1, size)[:] = np.frombuffer(planes, np.uint8).reshape(size, -1).T
        return True

    return Codec(_ZSTD, pack, unpack_into)
