"""Plans compared with the slow reference: every byte of the destination, inside the range and outside it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise, permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlink.errors import LayoutMismatch
from pdlink.kv import plan as plan_module
from pdlink.kv.layout import MAX_OFFSET, KVLayout, LayerLayout, Part, paged_layout
from pdlink.kv.plan import Plan, bind, template, warm_up
from tests.kv.reference import Regions, copy_tokens, regions_for

if TYPE_CHECKING:
    from collections.abc import Sequence

ORDERS = ["".join(order) for order in permutations("LPBTH")]
HEAD_NBYTES = 4


def dense(
    order: str = "LPBTH",
    *,
    block_tokens: int = 4,
    num_blocks: int = 12,
    num_heads: int = 2,
    num_layers: int = 2,
    num_parts: int = 2,
) -> KVLayout:
    return paged_layout(
        dtype="bfloat16",
        itemsize=2,
        num_layers=num_layers,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        num_heads=num_heads,
        head_dim=HEAD_NBYTES // 2,
        order=order,
        num_parts=num_parts,
    )


def heads_of(layout: KVLayout, first: int, count: int) -> KVLayout:
    """The part of `layout` that holds `count` heads from `first` on: what one rank of a split gets."""
    layers = tuple(
        replace(
            layer,
            parts=tuple(replace(part, offset=part.offset + first * layer.head_stride) for part in layer.parts),
        )
        for layer in layout.layers
    )
    return replace(layout, num_heads=count, layers=layers)


def blocks_for(layout: KVLayout, start: int, end: int) -> int:
    return (end - 1) // layout.block_tokens - start // layout.block_tokens + 1 if end > start else 0


def pick(rng: random.Random, layout: KVLayout, start: int, end: int) -> list[int]:
    """Blocks for a range: scattered, or in rows of neighbours (so that joins happen)."""
    count = blocks_for(layout, start, end)
    if rng.random() < 0.5:
        return rng.sample(range(layout.num_blocks), count)
    first = rng.randrange(layout.num_blocks - count + 1)
    blocks = list(range(first, first + count))
    if count > 2 and rng.random() < 0.5:
        cut = rng.randrange(1, count)
        blocks = blocks[cut:] + blocks[:cut]
    return blocks


def execute(plan: Plan, src: Regions, dst: Regions) -> None:
    """Do what a transport does, with numpy."""
    for layer in range(len(plan.template.layers)):
        for run_list in plan.run_lists(layer):
            source, destination = src[run_list.src_region].numpy(), dst[run_list.dst_region].numpy()
            for src_offset, dst_offset, nbytes in run_list.runs.tolist():
                at, to = run_list.src_base + src_offset, run_list.dst_base + dst_offset
                destination[to : to + nbytes] = source[at : at + nbytes]


def check_runs(plan: Plan) -> None:
    """What holds for every plan whatever the layouts: bounds, no overlap at the destination, sums, joins."""
    src, dst = plan.template.src, plan.template.dst
    written: dict[int, list[tuple[int, int]]] = {}
    num_runs = 0
    for layer in range(len(plan.template.layers)):
        layer_nbytes = 0
        for run_list in plan.run_lists(layer):
            assert run_list.runs.dtype == np.int64
            assert run_list.runs.flags.c_contiguous
            assert run_list.runs.ndim == 2
            assert run_list.runs.shape[1] == 3
            layer_nbytes += run_list.nbytes
            rows = run_list.runs.tolist()
            num_runs += len(rows)
            for src_offset, dst_offset, nbytes in rows:
                assert nbytes > 0
                assert run_list.src_base + src_offset >= 0
                assert run_list.src_base + src_offset + nbytes <= src.extent(run_list.src_region)
                assert run_list.dst_base + dst_offset + nbytes <= dst.extent(run_list.dst_region)
                at = run_list.dst_base + dst_offset
                written.setdefault(run_list.dst_region, []).append((at, at + nbytes))
            for (s, d, n), (next_s, next_d, _) in pairwise(rows):
                assert (s + n, d + n) != (next_s, next_d), "neighbours that touch on both sides are one run"
        assert layer_nbytes == plan.layer_nbytes(layer)
    for ranges in written.values():
        for (low, high), (next_low, _) in pairwise(sorted(ranges)):
            assert low <= high <= next_low, "two runs write the same bytes"
    tokens = plan.end - plan.start
    assert plan.num_runs == num_runs
    assert plan.nbytes == sum(plan.layer_nbytes(layer) for layer in range(len(src.layers)))
    assert num_runs <= tokens * src.num_heads * sum(len(layer.parts) for layer in src.layers)


def check_copy(src: KVLayout, dst: KVLayout, rng: random.Random, start: int, end: int) -> Plan:
    """Plan and reference leave the same bytes in the destination, the untouched ones included."""
    src_blocks, dst_blocks = pick(rng, src, start, end), pick(rng, dst, start, end)
    plan = bind(template(src, dst), src_blocks, dst_blocks, start, end)
    check_runs(plan)
    source = regions_for(src, rng.randrange(2**31))
    before = regions_for(dst, rng.randrange(2**31))
    got = {number: data.clone() for number, data in before.items()}
    execute(plan, source, got)
    copy_tokens(src, source, src_blocks, dst, before, dst_blocks, start, end)
    for number, expected in before.items():
        torch.testing.assert_close(got[number], expected, rtol=0, atol=0)
    return plan


def random_range(rng: random.Random, src: KVLayout, dst: KVLayout, longest: int = 40) -> tuple[int, int]:
    start = rng.randrange(0, 50)
    room = min(layout.num_blocks * layout.block_tokens - start % layout.block_tokens for layout in (src, dst))
    return start, start + rng.randint(0, min(room, longest))


@pytest.mark.parametrize("src_order", ORDERS)
def test_every_axis_order_is_copied_into_some_others(src_order: str) -> None:
    """All 120 orders as a source, each into itself and three others drawn by its own seed."""
    rng = random.Random(src_order)
    for dst_order in (src_order, *rng.sample(ORDERS, 3)):
        src = dense(src_order, block_tokens=rng.choice([1, 3, 4]), num_blocks=24)
        dst = dense(dst_order, block_tokens=rng.choice([1, 4, 6]), num_blocks=24)
        check_copy(src, dst, rng, *random_range(rng, src, dst, longest=24))


@pytest.mark.parametrize("sizes", [(16, 16), (16, 64), (64, 16), (1, 256), (256, 1), (48, 32), (7, 5), (256, 256)])
@pytest.mark.parametrize("seed", range(4))
def test_block_sizes_need_not_divide_each_other(sizes: tuple[int, int], seed: int) -> None:
    rng = random.Random(f"{sizes}{seed}")
    orders = rng.choice([("LPBTH", "LPBTH"), ("LBPTH", "LBPTH"), ("LPBHT", "LPBTH"), ("LBPTH", "LPBTH")])
    src, dst = (
        dense(order, block_tokens=size, num_blocks=200 // size + 2, num_layers=1)
        for order, size in zip(orders, sizes, strict=True)
    )
    check_copy(src, dst, rng, *random_range(rng, src, dst, longest=150))


def shifted(layout: KVLayout, rng: random.Random, style: str) -> KVLayout:
    """K and V moved to where `style` says, with room between them."""
    distance = layout.extent(0) + rng.randrange(1, 50)
    layers = []
    for layer in layout.layers:
        first, second = layer.parts
        if style == "own region":
            second = replace(second, region=1)
        elif style == "far apart":
            second = replace(second, offset=second.offset + distance)
        elif style == "swapped":
            first, second = second, first
        layers.append(replace(layer, parts=(first, second)))
    return replace(layout, layers=tuple(layers))


PART_STYLES = ["as it is", "own region", "far apart", "swapped"]


@pytest.mark.parametrize("src_style", PART_STYLES)
@pytest.mark.parametrize("dst_style", PART_STYLES)
@pytest.mark.parametrize("orders", [("LPBTH", "LPBTH"), ("LBPTH", "LBPTH"), ("LBTPH", "LBTHP"), ("PLBTH", "BLHPT")])
def test_k_and_v_may_lie_anywhere(src_style: str, dst_style: str, orders: tuple[str, str]) -> None:
    rng = random.Random(f"{src_style}{dst_style}{orders}")
    src = shifted(dense(orders[0]), rng, src_style)
    dst = shifted(dense(orders[1]), rng, dst_style)
    check_copy(src, dst, rng, *random_range(rng, src, dst))


@pytest.mark.parametrize("seed", range(8))
def test_a_single_latent_part_is_copied(seed: int) -> None:
    """MLA: one part, one head."""
    rng = random.Random(seed)
    src = dense(rng.choice(ORDERS), num_parts=1, num_heads=1, block_tokens=rng.choice([1, 4, 64]), num_blocks=60)
    dst = dense(rng.choice(ORDERS), num_parts=1, num_heads=1, block_tokens=rng.choice([1, 4, 64]), num_blocks=60)
    check_copy(src, dst, rng, *random_range(rng, src, dst))


@pytest.mark.parametrize("orders", [("LPBTH", "LPBTH"), ("LPBHT", "LPBHT"), ("LPBTH", "LPBHT"), ("LBPTH", "BLPTH")])
@pytest.mark.parametrize("seed", range(3))
def test_heads_are_split_over_ranks_and_merged_again(orders: tuple[str, str], seed: int) -> None:
    """A slice of heads is only a layout with other bases: four ranks' slices, copied out and back, give the whole.

    trtllm#6507, sglang#7931: wrong answers where the two sides were split differently.
    """
    rng = random.Random(f"{orders}{seed}")
    whole, rank = dense(orders[0], num_heads=4), dense(orders[1], num_heads=1, block_tokens=rng.choice([3, 4]))
    start, end = random_range(rng, whole, rank)
    whole_blocks, rank_blocks = pick(rng, whole, start, end), pick(rng, rank, start, end)
    source = regions_for(whole, seed)
    merged = {0: torch.zeros_like(source[0])}
    for head in range(4):
        one_head = heads_of(whole, head, 1)
        on_rank = {0: torch.zeros(rank.extent(0), dtype=torch.uint8)}
        execute(bind(template(one_head, rank), whole_blocks, rank_blocks, start, end), source, on_rank)
        execute(bind(template(rank, one_head), rank_blocks, whole_blocks, start, end), on_rank, merged)
    expected = {0: torch.zeros_like(source[0])}
    copy_tokens(whole, source, whole_blocks, whole, expected, whole_blocks, start, end)
    torch.testing.assert_close(merged[0], expected[0], rtol=0, atol=0)


def test_one_source_head_can_fill_several() -> None:
    """Replicated GQA heads: a source head stride of 0 says so."""
    one, two = dense(num_heads=1), dense(num_heads=2)
    repeated = replace(one, num_heads=2, layers=tuple(replace(layer, head_stride=0) for layer in one.layers))
    check_copy(repeated, two, random.Random(0), 3, 29)


@st.composite
def layouts(draw: st.DrawFn, shapes: Sequence[int], num_heads: int, region_of: int) -> KVLayout:
    """Any nesting of blocks, tokens and heads, padded at random, with every layer's parts wherever they fit.

    shapes: parts per layer. Each layer has its own axis order and padding; region_of: how many regions there are.
    """
    block_tokens = draw(st.sampled_from([1, 2, 3, 4, 5, 16]))
    num_blocks = 40 // block_tokens + 3
    counts = {"B": num_blocks, "T": block_tokens, "H": num_heads}
    ends = [0] * region_of
    layers = []
    for num_parts in shapes:
        order = draw(st.permutations(sorted(counts)))
        strides: dict[str, int] = {}
        step = HEAD_NBYTES
        for axis in order:
            step += draw(st.sampled_from([0, 0, 0, 3]))
            strides[axis] = step
            step *= counts[axis]
        parts = []
        for _ in range(num_parts):
            region = draw(st.integers(0, region_of - 1))
            parts.append(Part(region, ends[region]))
            ends[region] += step + draw(st.sampled_from([0, 0, 7]))
        layers.append(LayerLayout(tuple(parts), strides["B"], strides["T"], strides["H"]))
    return KVLayout("uint8", block_tokens, num_blocks, num_heads, HEAD_NBYTES, tuple(layers))


@given(data=st.data(), seed=st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_layers_may_differ_in_geometry_regions_and_padding(data: st.DataObject, seed: int) -> None:
    """vllm#46039: offsets came from one representative layer."""
    shapes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3), label="parts per layer")
    num_heads = data.draw(st.integers(1, 3), label="heads")
    src = data.draw(layouts(shapes, num_heads, 2), label="source")
    dst = data.draw(layouts(shapes, num_heads, 3), label="destination")
    rng = random.Random(seed)
    check_copy(src, dst, rng, *random_range(rng, src, dst, longest=20))


