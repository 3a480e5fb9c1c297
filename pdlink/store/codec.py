"""Codecs: how a record's payload is packed in the tiers below memory; memory keeps records as they are.

zstd and lz4 are lossless. fp8 is not (`fp8.py`): it packs only records whose shape says that it may (`lossy`), and
these have keys of their own, so that who wants exact KV never finds them.

Floats are packed by planes: first the lowest byte of every element, then the next one. Exponents vary little and lie
in one plane, so normally distributed bfloat16 packs to 0.70 of its size, and to 0.81 without planes (zstd).
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pdlink.errors import ConfigError
from pdlink.extras import installing
from pdlink.store import fp8

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.memory.buffers import Bytes
    from pdlink.store.fp8 import Rows

RAW = 0
_ZSTD, _LZ4, _FP8 = 1, 2, 3
FP8 = "fp8"


class Codec(NamedTuple):
    number: int
    """In the header of a record."""
    pack: Callable[[Bytes, str, Rows], bytes | None]
    """A payload, its dtype, and its rows (`fp8.Rows`); None where it is to stay as it is."""
    unpack_into: Callable[[Bytes, bytes, str, Rows], bool]
    """Whether bytes were what `pack` made of a payload of that length, which holds it then."""
    lossy: str = ""
    """Its name, where what comes back is not what was packed."""


def make_codec(name: str, setting: str = "tiers.codec") -> Codec | None:
    """None for "raw". Raises ConfigError, about `setting`, for a name that is no codec, or without its library."""
    if name == "raw":
        return None
    if name == "cachegen":
        raise ConfigError(
            f"{setting}: got {name!r}, a coder for GPUs that changes the KV; expected raw, {', '.join(_MADE)}; "
            "use one of them"
        )
    if name not in _MADE:
        raise ConfigError(f"{setting}: got {name!r}; expected raw, {', '.join(_MADE)}; use one of them")
    try:
        return _MADE[name]()
    except ImportError as error:
        raise ConfigError(
            f"{setting}: got {name!r}, which needs a library ({error}); {installing('store')}, or use raw"
        ) from error


def codec_of(number: int) -> Codec | None:
    """For a number in a record's header; None for one that is not known, or whose library is missing."""
    try:
        return {_ZSTD: _zstd, _LZ4: _lz4, _FP8: _fp8}[number]()
    except (KeyError, ImportError):
        return None


def _by_planes(number: int, pack: Callable[[bytes], bytes], unpack: Callable[[memoryview, int], bytes]) -> Codec:
    """Of a library. unpack: takes the length of what was packed; raises ValueError if anything is wrong."""

    def packed(payload: Bytes, dtype: str, _: Rows) -> bytes:
        size = _itemsize(dtype, len(payload))
        return pack(payload.reshape(-1, size).T.tobytes())

    def unpack_into(payload: Bytes, stored: bytes, dtype: str, _: Rows) -> bool:
        try:
            planes = unpack(memoryview(stored), len(payload))
        except ValueError:
            return False
        size = _itemsize(dtype, len(payload))
        payload.reshape(-1, size)[:] = np.frombuffer(planes, np.uint8).reshape(size, -1).T
        return True

    return Codec(number, packed, unpack_into)


def _itemsize(dtype: str, nbytes: int) -> int:
    bits = re.search(r"16|32|64", dtype)
    size = int(bits.group()) // 8 if bits else 1
    return size if nbytes % size == 0 else 1


def _zstd() -> Codec:
    zstd = importlib.import_module("zstandard")

    def unpack(stored: memoryview, nbytes: int) -> bytes:
        try:
            if zstd.frame_content_size(stored) != nbytes:  # looked at first: it is what decompress allocates
                raise ValueError("another length")
            whole: bytes = zstd.ZstdDecompressor().decompress(stored)
        except zstd.ZstdError as error:
            raise ValueError(str(error)) from None
        return whole

    def pack(planes: bytes) -> bytes:
        result: bytes = zstd.ZstdCompressor(level=1).compress(planes)
        return result

    return _by_planes(_ZSTD, pack, unpack)


def _lz4() -> Codec:
    lz4 = importlib.import_module("lz4.block")

    def unpack(stored: memoryview, nbytes: int) -> bytes:
        try:
            whole: bytes = lz4.decompress(stored, uncompressed_size=nbytes)
        except lz4.LZ4BlockError as error:
            raise ValueError(str(error)) from None
        if len(whole) != nbytes:
            raise ValueError("another length")
        return whole

    def pack(planes: bytes) -> bytes:
        result: bytes = lz4.compress(planes, store_size=False)
        return result

    return _by_planes(_LZ4, pack, unpack)


def _fp8() -> Codec:
    return Codec(_FP8, fp8.pack, fp8.unpack_into, FP8)


_MADE: dict[str, Callable[[], Codec]] = {"zstd": _zstd, "lz4": _lz4, FP8: _fp8}
