"""What only a GPU can show: the kernels there, graphs, pinned memory in place, and two processes on one device."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlink.cuda import ops
from pdlink.cuda.buffers import DeviceBuffer, PinnedBuffer
from pdlink.cuda.driver import Device
from pdlink.errors import PdlinkError
from tests.cuda.planes import layouts, slow_reshape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_layout_becomes_any_other_on_the_gpu(data: st.DataObject) -> None:
    fine = data.draw(st.booleans())
    num_planes, heads = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    head_dim = data.draw(st.sampled_from([1, 3, 8, 20, 64] if fine else [16, 32, 48, 128]))
    dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.int32, torch.int64]))
    src_layout, dst_layout = data.draw(layouts(fine)), data.draw(layouts(fine))
    dst_slots = data.draw(st.lists(st.integers(0, dst_layout.num_slots - 1), unique=True, max_size=20))
    src_slots = [data.draw(st.integers(-1, src_layout.num_slots - 1)) for _ in dst_slots]
    _, src = src_layout.make(num_planes, heads, head_dim, dtype, "cuda")
    storage, dst = dst_layout.make(num_planes, heads, head_dim, dtype, "cuda")
    before = storage.clone()
    slots = (torch.tensor(one, dtype=torch.int64, device="cuda") for one in (src_slots, dst_slots))
    ops.reshape(src, dst, *slots)
    got = storage.clone()
    storage.copy_(before)
    slow_reshape(src, dst, src_slots, dst_slots)
    assert torch.equal(got, storage)


def test_elements_past_two_to_the_31_are_reached_on_the_gpu() -> None:
    pages = torch.zeros(2**32 // (16 * 256) + 1, 16, 1, 256, dtype=torch.uint8, device="cuda")
    slots = torch.tensor([pages.shape[0] * 16 - 1, 0, 2**31 // 256 + 1, 2**32 // 256 + 3], device="cuda")
    rows = torch.randint(1, 256, (1, 4, 1, 256), device="cuda").to(torch.uint8)
    ops.reshape([rows[0][:, None]], [pages], None, slots)
    assert torch.equal(pages.view(-1, 1, 256)[slots], rows[0])
    again = torch.zeros_like(rows)
    ops.reshape([pages], [again[0][:, None]], slots)
    assert torch.equal(again, rows)


def test_pinned_memory_is_read_and_written_in_place() -> None:
    host = torch.randn(2, 64, 4, 32).pin_memory()
    device = torch.zeros(2, 64, 4, 32, device="cuda")
    slots = torch.randperm(64, device="cuda")
    ops.reshape([part[:, None] for part in host], [part[:, None] for part in device], slots, slots)
    back = torch.zeros_like(host).pin_memory()
    ops.reshape([part[:, None] for part in device], [part[:, None] for part in back])
    torch.cuda.synchronize()
    assert torch.equal(back, host)


def test_a_graph_replays_the_operator() -> None:
    planes = [torch.zeros(8, 16, 4, 64, device="cuda") for _ in range(3)]  # not evenly spaced: a table
    rows = torch.zeros(3, 5, 4, 64, device="cuda")
    slots = torch.tensor([100, 3, -1, 7, 50], device="cuda")
    ops.reshape(planes, [row[:, None] for row in rows], slots, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.reshape(planes, [row[:, None] for row in rows], slots, None)
    for plane in planes:
        plane.normal_()
    graph.replay()
    torch.cuda.synchronize()
    expected = torch.stack([plane.flatten(0, 1)[slots.clamp(min=0)] for plane in planes])
    expected[:, 2] = 0
    assert torch.equal(rows, expected)


def test_a_slot_outside_is_flagged_and_moves_nothing() -> None:
    src, dst = torch.ones(1, 8, 1, 4, device="cuda"), torch.zeros(1, 8, 1, 4, device="cuda")
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    ops.reshape([src], [dst], torch.tensor([0, 8], device="cuda"), torch.tensor([1, 2], device="cuda"), flag)
    assert flag.item() == 1
    assert dst.sum().item() == 4


def test_torch_sees_our_buffers() -> None:
    device = Device(0)
    device.open()
    pinned = PinnedBuffer(device, 1 << 16)
    with closing(DeviceBuffer(device, 1 << 16)) as buffer:
        view = torch.as_tensor(buffer, device="cuda:0")
        assert view.data_ptr() == buffer.ptr
        view.fill_(7)
        torch.cuda.synchronize()
        device.copy(pinned.ptr, buffer.ptr, 1 << 16)
        device.synchronize()
        assert (pinned.array == 7).all()
        del view
    pinned.close()
    device.close()


@pytest.mark.parametrize("transport", ["mapped-cuda", "mapped-cuda, expandable_segments", "ucx"])
def test_two_processes_share_a_gpu(transport: str) -> None:
    links = pytest.importorskip("pdlink_bench.gpu.links")
    try:
        link = links.GpuLink(transport)
    except (ConnectionError, PdlinkError) as error:
        pytest.fail(f"{transport} does not work between two processes on this machine: {error}")
    try:
        for _ in range(3):
            for layer in range(links.LAYERS):
                link.submit(layer)
            link.wait()
        assert link.landed()
        assert link.transport.lane("owner")
    finally:
        link.close()
