"""One forward pass over paged KV: the cache, attention over its blocks, and the model that both are for.

The KV cache lies in fixed blocks of one buffer, in the shape transformers' models expect of `past_key_values`. The
buffer is what a transport registers and a peer reads or writes; the `KVLayout` says where each byte lies, and the
tensors here are views made from that same layout, so the two cannot disagree. Which block belongs to whom is
`BlockPool`'s business. Nothing here is allocated per request.

Attention is registered with transformers, which keeps everything else of the model. A pass gets all tokens of all
requests as one row of N tokens. transformers builds no mask, because ours is an attention implementation it knows no
mask for (masking_utils, 5.23), and calls `paged_attention` once per layer after the cache has written the layer's new
KV. Who may see what is in the `AttentionPlan`, made once per pass:

- a *chunk* is several tokens of one request. If it begins at token 0 its KV is what the pass has just computed,
  otherwise KV is gathered from its blocks;
- *single* tokens (decode, mostly) of requests of similar length are gathered and computed together.

Tensor shapes, by suffix: N rows of the flattened batch, S sequences of one group, L KV positions, B blocks, T tokens
of a block, H KV heads, Q query heads, R query heads per KV head, D elements of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from pdlink.cuda import ops
from pdlink.cuda.buffers import DeviceBuffer
from pdlink.cuda.driver import Device
from pdlink.cuda.kernels import are_built
from pdlink.kv.layout import paged_layout
from pdlink.memory.buffers import Buffer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.kv.layout import KVLayout

_CPU = torch.device("cpu")

IMPLEMENTATION = "pdlink_paged"
"""`attn_implementation` of every model the engine runs."""


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """Tokens [start, end) of one request, the next rows of the flattened batch."""

    blocks_B: torch.Tensor
    """int64, from token 0 on."""
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    rows: slice
    blocks_B: torch.Tensor
    """Blocks from the first visible one to that of the last token."""
    skipped: int
    num_visible: int
    """Visible tokens after the skipped ones."""
    mask_NL: torch.Tensor | None
    """Added to the scores; None where plain causal order says it all."""


@dataclass(frozen=True, slots=True)
class _Singles:
    rows_S: torch.Tensor
    blocks: torch.Tensor
    """Blocks of all S, padded with each one's last block to equal length, in one list."""
    unused: torch.Tensor
    """Rows of the gathered KV beyond the sequence. They are masked, but 0 x NaN is NaN, so what an earlier holder of
    the block left there must be wiped."""
    mask_S11L: torch.Tensor


