"""`paged_layout` must describe the tensor it claims to: compared with torch's own strides."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from pdlink.kv.layout import KVLayout, LayerLayout, Part, paged_layout

ORDERS = ["".join(order) for order in permutations("LPBTH")]
SIZES = {"L": 2, "P": 2, "B": 3, "T": 4, "H": 3}
HEAD_DIM = 5


def layout_of(order: str, num_parts: int = 2) -> KVLayout:
    return paged_layout(
        dtype="bfloat16",
        itemsize=2,
        num_layers=SIZES["L"],
        num_blocks=SIZES["B"],
        block_tokens=SIZES["T"],
        num_heads=SIZES["H"],
        head_dim=HEAD_DIM,
        order=order,
        num_parts=num_parts,
    )


@pytest.mark.parametrize("order", ORDERS)
def test_offsets_are_those_of_a_dense_torch_tensor(order: str) -> None:
    layout = layout_of(order)
    stored = torch.empty([SIZES[axis] for axis in order] + [HEAD_DIM], dtype=torch.bfloat16)
    kv_LPBTHD = stored.permute(*[order.index(axis) for axis in "LPBTH"], 5)
    for layer_index, layer in enumerate(layout.layers):
        for part_index, part in enumerate(layer.parts):
            kv_BTHD = kv_LPBTHD[layer_index, part_index]
            assert part.region == 0
            assert part.offset == kv_BTHD.storage_offset() * 2
            strides = (layer.block_stride, layer.token_stride, layer.head_stride, 2)
            assert strides == tuple(stride * 2 for stride in kv_BTHD.stride())


@pytest.mark.parametrize("order", ORDERS)
def test_extent_is_the_size_of_the_dense_tensor(order: str) -> None:
    layout = layout_of(order)
    assert layout.extent(0) == 2 * HEAD_DIM * SIZES["L"] * SIZES["P"] * SIZES["B"] * SIZES["T"] * SIZES["H"]
    assert layout.extent(1) == 0


def test_sizes_count_payload_of_every_layer_and_part() -> None:
    layout = layout_of("LPBTH")
    assert layout.token_nbytes == 2 * 2 * 3 * 10
    assert layout_of("LPBTH", num_parts=1).token_nbytes == layout.token_nbytes // 2


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_last_block_may_be_partial(num_tokens: int, num_blocks: int) -> None:
    assert layout_of("LPBTH").blocks_of(0, num_tokens) == slice(0, num_blocks)


def test_extent_counts_padding_between_blocks_but_not_after_the_last() -> None:
    layer = LayerLayout(parts=(Part(0, 64), Part(3, 0)), block_stride=100, token_stride=10, head_stride=5)
    layout = KVLayout("uint8", block_tokens=4, num_blocks=3, num_heads=2, head_nbytes=5, layers=(layer,))
    assert layout.extent(0) == 64 + 2 * 100 + 3 * 10 + 5 + 5
    assert layout.extent(3) == layout.extent(0) - 64


@pytest.mark.parametrize("order", ["", "LPBT", "LPBTHH", "LPBTX", "lpbth"])
def test_an_order_that_is_no_permutation_is_refused(order: str) -> None:
    with pytest.raises(ValueError, match="permutation of LPBTH"):
        layout_of(order)
