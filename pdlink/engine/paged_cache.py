"""The KV cache in fixed blocks of one buffer, in the shape transformers' models expect of `past_key_values`.

The buffer is what a transport registers and a peer reads or writes; the `KVLayout` says where each byte lies, and
the tensors here are views made from that same layout, so the two cannot disagree. Which block belongs to whom is
`BlockPool`'s business. Nothing here is allocated per request.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pdlink.cuda import ops
from pdlink.cuda.buffers import DeviceBuffer
from pdlink.cuda.driver import Device
from pdlink.cuda.kernels import are_built
from pdlink.engine.attention import AttentionPlan, QuerySpan
from pdlink.kv.layout import paged_layout
from pdlink.memory.buffers import Buffer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.engine.models import LoadedModel
    from pdlink.kv.layout import KVLayout


class PagedCache:
    """K and V of all layers. Used by one thread; peers may write blocks that no running request has."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int,
        block_tokens: int,
        order: str = "LPBTH",
        kernels: bool | None = None,
    ) -> None:
        """Allocates the pool where the model is: num_blocks x block_tokens x the model's KV bytes per token.

        kernels: whether ours (`cuda/ops.py`) move tokens into blocks and out of them, or torch's. None: on a GPU, in
        a build that has them.
        Raises OSError or CudaFailure if there is not that much memory, ValueError for an impossible `order`.
        """
        self._dtype: torch.dtype = getattr(torch, model.dtype)
        self.block_tokens = block_tokens
        self.layout: KVLayout = paged_layout(
            dtype=model.dtype,
            itemsize=self._dtype.itemsize,
            num_layers=model.num_layers,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            num_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            order=order,
        )
        self.device: torch.device = model.device
        self.buffer, flat = _allocate(self.layout.extent(0), self.device)
        """Owned by the cache; `close()` drops it."""
        self._views = _views(flat, self.layout, self._dtype)
        self._scratch = [torch.empty(0, dtype=self._dtype, device=self.device)] * 2
        self._kernels = self.device.type == "cuda" and are_built() if kernels is None else kernels
        self.plan: AttentionPlan | None = None
        """Of the forward pass that is running."""
        self._blocks_N = self._tokens_N = self._slots_N = torch.empty(0, dtype=torch.int64)
        self._layer_written: Callable[[int], None] | None = None

    def begin(
        self, spans: Sequence[QuerySpan], *, layer_written: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Prepare a forward pass over `spans`; returns position_ids [1, N].

        layer_written: called with each layer's index once its new KV is in the pool, before the layer's attention
        reads any block. What it raises ends the pass.
        """
        positions = torch.cat([torch.arange(span.start, span.end) for span in spans])
        table = torch.cat([span.blocks_B[torch.arange(span.start, span.end) // self.block_tokens] for span in spans])
        tokens = positions % self.block_tokens
        if self._kernels:
            self._slots_N = (table * self.block_tokens + tokens).to(self.device)
        else:
            self._blocks_N, self._tokens_N = table.to(self.device), tokens.to(self.device)
        self._layer_written = layer_written
        self.plan = AttentionPlan(spans, self.block_tokens, self._dtype, self.device)
        return positions[None].to(self.device)

    def end(self) -> None:
        self.plan = self._layer_written = None

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model in each layer: store the new KV [1, H, N, D], and return it as it came."""
        for part, new in zip(self._views[layer], (key, value), strict=True):
            rows_NHD = new[0].transpose(0, 1)
            if self._kernels:  # K and V have strides of their own: the model rotates K into new memory
                ops.reshape([rows_NHD[:, None]], [part], None, self._slots_N)
            else:
                part[self._blocks_N, self._tokens_N] = rows_NHD
        if self._layer_written is not None:
            self._layer_written(layer)
        return key, value

    def views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer as [block, token, head, element], writable."""
        return self._views[layer]

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of K and V of `blocks` as [block x token, head, element]. The next call overwrites them.

        The memory is kept: touching fresh pages in every layer took nine times as long as the copy (measured, 8 MB).
        """
        parts = self._views[layer]
        size = (len(blocks), *parts[0].shape[1:])
        numel = math.prod(size)
        if self._scratch[0].numel() < numel:
            room = numel * 5 // 4  # answers grow
            self._scratch = [torch.empty(room, dtype=self._dtype, device=self.device) for _ in parts]
        copies = [scratch[:numel].view(size) for scratch in self._scratch]
        if self._kernels:
            tokens = torch.arange(self.block_tokens, device=self.device)
            ops.reshape(parts, copies, (blocks[:, None] * self.block_tokens + tokens).flatten(), None)
        else:
            for part, copy in zip(parts, copies, strict=True):
                torch.index_select(part, 0, blocks, out=copy)
        return copies[0].flatten(0, 1), copies[1].flatten(0, 1)

    def get_seq_length(self, layer: int = 0) -> int:
        """Part of transformers' cache interface; positions are always given, so models do not depend on it."""
        return 0

    def close(self) -> None:
        self.buffer.close()


def _allocate(nbytes: int, device: torch.device) -> tuple[Buffer | DeviceBuffer, torch.Tensor]:
    """A buffer where the model is, and a view of its bytes."""
    if device.type == "cpu":
        host = Buffer(nbytes)
        return host, torch.from_numpy(host.array)
    gpu = Device(device.index or 0)  # torch holds the same context for the rest of the process
    gpu.open()
    buffer = DeviceBuffer(gpu, nbytes)
    view = torch.as_tensor(buffer, device=device)
    view.zero_()
    return buffer, view


def _views(memory: torch.Tensor, layout: KVLayout, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(K, V) of each layer as [block, token, head, element]."""
    flat = memory.view(dtype)
    sizes = (layout.num_blocks, layout.block_tokens, layout.num_heads, layout.head_nbytes // dtype.itemsize)
    views = []
    for layer in layout.layers:
        strides = [nbytes // dtype.itemsize for nbytes in (layer.block_stride, layer.token_stride, layer.head_stride)]
        k, v = (flat.as_strided(sizes, (*strides, 1), part.offset // dtype.itemsize) for part in layer.parts)
        views.append((k, v))
    return views
