"""How the driver is called, on a test double: contexts, errors, order. Nothing here says anything about a GPU."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdlink import _cuda
from pdlink.cuda import driver, virtual
from pdlink.cuda.buffers import DeviceBuffer
from pdlink.cuda.driver import CudaEvent, CudaFailure, CudaStream, CudaUnavailable, Device
from pdlink.cuda.kernels import Kernels
from pdlink.cuda.strided import ADDRESSES
from pdlink.memory.buffers import Buffer
from tests.cuda.double import Kv
from tests.cuda.fake import IMAGE, Fake
from tests.cuda.virtual import AllocationProp
from tests.events import Reached
from tests.waiting import WAIT_S

ONE_ROW: dict[str, Any] = {"block_stride": 0, "token_stride": 0, "block_tokens": 1, "num_slots": 1}
HEADER = Path("/usr/local/cuda/include/cuda.h")
SOURCES = Path(__file__).parents[2] / "pdlink"


def test_a_failure_names_the_call_and_the_driver_s_own_name_for_it(device: Device, double: Fake) -> None:
    double.fail("cuMemAlloc_v2", 2)
    with pytest.raises(CudaFailure, match=r"cuMemAlloc_v2 failed with CUDA_ERROR_OUT_OF_MEMORY \(2\)") as caught:
        device.allocate(4096)
    assert (caught.value.call, caught.value.name, caught.value.number) == (
        "cuMemAlloc_v2",
        "CUDA_ERROR_OUT_OF_MEMORY",
        2,
    )
    double.fail("cuMemAlloc_v2", 4711)
    with pytest.raises(CudaFailure, match=r"unknown error \(4711\)"):
        device.allocate(4096)


def test_every_thread_has_the_context_in_a_call_and_not_after_it(device: Device, double: Fake) -> None:
    depths: list[int] = []

    def work() -> None:
        ptr = device.allocate(4096)
        double.fail("cuMemFree_v2", 1)
        with pytest.raises(CudaFailure):
            device.free(ptr)
        device.free(ptr)
        depths.append(double.counts().depth)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(WAIT_S)
    work()
    assert depths == [0, 0]
    log = double.take_log()
    assert [call for call, has_context in log if not has_context] == ["cuDevicePrimaryCtxRetain"]
    assert [call for call, _ in log].count("cuMemFree_v2") == 4


def test_what_is_missing_is_said(double: Fake) -> None:
    with pytest.raises(CudaUnavailable, match="no CUDA driver: no-such-library"):
        Device(0, "no-such-library.so").open()
    with pytest.raises(CudaUnavailable, match="no CUDA device 1: the driver shows 1"):
        Device(1, double.path).open()
    with pytest.raises(CudaUnavailable, match="device 0 is not open"):
        Device(0, double.path).allocate(1)


def test_whether_other_devices_get_the_memory_is_asked_without_a_context(double: Fake) -> None:
    double.take_log()
    assert driver.moves_dma_buf(0, double.path)
    assert "cuDevicePrimaryCtxRetain" not in [call for call, _ in double.take_log()]
    double.fail("cuDeviceGetAttribute", 101)
    with pytest.raises(CudaFailure, match="CUDA_ERROR_INVALID_DEVICE"):
        driver.moves_dma_buf(0, double.path)


def test_open_and_close_may_be_repeated(double: Fake) -> None:
    device = Device(0, double.path)
    device.open()
    device.open()
    contexts = double.counts().contexts
    device.close()
    device.close()
    assert double.counts().contexts == contexts - 1
    device.open()
    device.close()


def test_a_copy_follows_what_its_stream_has_before_it(device: Device, double: Fake) -> None:
    """The held kernel writes; the copy behind it must see what it wrote, and no sooner."""
    kernels, stream = Kernels(device, IMAGE), CudaStream(device)
    source, middle, target = (torch.full((64,), n, dtype=torch.uint8) for n in (1, 2, 3))
    for one in (source, middle, target):  # neither a kernel nor an asynchronous copy takes other memory of the host
        device.pin(one.data_ptr(), 64)
    (launch,) = _cuda.plan_reshape(
        *(_cuda.Rows(base=one.data_ptr(), **ONE_ROW) for one in (source, middle)), num_tokens=1, head_nbytes=64
    )
    double.hold()
    try:
        kernels.launch(launch, stream.handle)
        device.copy(target.data_ptr(), middle.data_ptr(), 64, stream.handle)
        assert target[0] == 3
    finally:
        double.go_on()
    stream.synchronize()
    assert target.tolist() == [1] * 64
    for one in (source, middle, target):
        device.unpin(one.data_ptr())
    for made in (kernels, stream, CudaEvent(device)):
        made.close()
        made.close()


def test_a_launch_has_the_grid_and_the_argument_that_were_planned(device: Device, double: Fake) -> None:
    """More than one plane and a last block that is not full: the double runs exactly the grid it is given."""
    kernels = Kernels(device, IMAGE)
    memory = [Kv(device, 3 * 100 * 160, seed, Reached) for seed in range(2)]
    src, dst = (torch.from_numpy(one.array[: 3 * 100 * 160]).view(3, 100, 1, 160) for one in memory)
    places = [
        _cuda.Rows(
            base=side.data_ptr(),
            layer_stride=side.stride(0),
            block_stride=160,
            token_stride=160,
            block_tokens=1,
            num_slots=100,
        )
        for side in (src, dst)
    ]
    launches = _cuda.plan_reshape(*places, num_tokens=100, num_layers=3, head_nbytes=160)
    for launch in launches:
        kernels.launch(launch, 0)
    device.synchronize()
    assert torch.equal(src, dst)
    kernels.close()
    for one in memory:
        one.close()


def test_a_call_with_a_stream_or_an_event_that_is_gone_is_refused(device: Device) -> None:
    stream, event = CudaStream(device), CudaEvent(device)
    gone, last = stream.handle, event.handle
    stream.close()
    with pytest.raises(CudaFailure, match="cuMemcpyAsync failed with CUDA_ERROR_INVALID_HANDLE"):
        device.copy(0, 0, 0, gone)
    with pytest.raises(CudaFailure, match="cuEventRecord failed with CUDA_ERROR_INVALID_HANDLE"):
        event.record(gone)
    event.close()
    event.handle = last
    with pytest.raises(CudaFailure, match="cuEventRecord failed with CUDA_ERROR_INVALID_HANDLE"):
        event.record(0)
    event.handle = 0


def test_a_host_function_must_not_call_the_driver(device: Device, double: Fake) -> None:
    """Of the double: `cuLaunchHostFunc` forbids it, and a GPU may hang."""
    answers: list[int] = []
    called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
        lambda _: answers.append(device.driver.status("cuInit", ctypes.c_uint(0)))
    )
    stream = CudaStream(device)
    with device.current() as cuda:
        cuda.call("cuLaunchHostFunc", ctypes.c_void_p(stream.handle), called, ctypes.c_void_p(0))
    stream.synchronize()
    stream.close()
    assert answers == [800]
    assert double.take_faults() == ["cuInit by a host function"]


def test_kernels_that_cannot_be_loaded_say_why(device: Device, double: Fake) -> None:
    with pytest.raises(CudaUnavailable, match="built without nvcc"):
        Kernels(device, b"")
    with pytest.raises(CudaFailure, match="CUDA_ERROR_INVALID_IMAGE"):
        Kernels(device, b"text")


SIZES = """
#include <cuda.h>
#include <stddef.h>
#include <stdio.h>
int main(void) {
    size_t numbers[] = {
        sizeof(CUdeviceptr), sizeof(CUipcMemHandle), sizeof(CUuuid),
        CUDA_ERROR_NOT_READY, CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING, CU_STREAM_NON_BLOCKING,
        CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS,
        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, CU_POINTER_ATTRIBUTE_MAPPING_SIZE,
        CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_HANDLE_TYPE_FABRIC,
        CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        sizeof(CUmemFabricHandle), sizeof(CUmemAccessDesc), offsetof(CUmemAccessDesc, flags),
        sizeof(CUmemAllocationProp), offsetof(CUmemAllocationProp, location), CU_MEM_ALLOCATION_TYPE_PINNED,
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; ++i) printf("%zu\\n", numbers[i]);
}
"""


@pytest.mark.skipif(not HEADER.exists() or shutil.which("cc") is None, reason="no cuda.h or no C compiler")
def test_structures_and_numbers_are_those_of_the_header(tmp_path: Path) -> None:
    (tmp_path / "sizes.c").write_text(SIZES)
    command = ["cc", "-I", str(HEADER.parent), "-o", str(tmp_path / "sizes"), str(tmp_path / "sizes.c")]
    subprocess.run(command, check=True, timeout=60)
    told = subprocess.run([str(tmp_path / "sizes")], capture_output=True, text=True, check=True, timeout=10).stdout
    assert [int(line) for line in told.split()] == [
        *(ctypes.sizeof(ctypes.c_uint64), driver.IPC_HANDLE_NBYTES, 16),
        *(driver._NOT_READY, driver._EVENT_BLOCKING_SYNC, driver._EVENT_DISABLE_TIMING, driver._STREAM_NON_BLOCKING),
        *(driver._HOST_PORTABLE, driver._HOST_MAPPED, driver._IPC_LAZY_PEER_ACCESS),
        driver._ATTRIBUTE_IPC_CAPABLE,
        *(virtual._ATTRIBUTE_HANDLE_TYPES, virtual._ATTRIBUTE_MAPPING_NBYTES, virtual._ATTRIBUTE_MAPPING_START),
        *(virtual._POSIX_FD, virtual._FABRIC, virtual._ON_DEVICE, virtual._READ_AND_WRITE),
        *(virtual.FABRIC_HANDLE_NBYTES, ctypes.sizeof(virtual.AccessDesc), virtual.AccessDesc.flags.offset),
        *(ctypes.sizeof(AllocationProp), AllocationProp.location.offset, 1),
    ]


@pytest.mark.skipif(not HEADER.exists() or "cuMemcpyBatchAsync_v2" not in HEADER.read_text(), reason="no CUDA 13")
def test_attributes_of_a_batch_of_copies_are_those_of_the_header(tmp_path: Path) -> None:
    (tmp_path / "sizes.c").write_text(
        "#include <cuda.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n"
        'printf("%zu %zu %d", sizeof(CUmemcpyAttributes), offsetof(CUmemcpyAttributes, flags), '
        "CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);}\n"
    )
    command = ["cc", "-I", str(HEADER.parent), "-o", str(tmp_path / "sizes"), str(tmp_path / "sizes.c")]
    subprocess.run(command, check=True, timeout=60)
    told = subprocess.run([str(tmp_path / "sizes")], capture_output=True, text=True, check=True, timeout=10).stdout
    attributes = driver.MemcpyAttributes
    assert [int(one) for one in told.split()] == [
        ctypes.sizeof(attributes),
        attributes.flags.offset,
        driver._SRC_ACCESS_ORDER_STREAM,
    ]


@pytest.mark.skipif(not HEADER.exists(), reason="no cuda.h")
def test_every_call_is_spelt_as_the_library_spells_it() -> None:
    """`cuMemAlloc` in a source is `cuMemAlloc_v2` in the library; ctypes sees no header that would say so."""
    header = HEADER.read_text()
    renamed = dict(re.findall(r"#define\s+(cu\w+)\s+(?:__CUDA_API_PT\w+\()?(cu\w+_v\d+)\b", header))
    files = [*(SOURCES / "cuda").glob("*.py"), *(SOURCES / "transport").glob("*.py")]
    files += (SOURCES.parent / "csrc/cuda").glob("*.cpp")
    names = {name for path in files for name in re.findall(r'"(cu[A-Z]\w+)"', path.read_text())}
    assert len(names) > 30
    for name in names:
        base = re.sub(r"_v\d+$", "", name)
        assert renamed.get(base, base) == name
        assert re.search(rf"\b{base}\(", header), f"cuda.h knows no {base}"


def test_the_double_reads_a_list_where_it_is_and_not_where_other_memory_there_came_from(device: Device) -> None:
    """Memory that was the target of a copy is given back, and pinned again for a list."""
    memory = Buffer(4096)
    with closing(CudaStream(device)) as stream, closing(DeviceBuffer(device, 8192)) as pool:
        with closing(DeviceBuffer(device, 4096)) as gone:
            device.pin(memory.ptr, memory.nbytes)
            device.copy(memory.ptr, gone.ptr, 4096, stream.handle)
            stream.synchronize()
            device.unpin(memory.ptr)
        device.pin(memory.ptr, memory.nbytes)
        memory.array[:16] = np.array([0, 4096], np.int64).view(np.uint8)
        places = [_cuda.Rows(base=pool.ptr, **ADDRESSES, slots=memory.ptr + at) for at in (0, 8)]
        (launch,) = _cuda.plan_reshape(*places, num_tokens=1, head_nbytes=512)
        with closing(Kernels(device, IMAGE)) as kernels:
            kernels.launch(launch, stream.handle)
            stream.synchronize()
        device.unpin(memory.ptr)
    memory.close()
