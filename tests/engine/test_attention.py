"""Paged attention against the same attention written plainly, one query token at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pdlink.engine.forward import AttentionPlan, QuerySpan, paged_attention

HEADS, KV_HEADS, DIM = 6, 2, 16


class _Module(torch.nn.Module):
    def __init__(self, *, is_causal: bool = True) -> None:
        super().__init__()
        self.layer_idx = 0
        self.is_causal = is_causal


@dataclass
class _Cache:
    k: torch.Tensor
    v: torch.Tensor
    plan: AttentionPlan | None = None

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k[blocks].flatten(0, 1), self.v[blocks].flatten(0, 1)


@dataclass
class _Case:
    """Requests with random KV in random blocks of a pool whose other bytes are NaN."""

    cache: Any
    """In place of a `PagedCache`: its blocks, its plan and `gather`."""
    spans: list[QuerySpan]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    histories: list[tuple[torch.Tensor, torch.Tensor]]


def _case(spans: list[tuple[int, int]], block_tokens: int, seed: int) -> _Case:
    generator = torch.Generator().manual_seed(seed)
    num_blocks = sum(-(-end // block_tokens) for _, end in spans) + 3
    free = torch.randperm(num_blocks, generator=generator)
    k, v = (torch.full((num_blocks, block_tokens, KV_HEADS, DIM), math.nan) for _ in range(2))
    made, keys, values, histories = [], [], [], []
    for start, end in spans:
        blocks, free = free[: -(-end // block_tokens)], free[-(-end // block_tokens) :]
        history = tuple(torch.randn(end, KV_HEADS, DIM, generator=generator) for _ in range(2))
        positions = torch.arange(end)
        for pool, new in zip((k, v), history, strict=True):
            pool[blocks[positions // block_tokens], positions % block_tokens] = new
        made.append(QuerySpan(blocks, start, end))
        keys.append(history[0][start:])
        values.append(history[1][start:])
        histories.append((history[0], history[1]))
    num_rows = sum(end - start for start, end in spans)
    query = torch.randn(1, HEADS, num_rows, DIM, generator=generator)
    key, value = (torch.cat(parts).transpose(0, 1)[None] for parts in (keys, values))
    cache = _Cache(k, v, AttentionPlan(made, block_tokens, torch.float32))
    return _Case(cache, made, query, key, value, histories)


def _plain(case: _Case, window: int | None, scaling: float) -> torch.Tensor:
    rows = []
    row = 0
    for span, (keys, values) in zip(case.spans, case.histories, strict=True):
        for position in range(span.start, span.end):
            first = 0 if window is None else max(0, position - window + 1)
            heads = []
            for head in range(HEADS):
                kv_head = head * KV_HEADS // HEADS
                scores = keys[first : position + 1, kv_head] @ case.query[0, head, row] * scaling
                heads.append(scores.softmax(-1) @ values[first : position + 1, kv_head])
            rows.append(torch.stack(heads))
            row += 1
    return torch.stack(rows)[None]


SPANS = [
    [(0, 1)],
    [(0, 9)],
    [(7, 9)],
    [(8, 24), (0, 5), (30, 31), (3, 4), (0, 1), (15, 16), (16, 17), (1, 3)],
    [(n, n + 1) for n in (0, 1, 2, 6, 7, 8, 9, 40, 63, 64)],
]


@pytest.mark.parametrize("window", [None, 1, 5, 8, 100])
@pytest.mark.parametrize("spans", SPANS)
def test_equals_plain_attention(spans: list[tuple[int, int]], window: int | None) -> None:
    for seed, block_tokens in enumerate((1, 4, 8)):
        case = _case(spans, block_tokens, seed)
        out, _ = paged_attention(
            _Module(),
            case.query,
            case.key,
            case.value,
            None,
            paged_cache=case.cache,
            scaling=0.31,
            sliding_window=window,
        )
        torch.testing.assert_close(out, _plain(case, window, 0.31), rtol=1e-4, atol=1e-5)


def test_without_scaling_the_head_size_gives_it() -> None:
    case = _case([(3, 6), (9, 10)], 4, 0)
    out, _ = paged_attention(_Module(), case.query, case.key, case.value, None, paged_cache=case.cache)
    torch.testing.assert_close(out, _plain(case, None, DIM**-0.5), rtol=1e-4, atol=1e-5)


def test_what_an_earlier_request_left_in_a_block_does_not_matter() -> None:
    """The pool of every case above is NaN outside the request's tokens; this one says so by name.

    An fp16 overflow in one request must not become another's, and masking alone would let it: 0 x NaN is NaN.
    """
    case = _case([(9, 10), (2, 3), (5, 8)], 8, 1)
    assert case.cache.k.isnan().any()
    out, _ = paged_attention(_Module(), case.query, case.key, case.value, None, paged_cache=case.cache)
    assert out.isfinite().all()


@pytest.mark.parametrize("option", ["softcap", "s_aux", "position_bias"])
def test_attention_of_another_kind_is_refused(option: str) -> None:
    case = _case([(0, 2)], 4, 0)
    options: dict[str, Any] = {option: torch.ones(1)}
    with pytest.raises(NotImplementedError, match=option):
        paged_attention(_Module(), case.query, case.key, case.value, None, paged_cache=case.cache, **options)
    with pytest.raises(NotImplementedError, match="causal"):
        paged_attention(_Module(is_causal=False), case.query, case.key, case.value, None, paged_cache=case.cache)
    with pytest.raises(NotImplementedError, match="mask"):
        paged_attention(_Module(), case.query, case.key, case.value, torch.ones(2, 2), paged_cache=case.cache)
