"""HiCache's host pools on a machine without a GPU: SGLang pins their memory and copies with kernels for GPUs.

A plugin of SGLang's (`sglang.srt.plugins`), found beside this file; tests without a server call `install`.
"""

from __future__ import annotations

from typing import Any


def install(*, registered: bool = False) -> None:
    """registered: SGLang's own code makes the pools, as for a GPU, and calls the CUDA runtime, which the test has."""
    from sglang.srt.mem_cache.pool_host import base, common, mamba, mha, mla

    def allocate(
        dims: tuple[int, ...], *, dtype: Any, device: str, pin_memory: bool, allocator: Any, **_: object
    ) -> Any:
        return allocator.allocate(dims, dtype=dtype, device=device)

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 28
    if not registered:
        common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
    made = base.HostKVCache.__init__

    def unpinned(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **{**kwargs, "pin_memory": False})

    if not registered:
        base.HostKVCache.__init__ = unpinned
    for module in (mamba, mha, mla):
        for function in (transfer_kv_direct, transfer_kv_all_layer_direct_lf_pf, transfer_kv_per_layer_direct_pf_lf):
            setattr(module, function.__name__, function)


def transfer_kv_direct(
    src_layers: list[Any], dst_layers: list[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: list[Any], dst_ptrs: list[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """From layers of slots, K's before V's, to [page, layer, token, head, dim] for each part."""
    each = len(src_ptrs) // len(dst_ptrs)
    pages = dst_indices[::page_size] // page_size
    for number, source in enumerate(src_ptrs):
        target = dst_ptrs[number // each]
        target[pages, number % each] = source[src_indices].reshape(len(pages), page_size, *source.shape[1:])


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: list[Any], dst_ptrs: list[Any], src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    pages = src_indices[::page_size] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].reshape(len(dst_indices), *target.shape[1:])
