"""Windows and states of a vLLM rank whose pages are on a GPU, kept on the double under a scheduler like vLLM's.

Blocks that leave a window go to others in the next step, whose kernels overwrite them. The double notes it if those
are in no order with the copies into the store.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pdlink.cuda.driver import CudaStream, Device
from pdlink.cuda.ways import Ways
from pdlink.store import gpu_pages
from pdlink.store.eviction import Lru
from pdlink.store.gpu_pages import GpuPages
from pdlink.store.store import Store
from tests.cuda.double import Kv
from tests.cuda.fake import IMAGE, Fake
from tests.events import Reached
from tests.integrations.test_store_groups import PROMPT, Request, Server, new_request
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DRAFTS_NBYTES = 4 << 20


class _Pages(Kv):
    stream: CudaStream

    def compute_stream(self) -> int:
        return self.stream.handle


class GpuServer(Server):
    def __init__(self, store: Store, device: Device) -> None:
        self.device, self.stream = device, CudaStream(device)
        self.drafts, self.at = Kv(device, DRAFTS_NBYTES, 1, Reached), 0
        super().__init__(store, random.Random(0), WAIT_S)

    def allocate(self, nbytes: int) -> Any:
        pages = _Pages(self.device, nbytes, 2, Reached)
        pages.stream = self.stream
        return pages

    def gpu(self) -> GpuPages | None:
        return GpuPages(self.buffers, image=IMAGE, ways=Ways(1 << 62, 1 << 62), step_nbytes=4096)

    def write(self, place: np.ndarray[Any, Any], what: Any) -> None:
        """Launch it."""
        if self.at + len(place) > DRAFTS_NBYTES:
            self.stream.synchronize()
            self.at = 0
        self.drafts.array[self.at : self.at + len(place)] = what
        self.device.copy(place.ctypes.data, self.drafts.ptr + self.at, len(place), self.stream.handle)
        self.at += len(place)

    def check(self, request: Request) -> None:
        self.stream.synchronize()
        super().check(request)

    def close(self) -> None:
        super().close()
        self.stream.synchronize()
        self.stream.close()
        self.drafts.close()


@pytest.fixture
def serving(double: Fake, device: Device) -> Iterator[Callable[[], GpuServer]]:
    with ExitStack() as stack:
        store = Store(1 << 20, Lru(), [])
        store.open()
        stack.callback(store.close)

        def serve() -> GpuServer:
            server = GpuServer(store, device)
            stack.callback(server.close)
            return server

        yield serve


@pytest.mark.parametrize("num_slots", [16, 2], ids=["all in flight", "more than are in flight"])
def test_windows_and_states_are_kept_while_others_write_into_blocks_they_have_left(
    serving: Callable[[], GpuServer], monkeypatch: pytest.MonkeyPatch, num_slots: int
) -> None:
    monkeypatch.setattr(gpu_pages, "_NUM_SLOTS", num_slots)
    server = serving()
    assert server.run("first", PROMPT) == 0
    assert server.run("again", PROMPT) == 96, "a step ended there, and left a state"
    assert server.run("longer", [*PROMPT, 1, 2, 3]) == 112
    assert server.run("branch", [*PROMPT[:70], *range(60)]) == 64
    assert server.num_failed == 0


def test_a_step_that_is_not_behind_the_copies_is_found(
    serving: Callable[[], GpuServer], double: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuPages, "follow_stores", lambda _: None)
    server = serving()
    copier = server.source.gpu
    assert copier is not None
    stores, request = copier._stores.copies._stream.handle, new_request("first", PROMPT)
    server.arrive(request)
    double.hold_stream(stores)
    deadline_s = time.monotonic() + WAIT_S
    while request.computed < 64:  # the second step writes into blocks that the window has left
        assert time.monotonic() < deadline_s
        server.step()
        server.steps.pause(0.01)
    double.go_on_stream(stores)
    server.until_over(request)
    assert double.take_faults()
