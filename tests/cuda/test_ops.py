"""Reshaping tokens: real layouts as views, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pdlink.cuda import ops
from tests.cuda.planes import slow_reshape

B, T, H, D = 6, 4, 4, 16

MakePlanes = Callable[[int], list[torch.Tensor]]


def vllm_flash(layers: int) -> list[torch.Tensor]:
    """[2, B, T, H, D] per layer: K, V, K, V, … in allocations of their own."""
    return [part for _ in range(layers) for part in torch.randn(2, B, T, H, D).bfloat16()]


def vllm_fused_heads(layers: int) -> list[torch.Tensor]:
    """vLLM from 0.26 on: [B, H, T, 2 * D], K and V side by side in a head."""
    caches = [torch.randn(B, H, T, 2 * D).bfloat16() for _ in range(layers)]
    return [half.transpose(1, 2) for cache in caches for half in (cache[..., :D], cache[..., D:])]


def vllm_one_allocation(layers: int) -> list[torch.Tensor]:
    """vLLM from 0.29 on: all layers in one, blocks outermost."""
    cache = torch.randn(B, layers, T, H, 2 * D).bfloat16()
    return [half for layer in range(layers) for half in (cache[:, layer, ..., :D], cache[:, layer, ..., D:])]


def flashinfer_hnd(layers: int) -> list[torch.Tensor]:
    caches = [torch.randn(B, 2, H, T, D).bfloat16() for _ in range(layers)]
    return [cache[:, part].transpose(1, 2) for cache in caches for part in (0, 1)]


def sglang_pools(layers: int) -> list[torch.Tensor]:
    """All K pools, then all V pools, [slot, H, D] each; taken in our order."""
    pools = torch.randn(2, layers, B * T, H, D).bfloat16()
    return [pools[part, layer][:, None] for layer in range(layers) for part in (0, 1)]


LAYOUTS = [vllm_flash, vllm_fused_heads, vllm_one_allocation, flashinfer_hnd, sglang_pools]


@pytest.mark.parametrize("make_dst", LAYOUTS)
@pytest.mark.parametrize("make_src", LAYOUTS)
def test_engines_layouts_become_each_other(make_src: MakePlanes, make_dst: MakePlanes) -> None:
    src, dst = make_src(3), make_dst(3)
    expected = [plane.clone() for plane in dst]
    src_slots, dst_slots = torch.randperm(B * T)[:9], torch.randperm(B * T)[:9]
    ops.reshape(src, dst, src_slots, dst_slots)
    slow_reshape(src, expected, src_slots.tolist(), dst_slots.tolist())
    assert all(torch.equal(a, b) for a, b in zip(dst, expected, strict=True))


def test_mla_s_latent_is_split_and_joined() -> None:
    """FlashInfer keeps MLA's 512 + 64 elements in two caches, vLLM and SGLang in one: a launch for each width."""
    joined = torch.randn(B, T, 576).bfloat16()
    latent, rope = torch.zeros(B, T, 512).bfloat16(), torch.zeros(B, T, 64).bfloat16()
    slots = torch.arange(B * T).flip(0)
    for target, part in ((latent, joined[..., :512]), (rope, joined[..., 512:])):
        ops.reshape([part[:, :, None]], [target[:, :, None]], slots, slots)
    assert torch.equal(torch.cat((latent, rope), 2), joined)


def test_heads_are_dealt_out_to_ranks_and_collected() -> None:
    """TP 1 to 2 and back: a slice of the heads is a view."""
    whole = torch.randn(B, T, H, D).bfloat16()
    ranks = [torch.zeros(B, T, H // 2, D).bfloat16() for _ in range(2)]
    for rank, cache in enumerate(ranks):
        ops.reshape([whole[:, :, rank * 2 : rank * 2 + 2]], [cache])
    assert torch.equal(torch.cat(ranks, 2), whole)
    again = torch.zeros_like(whole)
    for rank, cache in enumerate(ranks):
        ops.reshape([cache], [again[:, :, rank * 2 : rank * 2 + 2]])
    assert torch.equal(again, whole)


def test_block_sizes_may_differ() -> None:
    src = torch.randn(6, 4, H, D)
    dst = torch.zeros(2, 16, H, D)
    table = torch.tensor([5, 0, 3])  # the blocks of a sequence of ten tokens
    src_slots = (table[:, None] * 4 + torch.arange(4)).flatten()[:10]
    ops.reshape([src], [dst], src_slots, torch.arange(16, 26))
    assert torch.equal(dst[1, :10], src.flatten(0, 1)[src_slots])


def test_skipped_tokens_are_left_alone() -> None:
    planes = [torch.randn(B, T, H, D) for _ in range(2)]
    rows = torch.zeros(2, 3, H, D)
    rows_as_planes = [row[:, None] for row in rows]
    ops.reshape(planes, rows_as_planes, torch.tensor([3, -1, 7]))
    assert torch.equal(rows[1, 2], planes[1][1, 3])
    assert not rows[:, 1].any()
    before = [plane.clone() for plane in planes]
    rows += 1
    ops.reshape(rows_as_planes, planes, None, torch.tensor([-1, 5, -1]))
    before[0][1, 1], before[1][1, 1] = 1, 1
    assert all(torch.equal(a, b) for a, b in zip(planes, before, strict=True))


def arguments(**changed: object) -> tuple[object, ...]:
    given: dict[str, object] = {
        "src": [torch.randn(B, T, H, D).bfloat16() for _ in range(2)],
        "dst": [torch.zeros(B, T, H, D).bfloat16() for _ in range(2)],
        "src_slots": torch.tensor([0, -1, 9]),
        "dst_slots": torch.tensor([4, 5, 6]),
        "refused": None,
    }
    return tuple({**given, **changed}.values())


REFUSED = {
    "equally many planes": {"dst": []},
    "differ in shape": {"src": [torch.zeros(B, T, H, D), torch.zeros(B, T, H, 2 * D)[..., :D]]},
    "3 axes": {"src": [torch.zeros(B, T, D)] * 2},
    "must be neighbours": {"src": [torch.zeros(B, T, H, 2 * D).bfloat16()[..., ::2]] * 2},
    "heads and elements differ": {"src": [torch.zeros(B, T, H, 2 * D).bfloat16()] * 2},
    "dtypes differ": {"src": [torch.zeros(B, T, H, D)] * 2},
    "3 and 2 tokens": {"dst_slots": torch.tensor([1, 2])},
    "slots must be": {"src_slots": torch.tensor([1, 2, 3], dtype=torch.int32)},
    "24 and 12 tokens": {
        "src": [torch.zeros(B, T, H, D).bfloat16()] * 2,
        "dst": [torch.zeros(B // 2, T, H, D).bfloat16()] * 2,
        "src_slots": None,
        "dst_slots": None,
    },
    "one int32": {"refused": torch.zeros(1)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.reshape(*arguments(**REFUSED[message]))  # type: ignore[arg-type]
