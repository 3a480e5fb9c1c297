"""What UCX is told of device memory. That it then carries it takes a GPU (`test_on_gpu.py`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pdlink.cuda.buffers import DeviceBuffer
from pdlink.cuda.driver import Device
from pdlink.errors import TransportFailure, TransportUnavailable
from pdlink.memory.buffers import Buffer
from pdlink.transport.ucx import UcxTransport

pytestmark = pytest.mark.skipif(not UcxTransport.probe().ok, reason="no UCX")

PACKING = {"": 512}


@pytest.fixture
def buffer(device: Device) -> Iterator[DeviceBuffer]:
    with DeviceBuffer(device, 4096) as buffer:
        yield buffer


def opened(stage_below_nbytes: dict[str, int] | None = None) -> UcxTransport:
    transport = UcxTransport("tcp", devices="lo", stage_below_nbytes=stage_below_nbytes)
    transport.open()
    return transport


def test_device_memory_and_packing_exclude_each_other(buffer: DeviceBuffer) -> None:
    """Runs are packed and unpacked by the CPU, which cannot reach device memory: it would crash."""
    transport = opened(stage_below_nbytes=PACKING)
    with pytest.raises(TransportUnavailable, match="cannot be packed"):
        transport.register(buffer)
    transport.close()


def test_a_writer_that_packs_does_not_connect_to_device_memory() -> None:
    owner, packing, plain = opened(), opened(stage_below_nbytes=PACKING), opened(stage_below_nbytes={})
    with Buffer(4096) as host:
        owner.register(host)
        owner._on_device = True
        with pytest.raises(TransportFailure, match="has device memory"):
            packing.connect("owner", owner.invite("packing"))
        plain.connect("owner", owner.invite("plain"))
        for transport in (owner, packing, plain):
            transport.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_registration_without_a_driver_is_refused(buffer: DeviceBuffer) -> None:
    transport = opened(stage_below_nbytes={})
    with pytest.raises(TransportUnavailable, match="no CUDA driver in this process"):
        transport.register(buffer)
    with Buffer(4096) as host:
        assert transport.register(host) == 0
        transport.close()
