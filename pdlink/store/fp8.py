"""fp8 (e4m3) with a scale for each row: half the bytes of bfloat16, and not quite the KV that was stored.

A row is one head's vector of one token, of K or V. Its scale s is the power of two by which its largest value comes
to lie in (224, 448], the upper end of e4m3. Every value x comes back within max(|x| / 16, s / 1024) of itself, and
what came back once is packed again without a further change. Values that are no numbers are not packed.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from pdlink.memory.buffers import Bytes

    Rows = Sequence[tuple[int, int]]
    """Bytes of each group of layers, and of one row in it."""

_DIGEST_NBYTES = 16
_MIN_EXPONENT = -126
"""Of a scale: below it float32 has no reciprocal. Such rows lose more, of values below 1e-35."""
_TYPES = {"bfloat16", "float16", "float32"}


def pack(payload: Bytes, dtype: str, rows: Rows) -> bytes | None:
    """An XXH3-128 of what follows, then for each group the exponents of its scales (int16) and its values.

    None for what is not packed: other types, and infinities or NaN.
    """
    import torch

    if dtype not in _TYPES:
        return None
    pieces: list[bytes] = []
    for group, row_nbytes in _groups(payload, rows):
        values = _as_floats(group, dtype).reshape(-1, row_nbytes // getattr(torch, dtype).itemsize)
        largest = values.abs().amax(dim=1)
        if not bool(torch.isfinite(largest).all()):
            return None
        mantissa, exponent = torch.frexp(largest)
        exponent = (exponent - 9 + (mantissa > 0.875)).clamp(min=_MIN_EXPONENT)
        small = (values * torch.exp2(-exponent.float())[:, None]).to(torch.float8_e4m3fn)
        pieces += [exponent.to(torch.int16).numpy().tobytes(), small.view(torch.uint8).numpy().tobytes()]
    body = b"".join(pieces)
    return xxhash.xxh3_128_digest(body) + body


def unpack_into(payload: Bytes, stored: bytes, dtype: str, rows: Rows) -> bool:
    """Whether `stored` was what `pack` made of so many bytes. `payload` holds values near them then."""
    import torch

    body = stored[_DIGEST_NBYTES:]
    if dtype not in _TYPES or xxhash.xxh3_128_digest(body) != stored[:_DIGEST_NBYTES]:
        return False
    size = getattr(torch, dtype).itemsize
    if len(body) != sum(nbytes // row * 2 + nbytes // size for nbytes, row in rows):
        return False
    at, limit = 0, torch.finfo(getattr(torch, dtype)).max
    for group, row_nbytes in _groups(payload, rows):
        num_rows, num_values = len(group) // row_nbytes, len(group) // size
        exponent = torch.from_numpy(np.frombuffer(body, np.int16, num_rows, at).copy()).float()
        small = torch.from_numpy(np.frombuffer(body, np.uint8, num_values, at + 2 * num_rows).copy())
        at += 2 * num_rows + num_values
        values = small.view(torch.float8_e4m3fn).float().reshape(num_rows, -1) * torch.exp2(exponent)[:, None]
        near = values.clamp(-limit, limit).to(getattr(torch, dtype))
        group[:] = near.reshape(-1).view(torch.uint8).numpy()
    return True


def _groups(payload: Bytes, rows: Rows) -> Iterator[tuple[Bytes, int]]:
    ends = itertools.accumulate(nbytes for nbytes, _ in rows)
    for end, (nbytes, row_nbytes) in zip(ends, rows, strict=True):
        yield payload[end - nbytes : end], row_nbytes


def _as_floats(group: Bytes, dtype: str) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.ascontiguousarray(group)).view(getattr(torch, dtype)).float()
