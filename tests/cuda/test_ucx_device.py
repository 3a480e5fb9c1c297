"""What UCX is told of device memory. That it then carries it takes a GPU (`test_on_gpu.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from pdlink.cuda.buffers import DeviceBuffer
from pdlink.cuda.driver import Device
from pdlink.errors import TransportUnavailable
from pdlink.memory.buffers import Buffer
from pdlink.transport.ucx import UcxTransport

pytestmark = pytest.mark.skipif(not UcxTransport().probe().ok, reason="no UCX")


@pytest.fixture
def buffer(device: Device) -> Iterator[DeviceBuffer]:
    with closing(DeviceBuffer(device, 4096)) as buffer:
        yield buffer


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_registration_without_a_driver_is_refused(buffer: DeviceBuffer) -> None:
    transport = UcxTransport("tcp", devices="lo")
    transport.open()
    with pytest.raises(TransportUnavailable, match="no CUDA driver in this process"):
        transport.register(buffer)
    with Buffer(4096) as host:
        assert transport.register(host) == 0
        transport.close()
