"""Sets of workloads to go through in one run: sizes from one block to a gigabyte, and pairs of layouts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from .bars import BLOCK_16_TO_128, NHD_TO_HND
from .rounds import DEFAULT

if TYPE_CHECKING:
    from .workload import Workload

HND = "LPBHT"
LARGEST_NBYTES = 1 << 30
SOURCE_NBYTES = 1 << 28
"""Memory for the source of a size: several times what the caches hold. Larger sequences are repetitions of it."""


def sizes(base: Workload, largest_nbytes: int = LARGEST_NBYTES) -> dict[str, Workload]:
    """One block, four times that and so on, up to `largest_nbytes` (1 GiB), each alone.

    Small ones are drawn from pools `base.pool_factor` times as large, so that their blocks are scattered, too.
    """
    block_tokens = math.lcm(base.src_block_tokens, base.dst_block_tokens)
    token_nbytes = base.src.token_nbytes
    counts = [block_tokens]
    while counts[-1] * 4 * token_nbytes < largest_nbytes:
        counts.append(counts[-1] * 4)
    counts.append(max(block_tokens, largest_nbytes // token_nbytes))
    source_tokens = max(1, SOURCE_NBYTES // token_nbytes // block_tokens) * block_tokens
    found = {}
    for num_tokens in counts:
        pool_factor = base.pool_factor if num_tokens * base.pool_factor <= source_tokens else 1
        found[size_name(num_tokens * token_nbytes)] = replace(
            base, num_tokens=num_tokens, pool_factor=pool_factor, source_tokens=source_tokens
        )
    return found


def rounds(workload: Workload) -> int:
    """Rounds of one size: as many as move 4 GiB, but 4 to 12."""
    return min(12, max(4, (4 << 30) // workload.nbytes))


def layouts(base: Workload) -> dict[str, Workload]:
    """The layout pairs that peers of different engines have; the same number of bytes in each, but for MLA."""
    latent = replace(base, num_parts=1, num_heads=1, head_dim=576)
    return {
        DEFAULT: base,
        NHD_TO_HND: replace(base, src_order="LPBTH", dst_order=HND),
        BLOCK_16_TO_128: replace(base, src_block_tokens=16, dst_block_tokens=128),
        "both": replace(base, dst_order=HND, src_block_tokens=16, dst_block_tokens=128),
        "MLA latent": latent,
    }


def size_name(nbytes: int) -> str:
    """In the unit that gives a number below 1024."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes = nbytes // 1024 if nbytes % 1024 == 0 else nbytes / 1024  # type: ignore[assignment]
    return f"{nbytes:.4g} GiB"
