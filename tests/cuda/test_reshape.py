"""The kernels' CPU build against a slow reshape in torch: the same body that runs on a GPU, with the same indices."""

from __future__ import annotations

import math
import mmap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlink import _cuda
from pdlink.cuda import ops
from tests.cuda.planes import layouts, slow_reshape

MAP_NORESERVE = 0x4000
"""Of Linux; Python names it from 3.13 on."""


def slot_lists(data: st.DataObject, num_src: int, num_dst: int) -> tuple[list[int], list[int]]:
    """Ragged: some tokens are skipped on one side or the other; no two are written to one place."""
    dst = data.draw(st.lists(st.integers(0, num_dst - 1), unique=True, max_size=40))
    src = [data.draw(st.integers(-1, num_src - 1)) for _ in dst]
    skipped = data.draw(st.sets(st.integers(0, max(0, len(dst) - 1)), max_size=3))
    return src, [-1 if i in skipped else slot for i, slot in enumerate(dst)]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_layout_becomes_any_other(data: st.DataObject) -> None:
    fine = data.draw(st.booleans())
    num_planes, heads = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    head_dim = data.draw(st.sampled_from([1, 3, 8, 20, 64] if fine else [16, 32, 48, 128]))
    dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float16, torch.int32, torch.int64]))
    src_layout, dst_layout = data.draw(layouts(fine)), data.draw(layouts(fine))
    src_slots, dst_slots = slot_lists(data, src_layout.num_slots, dst_layout.num_slots)

    _, src = src_layout.make(num_planes, heads, head_dim, dtype)
    storage, dst = dst_layout.make(num_planes, heads, head_dim, dtype)
    before = storage.clone()
    ops.reshape(src, dst, torch.tensor(src_slots, dtype=torch.int64), torch.tensor(dst_slots, dtype=torch.int64))
    got = storage.clone()
    storage.copy_(before)
    slow_reshape(src, dst, src_slots, dst_slots)
    assert torch.equal(got, storage), "and nothing beside what was asked for"


def sparse(nbytes: int) -> torch.Tensor:
    """Bytes that cost memory only where they are touched."""
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return torch.from_numpy(np.frombuffer(mapping, dtype=np.uint8))


