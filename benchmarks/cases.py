"""Sets of workloads to go through in one run: sizes from one block to a gigabyte, and pairs of layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .bars import BLOCK_16_TO_128, NHD_TO_HND
from .rounds import DEFAULT

if TYPE_CHECKING:
    from .workload import Workload

HND = "LPBHT"
LARGEST_NBYTES = 1 << 30


def sizes(base: Workload) -> dict[str, Workload]:
    """One block, four times that and so on, up to 1 GiB, each drawn from a pool of its own size."""
    found = {}
    num_tokens = max(base.src_block_tokens, base.dst_block_tokens)
    token_nbytes = base.src.token_nbytes
    while num_tokens * token_nbytes < LARGEST_NBYTES:
        found[size_name(num_tokens * token_nbytes)] = replace(base, num_tokens=num_tokens, pool_factor=1)
        num_tokens *= 4
    last = LARGEST_NBYTES // token_nbytes
    return found | {size_name(last * token_nbytes): replace(base, num_tokens=last, pool_factor=1)}


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