@pytest.mark.parametrize(
    ("order", "num_runs"),
    [
        ("LPBTH", 2),  # K and V
        ("PLBTH", 2),
        ("LBPTH", 1),
        ("LBTPH", 1),
        ("LPBHT", 2),
        ("LPHBT", 4),  # K and V of both heads
        ("BLPTH", 11),  # every block: other layers lie between
        ("BPLTH", 22),
    ],
)
def test_consecutive_blocks_of_equal_layouts_are_joined_as_far_as_the_axes_allow(order: str, num_runs: int) -> None:
    layout = dense(order)
    plan = bind(template(layout, layout), range(11), range(1, 12), 0, 44)
    assert plan.num_runs == 2 * num_runs
    check_runs(plan)


def test_layers_of_equal_geometry_share_one_list_of_runs() -> None:
    layout = dense(num_layers=5)
    plan = bind(template(layout, layout), [3, 1], [0, 7], 0, 8)
    assert len(plan.runs) == 1
    lists = [run_list for layer in range(5) for run_list in plan.run_lists(layer)]
    assert all(run_list.runs is plan.runs[0] for run_list in lists)
    assert not plan.runs[0].flags.writeable
    assert len({run_list.src_base for run_list in lists}) == 10


def test_fused_k_and_v_travel_as_one_run_per_block() -> None:
    layout = dense("LBPTH")
    plan = bind(template(layout, layout), [5, 1, 8], [2, 9, 4], 0, 12)
    assert [len(plan.run_lists(layer)) for layer in range(2)] == [1, 1]
    assert plan.runs[0][:, 2].tolist() == [layout.token_nbytes * layout.block_tokens // 2] * 3


def test_fused_v_before_k_travels_as_one_run_per_block_too() -> None:
    layout = shifted(dense("LBPTH"), random.Random(0), "swapped")
    plan = bind(template(layout, layout), [5, 1, 8], [2, 9, 4], 0, 12)
    assert plan.num_runs == 6


@pytest.mark.parametrize("at", [0, 1, 4, 17])
def test_an_empty_range_is_an_empty_plan(at: int) -> None:
    plan = bind(template(dense(), dense("LPBHT")), [], [], at, at)
    assert plan.num_runs == plan.nbytes == plan.layer_nbytes(0) == 0
    assert plan.run_lists(0) == plan.run_lists(1) == []


def test_offsets_beyond_32_bits_are_exact() -> None:
    """lmcache#2403: a kernel that took one stride order for granted and counted in 32 bits."""
    layout = paged_layout(
        dtype="bfloat16", itemsize=2, num_layers=80, num_blocks=100_000, block_tokens=16, num_heads=8, head_dim=128
    )
    plan = bind(template(layout, layout), [99_999], [99_998], 15, 16)
    assert plan.runs[0].tolist() == [[99_999 * 32768 + 15 * 2048, 99_998 * 32768 + 15 * 2048, 2048]]
    run_list = plan.run_lists(79)[1]
    assert run_list.src_base == 159 * 100_000 * 32768
    assert run_list.src_base + 100_000 * 32768 == layout.extent(0)


def test_block_lists_may_be_arrays_of_any_integer_type_and_longer_than_needed() -> None:
    pair = template(dense(), dense())
    expected = bind(pair, [5, 2], [1, 7], 2, 7).runs[0].tolist()
    dtypes: list[Any] = [np.int32, np.uint64, np.int64]
    for dtype in dtypes:
        src, dst = np.array([5, 2, 11], dtype=dtype), np.array([1, 7, 7], dtype=dtype)
        src.flags.writeable = False
        assert bind(pair, src, dst, 2, 7).runs[0].tolist() == expected


@pytest.mark.parametrize(
    ("src_blocks", "dst_blocks", "start", "end", "message"),
    [
        ([0, 1], [0, 1, 2], 0, 9, "source blocks do not cover tokens"),
        ([0, 1, 2], [0, 1], 3, 9, "destination blocks do not cover tokens .* 3 blocks of 4 tokens needed, 2 given"),
        ([], [0], 0, 1, "source blocks do not cover"),
        ([0, 12], [0, 1], 0, 8, "source block 12 does not exist: there are 12"),
        ([0, 1], [0, -1], 0, 8, "destination block -1 does not exist"),
        ([0, 1], [2**62, 1], 0, 8, "destination block"),
        ([0, 1], [2**63, 1], 0, 8, "destination block"),
        ([0, 1], [2**64, 1], 0, 8, "destination blocks must be a list of integers"),
        ([0, 1], [3, 3], 0, 8, "not distinct"),
        ([0.0, 1.0], [0, 1], 0, 8, "source blocks must be a list of integers"),
        ([[0], [1]], [0, 1], 0, 8, "source blocks must be a list of integers"),
        ([0, 1], [0, 1], -1, 8, "not a range"),
        ([0, 1], [0, 1], 8, 4, "not a range"),
        ([0, 1], [0, 1], 0, 2**70, "not a range"),
    ],
)
def test_lists_that_do_not_fit_the_range_are_refused(
    src_blocks: list[int], dst_blocks: list[int], start: int, end: int, message: str
) -> None:
    pair = template(dense(), dense())
    with pytest.raises(ValueError, match=message):
        bind(pair, src_blocks, dst_blocks, start, end)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float16"}, "dtype differs: source bfloat16, destination float16"),
        ({"num_heads": 4}, "number of KV heads differs: source 2, destination 4"),
        ({"head_nbytes": 8}, "bytes per head differs: source 4, destination 8"),
        ({"layers": dense().layers[:1]}, "number of layers differs: source 2, destination 1"),
        ({"layers": dense(num_parts=1).layers}, "parts of layer 0 differ: source 2, destination 1"),
    ],
)
def test_layouts_that_hold_other_kv_are_refused_by_factor(change: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutMismatch, match=message):
        template(dense(), replace(dense(), **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("token_stride", 7, "stride 7 is shorter than 8 bytes inside"),
        ("head_stride", 0, "stride 0 is shorter than 4 bytes inside"),
        ("block_stride", 31, "stride 31 is shorter than 32 bytes inside"),
        ("block_stride", -32, "a stride is negative"),
        ("block_stride", MAX_OFFSET, "layer 0 is malformed: Part"),
        ("parts", (Part(4096, 0), Part(4096, 4)), "layer 0 is malformed: Part"),
        ("parts", (Part(0, 0), Part(0, -4)), "layer 0 is malformed: Part"),
        ("parts", (Part(0, 0), Part(0, MAX_OFFSET)), "layer 0 is malformed: Part"),
        ("parts", (Part(-1, 0), Part(0, 4)), "layer 0 is malformed: Part"),
        ("parts", (Part(0, 0), Part(0, 0)), "layers 0 and 0 both have a part"),
        ("parts", (), "no parts"),
    ],
)
def test_a_destination_whose_bytes_overlap_or_overflow_is_refused(field: str, value: object, message: str) -> None:
    layout = dense(num_layers=1)
    broken = replace(layout, layers=(replace(layout.layers[0], **{field: value}),))  # type: ignore[arg-type]
    with pytest.raises(LayoutMismatch, match=message):
        template(layout, broken)


