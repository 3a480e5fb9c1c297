"""`--enable-deterministic-inference` on a machine without a GPU: SGLang wants one of its GPU backends for it, and
replaces torch's operators by ones that do not depend on the batch; the hash behind its draws is a native kernel.

A plugin of SGLang's (`sglang.srt.plugins`), found beside this file. Its sampler stays as it is.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    import torch
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups import choices

    if "torch_native" not in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    batch_invariant_ops.enable_batch_invariant_mode = lambda *_, **__: None
    if not hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu"):
        make: Any = torch.library.Library
        library = make("sgl_kernel", "FRAGMENT")
        library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
        library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
        torch._pdlink_hash = library  # type: ignore[attr-defined] # a library ends with its object


def murmur_hash32(seed: Any, positions: Any, col_indices: Any) -> Any:
    """MurmurHash3 of the words (seed, its upper half, position, column), as `kernels/ops/sampling/murmur_hash.py`."""
    import numpy as np
    import torch

    seeds = seed.numpy().view(np.uint64)[:, None]
    words = [seeds, seeds >> np.uint64(32), positions.numpy().astype(np.uint64)[:, None]]
    words.append(col_indices.numpy().astype(np.uint64)[None, :])
    mask = np.uint64(0xFFFFFFFF)

    def rotated(value: Any, bits: int) -> Any:
        return ((value << np.uint64(bits)) | (value >> np.uint64(32 - bits))) & mask

    found = np.zeros((1, 1), np.uint64)
    for word in words:
        mixed = rotated((word & mask) * np.uint64(0xCC9E2D51) & mask, 15) * np.uint64(0x1B873593) & mask
        found = (rotated(found ^ mixed, 13) * np.uint64(5) + np.uint64(0xE6546B64)) & mask
    found = found ^ np.uint64(16)
    for bits, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        found = (found ^ (found >> np.uint64(bits))) * np.uint64(factor) & mask
    return torch.from_numpy((found ^ (found >> np.uint64(16))).astype(np.uint32))
