"""vLLM's KV tensors as layouts: the bytes of a token lie where vLLM's own kernels put them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch

from pdlink import _copy
from pdlink.integrations.shared_allocation import SharedAllocation
from pdlink.integrations.vllm_parts.layout import (
    COLUMNS,
    PACKED,
    ROWS,
    STATE,
    CacheGroups,
    GroupKind,
    LayerView,
    UnsupportedCache,
    describe,
)
from pdlink.integrations.vllm_parts.memory import regions
from pdlink.kv.plan import bind, template
from pdlink.memory.borrowed import BorrowedBuffer
from pdlink.memory.buffers import Buffer
from pdlink.protocol.messages import MAX_HELLO_NBYTES, VERSION, Envelope, Hello, Identity, encode

HEADS, SIZE, LAYERS = 3, 8, 2

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Write = Callable[[torch.Tensor, int, int, int, torch.Tensor, torch.Tensor], None]
"""(cache, block, slot, head, K vector, V vector)"""


def _fused(cache: torch.Tensor, block: int, slot: int, head: int, key: torch.Tensor, value: torch.Tensor) -> None:
    cache[block, head, slot] = torch.cat([key, value])


def _split(cache: torch.Tensor, block: int, slot: int, head: int, key: torch.Tensor, value: torch.Tensor) -> None:
    cache[block, 0, slot, head], cache[block, 1, slot, head] = key, value


def _outer(cache: torch.Tensor, block: int, slot: int, head: int, key: torch.Tensor, value: torch.Tensor) -> None:
    cache[0, block, slot, head], cache[1, block, slot, head] = key, value


def _columns(cache: torch.Tensor, block: int, slot: int, head: int, key: torch.Tensor, value: torch.Tensor) -> None:
    tokens = cache.shape[2]  # as vLLM 0.32 does: K of a block column-major in its first half, V in its second
    halves = cache.view(cache.shape[0], HEADS, 2, tokens * SIZE)
    halves[block, head, 0].view(SIZE, tokens)[:, slot] = key
    halves[block, head, 1].view(tokens, SIZE)[slot] = value


def _caches(kind: str, blocks: int, tokens: int) -> tuple[list[torch.Tensor], Write]:
    """One tensor per layer, all in one allocation where vLLM does so."""
    if kind in ("fused", "fused, heads inside", "columns"):
        every = torch.zeros(LAYERS, blocks, HEADS, tokens, 2 * SIZE)
        if kind == "fused, heads inside":
            every = torch.zeros(LAYERS, blocks, tokens, HEADS, 2 * SIZE).transpose(2, 3)
        return list(every), _columns if kind == "columns" else _fused
    if kind == "all layers in a block":
        return list(torch.zeros(blocks, LAYERS, HEADS, tokens, 2 * SIZE).transpose(0, 1)), _fused
    if kind == "split":
        return [torch.zeros(blocks, 2, tokens, HEADS, SIZE) for _ in range(LAYERS)], _split
    if kind == "split outside":
        return [torch.zeros(2, blocks, tokens, HEADS, SIZE) for _ in range(LAYERS)], _outer
    raise AssertionError(kind)


def _views(tensors: list[torch.Tensor]) -> tuple[list[LayerView], list[Bytes]]:
    buffers, places = regions(tensors, [])
    views = [
        LayerView(f"layer.{index}", tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size(), *place)
        for index, (tensor, place) in enumerate(zip(tensors, places, strict=True))
    ]
    return views, [cast("BorrowedBuffer", buffer).array for buffer in buffers]


ROW_KINDS = ["fused", "fused, heads inside", "all layers in a block", "split", "split outside"]


@pytest.mark.parametrize(
    ("source", "target"), [(a, b) for a in ROW_KINDS for b in ROW_KINDS] + [("columns", "columns")]
)
@pytest.mark.parametrize(("src_tokens", "dst_tokens"), [(4, 4), (16, 4), (4, 16)])
def test_tokens_arrive_whatever_the_form_and_block_size(
    source: str, target: str, src_tokens: int, dst_tokens: int
) -> None:
    length, start = 37, 5
    torch.manual_seed(src_tokens * 100 + dst_tokens)
    tables = {"src": torch.randperm(40)[:40].tolist(), "dst": torch.randperm(40)[:40].tolist()}
    sides = {}
    for name, kind, tokens in (("src", source, src_tokens), ("dst", target, dst_tokens)):
        tensors, write = _caches(kind, 40, tokens)
        views, arrays = _views(tensors)
        form = COLUMNS if kind == "columns" else ROWS
        cache = describe(views, GroupKind((), form, head_size=SIZE, dtype="float32"))
        cache.layout.check(name)
        cache.layout.check_writable(name)
        assert all(cache.layout.extent(region) <= array.size for region, array in enumerate(arrays))
        sides[name] = (tensors, write, cache, arrays)
    keys, values = torch.randn(2, LAYERS, length, HEADS, SIZE)
    expected, _ = _caches(target, 40, dst_tokens)

    def fill(tensors: list[torch.Tensor], write: Write, table: list[int], tokens: int, first: int) -> None:
        for layer in range(LAYERS):
            for token in range(first, length):
                for head in range(HEADS):
                    block, slot = table[token // tokens], token % tokens
                    write(tensors[layer], block, slot, head, keys[layer, token, head], values[layer, token, head])

    fill(sides["src"][0], sides["src"][1], tables["src"], src_tokens, 0)
    fill(expected, sides["dst"][1], tables["dst"], dst_tokens, start)
    src, dst = sides["src"][2], sides["dst"][2]
    plan = bind(
        template(src.layout, dst.layout),
        tables["src"][start // src_tokens :],
        tables["dst"][start // dst_tokens :],
        start,
        length,
    )
    for layer in range(len(src.layout.layers)):
        for run_list in plan.run_lists(layer):
            runs = run_list.runs + np.array([run_list.src_base, run_list.dst_base, 0])
            _copy.memcpy_runs(sides["dst"][3][run_list.dst_region], sides["src"][3][run_list.src_region], runs)
    for got, wanted in zip(sides["dst"][0], expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("shape", [(6, 4, 24), (6, 1, 4, 24)])
def test_mla_is_one_latent(shape: tuple[int, ...]) -> None:
    views, _ = _views([torch.zeros(shape) for _ in range(LAYERS)])
    layout = describe(views, GroupKind((), ROWS, latent=True, head_size=24, dtype="bfloat16")).layout
    assert (layout.num_blocks, layout.block_tokens, layout.num_heads, layout.head_nbytes) == (6, 4, 1, 96)
    assert [len(layer.parts) for layer in layout.layers] == [1, 1]
    assert layout.token_nbytes == LAYERS * 96


def test_blocks_of_a_form_of_their_own_travel_whole() -> None:
    views, _ = _views(list(torch.zeros(LAYERS, 6, HEADS, 32, 2 * SIZE)))
    cache = describe(views, GroupKind((), PACKED, head_size=SIZE, dtype="float32"))
    assert cache.layout.position_tokens == 32
    assert (cache.layout.block_tokens, cache.layout.head_nbytes) == (1, HEADS * 32 * 2 * SIZE * 4)
    other = describe(views, GroupKind((), COLUMNS, head_size=SIZE, dtype="float32"))
    assert cache.layout.dtype != other.layout.dtype, "the handshake refuses a peer with another form"


def test_axes_inside_such_a_block_may_be_in_any_order_but_it_has_no_holes() -> None:
    kind = GroupKind((), PACKED, head_size=SIZE, dtype="float32")
    views, _ = _views([torch.zeros(6, 32, HEADS, SIZE).transpose(1, 2)])
    assert describe(views, kind).layout.head_nbytes == HEADS * 32 * SIZE * 4
    views, _ = _views([torch.zeros(6, HEADS, 32, SIZE)[..., :4]])
    with pytest.raises(UnsupportedCache, match="form that is not known"):
        describe(views, kind)


def test_latents_and_an_indexers_keys_share_lists_of_blocks_and_travel_whole() -> None:
    """The scales of an indexer's block lie behind all of its keys: a token's row is no token."""
    latents, _ = _views([torch.zeros(6, 32, 24) for _ in range(LAYERS)])
    keys, _ = _views([torch.zeros(6, 32, 132, dtype=torch.uint8) for _ in range(LAYERS)])
    latent = describe(latents, GroupKind((), PACKED, latent=True, head_size=24, dtype="bfloat16"))
    indexer = describe(
        [replace(view, name=f"{view.name}.indexer", region=view.region + 8) for view in keys],
        GroupKind((), PACKED, latent=True, head_size=132, dtype="uint8 DEEPSEEK_V32_INDEXER"),
    )
    cache = CacheGroups.of([latent, indexer], 6)
    assert [layout.position_tokens for layout in cache.groups.layouts] == [32, 32]
    assert cache.groups.overlaid == ()
    assert [layout.head_nbytes for layout in cache.groups.layouts] == [32 * 24 * 4, 32 * 132]
    assert cache.groups.needed(0, 33) == ((0, 2), (0, 2)), "33 tokens are two blocks of both"
    assert (latent.shard(1, 2), indexer.shard(0, 2)) == (latent, indexer), "each rank has the same"


def test_layers_that_share_a_cache_are_sent_once() -> None:
    one = torch.zeros(6, HEADS, 4, 2 * SIZE)
    views, _ = _views([one, one])
    cache = describe(views, GroupKind((), ROWS, head_size=SIZE, dtype="float32"))
    assert cache.planes == {"layer.0": (0,), "layer.1": ()}


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [torch.zeros(6, 7)],
        [torch.zeros(6, 3, 4, 5, 6)],
        [torch.zeros(6, HEADS, 4, 2 * SIZE), torch.zeros(6, HEADS + 1, 4, 2 * SIZE)],
        [torch.zeros(6, HEADS, 2 * SIZE, 4).transpose(2, 3)],
    ],
)
def test_a_form_that_is_not_known_is_refused_by_name(tensors: list[torch.Tensor]) -> None:
    views, _ = _views(tensors)
    with pytest.raises(UnsupportedCache):
        describe(views, GroupKind((), ROWS, head_size=SIZE, dtype="float32"))


@pytest.mark.parametrize("shape", [(6, HEADS, 32), (6, HEADS, 32, 2, SIZE)])
def test_columns_of_other_axes_are_refused_by_name(shape: tuple[int, ...]) -> None:
    views, _ = _views([torch.zeros(shape)])
    with pytest.raises(UnsupportedCache):
        describe(views, GroupKind((), COLUMNS, head_size=SIZE, dtype="float32"))


def test_a_cache_allocated_in_our_context_is_shared_memory() -> None:
    context = SharedAllocation()
    with context:
        cache = torch.zeros(1 << 20, dtype=torch.int8, device=torch.device("cpu"))
        small = torch.zeros(16)
    view = cache.view(torch.float32).view(2, -1)
    found, places = regions([view[1], small], context.buffers)
    buffers = cast("list[Buffer]", found)
    assert buffers[0] is context.buffers[0]
    assert buffers[0].fd >= 0
    assert places[0] == (0, 1 << 19)
    assert buffers[1].fd < 0, "what somebody else allocated cannot be mapped by a peer"
    view[1, 0] = 1.0
    assert buffers[0].array[1 << 19 :][:4].view(np.float32)[0] == 1.0
    assert torch.zeros(4).sum() == 0, "outside the context nothing has changed"


def test_memory_of_a_device_is_refused_by_its_name() -> None:
    with pytest.raises(UnsupportedCache, match="meta"):
        regions([torch.zeros(4, device="meta")], [])


def _state(num_blocks: int = 6, page: int = 64, nbytes: int = 50) -> LayerView:
    return LayerView("state", (num_blocks, 1, 1, nbytes), (page, nbytes, nbytes, 1), 1, 0, 0)


def test_a_state_is_one_piece_of_its_page() -> None:
    kind = GroupKind(("state",), STATE, dtype="[(3, 256)] ['float32']", block_tokens=4096)
    cache = describe([_state()], kind)
    (layer,) = cache.layout.layers
    assert (cache.layout.state, cache.layout.block_tokens, cache.layout.head_nbytes) == (True, 4096, 50)
    assert (layer.block_stride, layer.token_stride) == (64, 0)
    cache.layout.check("own")
    cache.layout.check_writable("own")
    assert cache.shard(0, 1) is cache
    with pytest.raises(UnsupportedCache, match="shards: got 2 for each rank, of recurrent states"):
        cache.shard(0, 2)
    with pytest.raises(UnsupportedCache, match="form that is not known"):
        describe([replace(_state(), shape=(6, 2, 1, 25), strides=(64, 30, 25, 1))], kind)


def test_heads_that_cannot_be_divided_are_refused_by_name() -> None:
    views, _ = _views(list(torch.zeros(LAYERS, 6, HEADS, 32, 2 * SIZE)))
    for form, message in (
        (ROWS, "which has 3 KV heads; expected divisors"),
        (PACKED, "blocks that only a kernel can"),
    ):
        cache = describe(views, GroupKind((), form, head_size=SIZE, dtype="bfloat16"))
        with pytest.raises(UnsupportedCache, match=f"shards: got 2 for each rank, .*{message}"):
            cache.shard(0, 2)


def test_groups_are_laid_over_each_other_and_counted_together() -> None:
    """Two layers of attention in blocks that the kernel splits, and a state in the same pages."""
    tensors, _ = _caches("fused", 8, 4)
    views, _ = _views(tensors)
    full = describe(views, GroupKind((), ROWS, head_size=SIZE, dtype="float32", block_tokens=8, window=5))
    state = describe([_state(4)], GroupKind(("state",), STATE, dtype="u8", block_tokens=100))
    cache = CacheGroups.of([full, state], 4)
    assert cache.planes == {"layer.0": (0,), "layer.1": (1,), "state": (2,)}
    assert cache.kernel_blocks(((3, 1), (2,))) == [[6, 7, 2, 3], [2]]
    assert (full.layout.window, full.layout.window_step) == (5, 8), "whole blocks of vLLM's scheduler"


def test_a_state_and_a_window_stand_beside_blocks_that_only_a_kernel_reads() -> None:
    """As of Qwen3-Next and Gemma 3 in bfloat16 on CPUs with AMX."""
    tensors, _ = _caches("fused", 8, 4)
    views, _ = _views(tensors)  # a block of vLLM's is two of 4 tokens
    packed = describe(views, GroupKind((), PACKED, head_size=SIZE, dtype="float32", block_tokens=8))
    window = describe(views, GroupKind((), PACKED, head_size=SIZE, dtype="float32", block_tokens=8, window=5))
    state = describe([_state(4)], GroupKind(("state",), STATE, dtype="u8", block_tokens=8))
    groups = CacheGroups.of([packed, window, state], 4)
    assert [layout.position_tokens for layout in groups.groups.layouts] == [4, 4, 1]
    tables = groups.groups.by_group(groups.kernel_blocks(((3, 1), (0, 2), (2, 0))))
    assert tables == ((6, 7, 2, 3), (0, 1, 4, 5), (2, 0))
    for num_tokens, num_blocks, kept, block in (
        (1, 1, (0,), 2),
        (8, 2, (0, 1), 2),
        (12, 3, (4,), 0),
        (16, 4, (4, 5), 0),
    ):
        assert groups.groups.part(tables, 0, num_tokens) == (tables[0][:num_blocks], kept, (block,)), num_tokens


def test_an_entry_of_a_compressed_cache_is_a_position() -> None:
    """As of DeepSeek V4: latents of 4 tokens to an entry, in rows or in whole blocks."""
    fours, _ = _views([torch.zeros(6, 64, 24)])
    for form, positions, position_tokens in ((ROWS, 64, 4), (PACKED, 1, 256)):
        kind = GroupKind((), form, latent=True, head_size=24, dtype="bfloat16", block_tokens=256, entry_tokens=4)
        layout = describe(fours, kind).layout
        assert (layout.block_tokens, layout.position_tokens) == (positions, position_tokens)
        assert layout.needed(0, 257) == (0, -(-257 // position_tokens)), "the last one is begun"
        layout.check("own")


def test_handshake_takes_the_largest_layouts_of_attention_on_cpus() -> None:
    """126 layers with heads of 128 elements, as Llama 3.1 405B has: two parts a layer and element."""
    layers, tokens, size = 126, 128, 128
    shape, strides = (1000, 1, tokens, 2 * size), (2 * tokens * size, 2 * tokens * size, 2 * size, 1)
    views = [LayerView(f"layer.{at}", shape, strides, 4, 0, at * 1000 * 8 * tokens * size) for at in range(layers)]
    names = tuple(view.name for view in views)
    kind = GroupKind(names, COLUMNS, head_size=size, dtype="float32", block_tokens=tokens)
    identity = Identity(VERSION, "m" * 200, "main", 1, describe(views, kind).layout, "h" * 80)
    hello = Hello("prefill", identity)
    assert len(encode(Envelope(VERSION, "prefill", "e" * 16, "", 1, 0, (hello,)))) < MAX_HELLO_NBYTES
