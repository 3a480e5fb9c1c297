"""Transports of device memory on the test double of the driver, with host buffers lent to it as device memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import pdlink
from pdlink.capabilities import MemoryKind, Trust
from pdlink.cuda.buffers import DeviceBuffer
from pdlink.cuda.driver import CudaEvent, CudaFailure, Device
from pdlink.cuda.ways import Ways
from pdlink.kv.layout import KVLayout, LayerLayout, Part
from pdlink.kv.plan import BlockIds, Plan, bind, template
from pdlink.memory.buffers import AnyBuffer, Buffer
from pdlink.transport.base import Transport
from pdlink.transport.mapped_cuda import MappedCudaTransport
from pdlink.transport.staged import StagedTransport
from tests.cuda.fake import IMAGE, fake
from tests.events import EventBells
from tests.node.conftest import TIMEOUTS, TOKENS, groups


def block_plan(pool_nbytes: int, block_nbytes: int, src: BlockIds, dst: BlockIds) -> Plan:
    """Between blocks of the first regions, of one layer of one part whose blocks hold a token."""
    layer = LayerLayout((Part(0, 0),), block_nbytes, block_nbytes, block_nbytes)
    layout = KVLayout("uint8", 1, pool_nbytes // block_nbytes, 1, block_nbytes, (layer,))
    return bind(template(layout, layout), src, dst, 0, len(src))


@contextlib.contextmanager
def nothing_can_be_pinned() -> Iterator[None]:
    def refuse(*_: object) -> int:
        raise CudaFailure("cuMemHostRegister_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "pin", refuse)
        yield


class LentBuffer(DeviceBuffer):
    """A host buffer that the double takes for device memory; it stays its owner's."""

    def __init__(self, device: Device, buffer: Buffer) -> None:
        fake().lend(buffer.ptr, buffer.nbytes, buffer.fd)
        self.device, self.ptr, self.nbytes = device, buffer.ptr, buffer.nbytes
        self._closed = True  # not ours to free


class DriverEvent:
    """A node's event, recorded on the stream that the test computes on."""

    def __init__(self, device: Device, stream: Callable[[], int]) -> None:
        self._event, self._stream, self.stream = CudaEvent(device), stream, 0

    @property
    def handle(self) -> int:
        return self._event.handle

    def record(self) -> None:
        self.stream = self._stream()
        self._event.record(self.stream)

    def reached(self) -> bool:
        return self._event.done()

    def synchronize(self) -> None:
        while not self._event.done():
            time.sleep(0.001)

    def close(self) -> None:
        self._event.close()


class Kv(LentBuffer):
    """Device memory of a node on the double, which the test reads and writes as the host's."""

    def __init__(
        self,
        device: Device,
        nbytes: int,
        seed: int,
        make_event: Callable[[], Any],
        make_bells: Callable[[], Any] = EventBells,
    ) -> None:
        """make_event: of what the test's compute stream has been given. make_bells: what rings after these."""
        self.host = Buffer(nbytes)
        self.array = self.host.array
        self.array[:] = np.random.default_rng(seed).integers(0, 256, len(self.array), np.uint8)
        self._make_event, self._make_bells = make_event, make_bells
        super().__init__(device, self.host)

    def make_event(self) -> Any:
        return self._make_event()

    def make_bells(self) -> Any:
        return self._make_bells()

    def close(self) -> None:
        fake().lend(self.ptr, 0, -1)
        self.host.close()


class DoubleNode(pdlink.Node):
    """What is in its device memory is read as the host's."""

    def __init__(
        self,
        name: str,
        device: Device,
        block_tokens: int,
        transport: Transport,
        make_event: Callable[[], Any],
        make_bells: Callable[[], Any] = EventBells,
    ) -> None:
        kv = groups(block_tokens)
        self.kv = Kv(device, kv.extent(0), block_tokens, make_event, make_bells)
        super().__init__(name, kv, [self.kv], transports=[transport], deadlines=TIMEOUTS)

    def rows(self, blocks: list[int], layer: int, part: int) -> Any:
        place, kv = self.groups.layouts[0].layers[layer], self.groups.layouts[0]
        shape = (kv.num_blocks, kv.block_tokens, kv.num_heads, kv.head_nbytes)
        strides = (place.block_stride, place.token_stride, place.head_stride, 1)
        pages = np.lib.stride_tricks.as_strided(self.kv.array[place.parts[part].offset :], shape, strides)
        return pages[blocks].reshape(len(blocks) * kv.block_tokens, -1)[:TOKENS]

    def close(self) -> None:
        super().close()
        self.kv.close()


class _Lends(Transport):
    """Takes host buffers of a test for device memory, as long as it is open."""

    memory: tuple[MemoryKind, ...] = ("host", "cuda")
    _device: Device

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lent: list[Buffer] = []

    def register(self, buffer: AnyBuffer) -> int:
        if not isinstance(buffer, Buffer) or hasattr(buffer, "device_ptr"):
            return super().register(buffer)  # type: ignore[safe-super]  # of a transport behind this class
        self._lent.append(buffer)
        return super().register(LentBuffer(self._device, buffer))  # type: ignore[safe-super]

    def close(self) -> None:
        super().close()  # type: ignore[safe-super]
        while self._lent:
            fake().lend(self._lent.pop().ptr, 0, -1)


class DoubleTransport(_Lends, MappedCudaTransport):
    def __init__(self, launch_nbytes: int = 1 << 20) -> None:
        super().__init__(library=fake().path, image=IMAGE, launch_nbytes=launch_nbytes)


class DoubleStaged(_Lends, StagedTransport):
    """Device memory of the double through pinned slots."""

    kind = "staged"

    def __init__(
        self,
        below: Transport,
        *,
        slot_nbytes: int = 256 << 10,
        num_slots: int = 4,
        image: bytes = IMAGE,
    ) -> None:
        """image: b"" for a build without kernels, which leaves the copy engine."""
        more: dict[str, Any] = {"library": fake().path, "image": image, "ways": Ways()}
        super().__init__(below, slot_nbytes=slot_nbytes, num_slots=num_slots, **more)

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"staged-{self._below.name}"

    @property
    def trust(self) -> Trust:  # type: ignore[override]
        return self._below.trust
