"""Which worker has the KV of which prompt, by the events that the workers publish. No I/O.

The events are those of vLLM 0.32 and SGLang 0.5.23 (`EventBatch` in MessagePack; maps, arrays in older SGLang):
blocks stored, with their tokens and the block before them; blocks removed; everything cleared. Tokens name a prefix
here, so workers whose blocks have other sizes and other names can be compared with one prompt.
"""

from __future__ import annotations

from pdlink import _index

MAX_BLOCKS = 20_000_000
"""Of all workers, per block size: about 1.1 GB (54 bytes each, measured with 10 million of 16 tokens)."""
MAX_SIZES = 8
"""Block sizes that are told apart; events about others are ignored."""

DEVICE, HOST, DISK, SHARED = range(4)
LOADING = (0.0, 0.1, 0.5, 0.3)
"""By medium, from DEVICE to SHARED: time to bring a token's KV to the device, relative to computing the token.
Source: an 8B model with 128 KB of KV a token that computes 20,000 tokens a second (2.6 GB/s of KV), beside 25 GB/s
from host memory, 5 from an NVMe disk and 8 over a network."""


class KVIndex(_index.Index):
    """Of all workers of one proxy. Not thread-safe."""

    def __init__(self, max_blocks: int = MAX_BLOCKS, loading: tuple[float, float, float, float] = LOADING) -> None:
        super().__init__(max_blocks, MAX_SIZES, loading)
