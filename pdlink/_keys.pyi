"""Keyed, chained BLAKE3 over token ids (`csrc/keys`)."""

from collections.abc import Sequence

import numpy as np

def chain(
    root: bytes,
    tokens: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.uint32]],
    chunk_tokens: int,
    kind: str = "",
) -> bytes:
    """Keys of the full chunks of `tokens`, 32 bytes each: keyed_hash(key before, little-endian uint32 ids).

    root: 32 bytes, the key before the first one. kind: one of `kinds()`, "" for the best. A C-contiguous uint32 array
    is read in place; no GIL is held while it is hashed.
    Raises ValueError, TypeError, and OverflowError for a token outside [0, 2**32).
    """

def derive(context: str, material: bytes) -> bytes:
    """BLAKE3's derive_key: 32 bytes."""

def kinds() -> list[str]:
    """Instruction sets this CPU can hash with ("avx512", "sse4.1", "portable"), best first."""
