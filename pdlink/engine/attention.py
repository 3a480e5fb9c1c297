"""Attention over paged KV, registered with transformers, which keeps everything else of the model.

Tensor shapes, by suffix: N rows of the flattened batch, S sequences of one group, L KV positions, B blocks, T tokens
of a block, H KV heads, Q query heads, R query heads per KV head, D elements of a head.

A forward pass gets all tokens of all requests as one row of N tokens. transformers builds no mask, because ours is
an attention implementation it knows no mask for (masking_utils, 5.23), and calls `paged_attention` once per layer
after the cache has written the layer's new KV. Who may see what is in the `AttentionPlan`, made once per pass:

- a *chunk* is several tokens of one request. If it begins at token 0 its KV is what the pass has just computed,
  otherwise KV is gathered through the block table;
- *single* tokens (decode, mostly) of requests of similar length are gathered and computed together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

if TYPE_CHECKING:
    from collections.abc import Sequence

_CPU = torch.device("cpu")

IMPLEMENTATION = "pdlink_paged"
"""`attn_implementation` of every model the engine runs."""


class PagedKV(Protocol):
    """What attention needs of the cache."""

    plan: AttentionPlan | None

    def gather(self, layer: int, blocks_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of K and V of these blocks, one after the other: kv_LHD. The next call overwrites them."""


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """Tokens [start, end) of one request, the next rows of the flattened batch."""

    blocks_B: torch.Tensor
    """Block table, int64, from token 0 on."""
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
    """Block tables of all S, padded with each one's last block to equal length, in one list."""
    unused: torch.Tensor
    """Rows of the gathered KV beyond the sequence. They are masked, but 0 x NaN is NaN, so what an earlier holder of
    the block left there must be wiped."""
    mask_S11L: torch.Tensor


class AttentionPlan:
    """Which rows of one forward pass attend to which blocks; made once for each size of sliding window."""

    def __init__(
        self, spans: Sequence[QuerySpan], block_tokens: int, dtype: torch.dtype, device: torch.device = _CPU
    ) -> None:
        """device: where attention is computed; the plan itself is made on the CPU, where the block tables are."""
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
    paged_cache: PagedKV,
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