class AttentionPlan:
    """Which rows of one forward pass attend to which blocks; made once for each size of sliding window."""

    def __init__(
        self, spans: Sequence[QuerySpan], block_tokens: int, dtype: torch.dtype, device: torch.device = _CPU
    ) -> None:
        """device: where attention is computed; the plan itself is made on the CPU, where the lists of blocks are."""
        self._spans = spans
        self._device = device
        self._block_tokens = block_tokens
        self._dtype = dtype
        self._by_window: dict[int | None, tuple[list[_Chunk], list[_Singles]]] = {}

    def parts(self, window: int | None) -> tuple[list[_Chunk], list[_Singles]]:
        known = self._by_window.get(window)
        if known is not None:
            return known
        chunks: list[_Chunk] = []
        groups: dict[int, list[tuple[int, QuerySpan]]] = {}
        row = 0
        for span in self._spans:
            if span.end - span.start > 1:
                chunks.append(self._chunk(row, span, window))
            else:
                # Padding to the longest of a group costs at most twice the shortest.
                visible = span.end if window is None else min(span.end, window)
                groups.setdefault(visible.bit_length(), []).append((row, span))
            row += span.end - span.start
        made = self._by_window[window] = chunks, [self._singles(group, window) for group in groups.values()]
        return made

    def _chunk(self, row: int, span: QuerySpan, window: int | None) -> _Chunk:
        size = self._block_tokens
        first = 0 if window is None else max(0, span.start - window + 1)
        blocks = span.blocks_B[first // size : -(-span.end // size)]
        mask = None
        if span.start > 0 or (window is not None and span.end > window):
            queries = torch.arange(span.start, span.end)[:, None]
            keys = torch.arange(first, span.end)[None, :]
            mask = self._mask(queries, keys, window)
        rows = slice(row, row + span.end - span.start)
        return _Chunk(rows, blocks.to(self._device), first % size, span.end - first, mask)

    def _singles(self, group: list[tuple[int, QuerySpan]], window: int | None) -> _Singles:
        size = self._block_tokens
        tables = []
        starts = []
        for _, span in group:
            first = 0 if window is None else max(0, span.end - window) // size
            tables.append(span.blocks_B[first : -(-span.end // size)])
            starts.append(first * size)
        longest = max(len(table) for table in tables)
        blocks = torch.cat([torch.cat((table, table[-1:].expand(longest - len(table)))) for table in tables])
        keys_SL = torch.tensor(starts)[:, None] + torch.arange(longest * size)[None, :]
        queries_S1 = torch.tensor([span.end - 1 for _, span in group])[:, None]
        unused = (keys_SL > queries_S1).flatten().nonzero().flatten()
        mask = self._mask(queries_S1, keys_SL, window)
        rows = torch.tensor([row for row, _ in group])
        there = self._device
        return _Singles(rows.to(there), blocks.to(there), unused.to(there), mask[:, None, None, :])

    def _mask(self, queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
        visible = keys <= queries
        if window is not None:
            visible &= keys > queries - window
        mask = torch.zeros(visible.shape, dtype=self._dtype).masked_fill_(~visible, float("-inf"))
        return mask.to(self._device)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged_cache: PagedCache,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface. query: [1, Q, N, D]; key, value: [1, H, N, D], already in the cache.

    Returns [1, N, Q, D]. Raises NotImplementedError for any other kind of attention.
    """
    unknown = sorted(name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None)
    if unknown or attention_mask is not None or not getattr(module, "is_causal", True):
        what = ", ".join(unknown) or ("a mask of its own" if attention_mask is not None else "no causal order")
        raise NotImplementedError(f"{type(module).__name__} attends with {what}, which paged attention does not do")
    plan = paged_cache.plan
    if plan is None:
        raise RuntimeError("paged attention was called outside a forward pass of the engine")
    chunks, groups = plan.parts(sliding_window)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    num_kv_heads = key.shape[1]
    out_NQD = query.new_empty(query.shape[2], query.shape[1], value.shape[-1])
    for chunk in chunks:
        if chunk.mask_NL is None:
            k, v = key[:, :, chunk.rows], value[:, :, chunk.rows]
        else:
            seen = slice(chunk.skipped, chunk.skipped + chunk.num_visible)
            k, v = (x_LHD[seen].transpose(0, 1)[None] for x_LHD in paged_cache.gather(layer, chunk.blocks_B))
        out = scaled_dot_product_attention(
            query[:, :, chunk.rows],
            k,
            v,
            attn_mask=chunk.mask_NL,
            is_causal=chunk.mask_NL is None,
            scale=scaling,
            enable_gqa=query.shape[1] != num_kv_heads,
        )
        out_NQD[chunk.rows] = out[0].transpose(0, 1)
    for group in groups:
        num_singles, head_dim = len(group.rows_S), query.shape[-1]
        q_SHRD = query[0].transpose(0, 1)[group.rows_S].reshape(num_singles, num_kv_heads, -1, head_dim)
        for x_LHD in (kv := paged_cache.gather(layer, group.blocks)):
            x_LHD.index_fill_(0, group.unused, 0)
        k, v = (x_LHD.view(num_singles, -1, *x_LHD.shape[1:]).transpose(1, 2) for x_LHD in kv)
        # The query heads of one KV head take the place of query tokens, so that K and V need not be repeated.
        out = scaled_dot_product_attention(q_SHRD, k, v, attn_mask=group.mask_S11L, scale=scaling)
        out_NQD[group.rows_S] = out.flatten(1, 2)
    return out_NQD[None], None


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers. Safe to call again."""
    AttentionInterface.register(IMPLEMENTATION, paged_attention)


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
        """Of the forward pass that is running; None between two."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    model: Any
    """A transformers causal LM in eval mode, set to paged attention."""
    tokenizer: Any
    name: str
    revision: str
    """What the weights depend on besides the name: the hub commit where it is known."""
    content: str
    """Digest of config, tokenizer and weights."""
    dtype: str
    """As torch spells it ("float32"), of weights and KV."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Token ids lie in [0, vocab_size)."""
    longest_token: int
    """Characters of the longest token's text, at most."""
    eos_token_ids: frozenset[int]
    max_tokens: int
    """Longest prompt plus answer: the smaller of what is configured and what the model has positions for."""
    device: torch.device = torch.device("cpu")
    """Where weights and KV are."""

    def logits(
        self,
        cache: PagedCache,
        tokens: torch.Tensor,
        spans: Sequence[QuerySpan],
        rows: Sequence[int],
        *,
        layer_written: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """One forward pass: float32 logits [len(rows), vocab_size] of those rows of the flattened batch, on the CPU.

        tokens: [N] ids of `spans`, one after the other; their KV is in `cache` afterwards. layer_written: see
        `PagedCache.begin`. Raises RuntimeError when the model cannot compute (out of memory, for one).
        """
        positions = cache.begin(spans, layer_written=layer_written)
        try:
            with torch.inference_mode():
                output = self.model(
                    tokens[None].to(self.device),
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=torch.tensor(rows, dtype=torch.int64).to(self.device),
                    paged_cache=cache,
                )
        finally:
            cache.plan = None
        return cast("torch.Tensor", output.logits[0].float().cpu())