@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("stride", [MAX_OFFSET, 2**63 - 1, 2**63, 2**64 - 1, 2**100])
@pytest.mark.parametrize("axis", ["block", "token", "head"])
def test_a_stride_that_is_never_used_has_to_fit_64_bits_too(axis: str, stride: int, side: str) -> None:
    """It is multiplied by 0 here, and converted to a machine's number before that."""
    layer = LayerLayout(
        (Part(0, 0),), **{"block_stride": 4, "token_stride": 4, "head_stride": 4, f"{axis}_stride": stride}
    )
    honest, hostile = (
        KVLayout("uint8", block_tokens=1, num_blocks=1, num_heads=1, head_nbytes=4, layers=(one,))
        for one in (LayerLayout((Part(0, 0),), 4, 4, 4), layer)
    )
    with pytest.raises(LayoutMismatch, match=f"{side} layer 0 is malformed"):
        template(*((hostile, honest) if side == "source" else (honest, hostile)))


@pytest.mark.parametrize("field", ["block_tokens", "num_blocks"])
@pytest.mark.parametrize("value", [0, -1, MAX_OFFSET])
def test_sizes_that_are_no_sizes_are_refused(field: str, value: int) -> None:
    with pytest.raises(LayoutMismatch, match=f"{field} is {value}"):
        template(dense(), replace(dense(), **{field: value}))  # type: ignore[arg-type]


def test_two_layers_at_the_same_bytes_are_refused() -> None:
    layout = dense()
    with pytest.raises(LayoutMismatch, match="layers 0 and 1 both have a part"):
        template(layout, replace(layout, layers=(layout.layers[0], layout.layers[0])))


def test_warm_up_leaves_nothing_to_compile() -> None:
    warm_up()
    before = num_specialisations()
    check_copy(dense("LBPTH", block_tokens=3), dense("BLHPT", block_tokens=5), random.Random(1), 2, 31)
    assert num_specialisations() == before
    assert all(before)


def num_specialisations() -> list[int]:
    """For how many argument types there is machine code of each loop that Python calls."""
    dispatchers: list[Any] = [plan_module._first_missing, plan_module._runs]
    return [len(dispatcher.signatures) for dispatcher in dispatchers]