def test_elements_past_two_to_the_31_are_reached() -> None:
    """Two planes of 5 GiB: element numbers need 33 bits, byte offsets 34 (lmcache#2403)."""
    block_tokens, heads, head_dim = 16, 4, 64
    num_blocks = 5 * 2**30 // (block_tokens * heads * head_dim * 2)
    pages = sparse(10 * 2**30).view(torch.bfloat16).view(2, num_blocks, block_tokens, heads, head_dim)
    slots = [num_blocks * block_tokens - 1, 0, num_blocks * block_tokens // 2 + 5, 2**31 // (heads * head_dim) + 1]
    assert max(slots) * heads * head_dim > 2**31
    rows = torch.randn(2, len(slots), heads, head_dim).bfloat16()
    ops.reshape([row[:, None] for row in rows], [pages[0], pages[1]], None, torch.tensor(slots))
    for plane in range(2):
        for i, slot in enumerate(slots):
            assert torch.equal(pages[plane, slot // block_tokens, slot % block_tokens], rows[plane, i])
    again = torch.zeros_like(rows)
    ops.reshape([pages[0], pages[1]], [row[:, None] for row in again], torch.tensor(slots))
    assert torch.equal(again, rows)


def test_slot_numbers_past_two_to_the_31_are_reached() -> None:
    pages = sparse(3 * 2**30).view(-1, 12, 1, 1)
    slots = [2**31 + 7, 2**31 - 1, 2**31, 3 * 2**30 - 2]
    rows = torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8).view(1, 4, 1, 1)
    ops.reshape([rows[0][:, None]], [pages], None, torch.tensor(slots))
    assert [int(pages.view(-1)[slot]) for slot in slots] == [1, 2, 3, 4]
    again = torch.zeros_like(rows)
    ops.reshape([pages], [again[0][:, None]], torch.tensor(slots))
    assert torch.equal(again, rows)


def test_a_slot_outside_moves_nothing_and_is_told() -> None:
    src, dst = torch.ones(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    with pytest.raises(IndexError, match="8 slots"):
        ops.reshape([src], [dst], torch.tensor([8, 0]), torch.tensor([1, 2]))
    assert dst.flatten(0, 1).sum((1, 2)).tolist() == [0, 0, 8, 0, 0, 0, 0, 0]
    for bad in (8, -2, 2**40, -(2**62)):
        flag = torch.zeros(1, dtype=torch.int32)
        ops.reshape([src], [dst], torch.tensor([bad]), torch.tensor([0]), flag)
        assert flag.item() == 1
        flag.zero_()
        ops.reshape([src], [dst], torch.tensor([0]), torch.tensor([bad]), flag)
        assert flag.item() == 1


def strides(tensor: torch.Tensor, **more: int) -> _cuda.Rows:
    """Of a contiguous [block, token, element]."""
    block, token, _ = (stride * tensor.itemsize for stride in tensor.stride())
    return _cuda.Rows(
        base=tensor.data_ptr(),
        block_stride=block,
        token_stride=token,
        block_tokens=tensor.shape[1],
        num_slots=tensor.shape[0] * tensor.shape[1],
        **more,
    )


@pytest.mark.parametrize("max_strands", [4, 7, 64])
def test_more_tokens_than_one_launch_takes_are_shared_out(max_strands: int) -> None:
    src, dst = torch.rand(5, 6, 64), torch.zeros(8, 4, 64)
    slots = torch.randperm(32)[:25]
    launches = _cuda.plan_reshape(
        strides(src, first_slot=3),
        strides(dst, slots=slots.data_ptr()),
        num_tokens=25,
        head_nbytes=256,
        max_strands=max_strands,
    )
    assert len(launches) == math.ceil(25 / (max_strands // 4))
    for launch in launches:
        _cuda.run_on_cpu(launch)
    assert torch.equal(dst.flatten(0, 1)[slots], src.flatten(0, 1)[3:28])


@pytest.mark.parametrize("max_blocks", [1, 2, 3, 7, 100])
def test_a_grid_of_few_blocks_does_all_of_it_in_turns(max_blocks: int) -> None:
    """Four planes of 80 strands a token, which would be 8 blocks each."""
    src, dst = torch.rand(4, 25, 1, 1280), torch.zeros(4, 25, 1, 1280)
    strided = {"layer_stride": 25 * 5120, "block_stride": 5120, "token_stride": 0, "block_tokens": 1, "num_slots": 25}
    places = [_cuda.Rows(base=side.data_ptr(), **strided) for side in (src, dst)]
    (launch,) = _cuda.plan_reshape(*places, num_tokens=25, num_layers=4, head_nbytes=5120, max_blocks=max_blocks)
    assert launch.grid[0] * launch.grid[1] <= max_blocks
    _cuda.run_on_cpu(launch)
    assert torch.equal(dst, src)


@pytest.mark.parametrize(
    ("planes", "most", "grid"), [(4, 100, (8, 4)), (4, 7, (3, 2)), (6, 4, (2, 2)), (64, 100, (3, 32))]
)
def test_a_grid_is_one_whose_busiest_block_does_least(planes: int, most: int, grid: tuple[int, int]) -> None:
    rows = _cuda.Rows(block_stride=5120, token_stride=0, block_tokens=1, num_slots=25)
    (launch,) = _cuda.plan_reshape(rows, rows, num_tokens=25, num_layers=planes, head_nbytes=5120, max_blocks=most)
    assert launch.grid == grid


def test_the_widest_access_that_fits_is_taken() -> None:
    """By start of the storage, in bytes, and by bytes of a row."""

    def kernel(start: int, width: int) -> str:
        storage = torch.zeros(4096, dtype=torch.uint8)
        at = torch.as_strided(storage, (4, 4, width), (4 * 64, 64, 1), start)
        contiguous = torch.zeros(4, 4, width, dtype=torch.uint8)
        (launch,) = _cuda.plan_reshape(strides(at), strides(contiguous), num_tokens=1, head_nbytes=width)
        return launch.kernel.removeprefix("pdlink_")

    assert [kernel(start, 48) for start in (0, 8, 4, 2, 1)] == [f"copy{n}_flat" for n in (16, 8, 4, 2, 1)]
    assert [kernel(0, width) for width in (48, 40, 36, 34, 33)] == [f"copy{n}_flat" for n in (16, 8, 4, 2, 1)]


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 2**31), st.integers(0, 2**31 - 1) | st.integers(2**31, 2**62))
def test_division_by_multiplication_is_division(divisor: int, n: int) -> None:
    """Up to 2^31 - 1 by multiplication, beyond it by division."""
    for near in (n, n // divisor * divisor, n // divisor * divisor - 1, 2**31 - 1):
        if near >= 0:
            assert _cuda.divide(divisor, near) == near // divisor
