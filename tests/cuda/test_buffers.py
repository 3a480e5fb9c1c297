"""Device pools and pinned pools, on a test double of the driver."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from pdlink.cuda.buffers import BorrowedDeviceBuffer, DeviceBuffer, PinnedBuffer
from pdlink.cuda.driver import CudaFailure, CudaUnavailable, Device
from pdlink.memory.numa import node_of, prefer_node
from tests.cuda.fake import Fake


def test_a_device_buffer_is_given_back_once(device: Device, double: Fake) -> None:
    before = double.counts().allocations
    with closing(DeviceBuffer(device, 1 << 16)) as buffer:
        assert double.counts().allocations == before + 1
        assert buffer.__cuda_array_interface__["data"] == (buffer.ptr, False)
        assert buffer.__cuda_array_interface__["shape"] == (1 << 16,)
    buffer.close()
    assert double.counts().allocations == before


def test_an_export_names_the_gpu_and_the_size(device: Device) -> None:
    with closing(DeviceBuffer(device, 1 << 16)) as buffer:
        export = buffer.export()
    assert (export.device, export.nbytes, len(export.handle)) == (device.uuid, 1 << 16, 64)


def test_an_empty_buffer_is_refused(device: Device) -> None:
    with pytest.raises(ValueError, match="positive"):
        DeviceBuffer(device, 0)


def test_a_pinned_buffer_is_host_memory_that_a_gpu_reaches(device: Device, double: Fake) -> None:
    before = double.counts().registrations
    buffer = PinnedBuffer(device, 5000)
    buffer.array[:] = 7
    assert double.counts().registrations == before + 1
    assert buffer.device_ptr
    assert buffer.nbytes == 8192
    buffer.close()
    buffer.close()
    assert double.counts().registrations == before


@pytest.mark.parametrize("call", ["cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2"])
@pytest.mark.usefixtures("steady_descriptors")
def test_a_pinned_buffer_that_cannot_be_pinned_leaves_nothing(call: str, device: Device, double: Fake) -> None:
    before, counts = len(list(Path("/proc/self/fd").iterdir())), double.counts()
    double.fail(call, 1)
    with pytest.raises(CudaFailure, match=call):
        PinnedBuffer(device, 4096)
    assert double.counts() == counts
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_the_node_of_a_device_is_read_where_the_system_knows_it(tmp_path: Path) -> None:
    for address, text in (("0000:81:00.0", "1\n"), ("0000:82:00.0", "-1\n"), ("0000:83:00.0", "?")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(text)
    assert node_of("0000:81:00.0", tmp_path) == 1
    assert node_of("0000:82:00.0", tmp_path) is None
    assert node_of("0000:83:00.0", tmp_path) is None
    assert node_of("0000:84:00.0", tmp_path) is None


def test_memory_can_be_made_with_a_preferred_node() -> None:
    """Node 0 is everywhere; where the call is forbidden it changes nothing."""

    def policy() -> str:
        lines = Path("/proc/self/numa_maps").read_text().splitlines() if Path("/proc/self/numa_maps").exists() else []
        return " ".join(line.split()[1] for line in lines[:1])

    before = policy()
    with prefer_node(0):
        inside = policy()
        np.zeros(1 << 20, dtype=np.uint8)[::4096] = 1
    assert policy() == before
    assert inside in (before, "prefer:0")


def test_memory_that_cuda_ipc_does_not_share_is_told_before_it_is_exported(device: Device, double: Fake) -> None:
    """As of expandable_segments: cuIpcGetMemHandle would answer CUDA_ERROR_INVALID_VALUE, which says nothing."""
    with closing(DeviceBuffer(device, 1 << 16)) as whole:
        borrowed = BorrowedDeviceBuffer(Device(0, double.path), whole.ptr + 4096, 4096, whole)
        assert borrowed.export().offset == 4096
        double.make_pooled(whole.ptr)
        with pytest.raises(CudaUnavailable, match="expandable_segments of torch.*pinned slots.*ALLOC_CONF"):
            borrowed.export()
        borrowed.close()


def test_a_borrowed_buffer_must_lie_in_one_allocation(device: Device, double: Fake) -> None:
    with closing(DeviceBuffer(device, 1 << 16)) as whole:
        borrowed = BorrowedDeviceBuffer(Device(0, double.path), whole.ptr + 4096, 1 << 16, whole)
        with pytest.raises(CudaUnavailable, match="got 65536 bytes, which go beyond an allocation of 65536"):
            borrowed.export()
        borrowed.close()
