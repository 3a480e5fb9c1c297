"""The KV cache of a worker."""

from __future__ import annotations

from pydantic import Field

from pdlink.config.section import Section


class CacheConfig(Section):
    """The paged KV cache of a worker."""

    block_tokens: int = Field(default=16, ge=1)
    """Tokens per block. The two sides of a link may differ."""
    num_blocks: int = Field(default=1024, ge=2)
    """Blocks in the pool."""
    memory_fraction: float | None = Field(default=None, gt=0, lt=1)
    """With `engine.device` on a GPU: share of its memory that the pool takes, instead of `num_blocks`."""
    order: str = "LPBTH"
    """Order of the axes layer, part (K/V), block, token, head in memory; see `pdlink.kv.layout.paged_layout`."""
    share_prefixes: bool = True
    """Reuse the blocks of an equal prefix inside this worker."""
