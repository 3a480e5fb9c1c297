"""SGLang's pools on a GPU: rooms, layers whose page numbers are still on the GPU, and offers, on the double.

A rank's pools are memory that the double takes for a GPU's, K and V of each layer apart, as SGLang allocates them.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pdlink.config.transport import TransportConfig
from pdlink.cuda import buffers, driver
from pdlink.cuda.buffers import DeviceMemory
from pdlink.cuda.driver import CudaEvent, CudaStream, Device
from pdlink.integrations.sglang_parts.arrivals import DecodeRooms
from pdlink.integrations.sglang_parts.ends import Ends
from pdlink.integrations.sglang_parts.gpu import GpuOrder, WrittenPages
from pdlink.integrations.sglang_parts.pool import Memory, buffers_of, layout_of
from pdlink.integrations.sglang_parts.rooms import KV, PrefillRooms
from pdlink.kv.groups import KVGroups
from pdlink.node.node import Node
from pdlink.protocol.handshake import ModelId
from pdlink.reasons import ABORTED, Reason
from tests.cuda.double import DriverEvent, Kv
from tests.cuda.fake import Fake
from tests.events import Reached
from tests.waiting import WAIT_S

PAGE, TOKEN, PAGES, LAYERS = 4, 64, 32, 3
ITEM = PAGE * TOKEN
SRC, DST = [3, 9, 4, 12, 20], [4, 0, 15, 7, 21]


class Rank:
    """Pools of one process, and what its manager keeps."""

    def __init__(self, name: str, device: Device, seed: int, kind: str, made: ExitStack) -> None:
        self.pools = [Kv(device, PAGES * ITEM, seed + entry, Reached) for entry in range(2 * LAYERS)]
        pointers, lens = [one.ptr for one in self.pools], [PAGES * ITEM] * 2 * LAYERS
        memory, places = buffers_of(pointers, lens, Memory(self, gpu=0))
        groups, self.layers = layout_of(places, lens, [ITEM] * 2 * LAYERS, [*range(LAYERS)] * 2, PAGE, "float32")

        def node(layout: KVGroups, suffix: str, meaning: str) -> Node:
            return Node(
                f"{name}{suffix}",
                layout,
                memory,
                model=ModelId(revision=meaning),
                transport=TransportConfig(kind=kind),
            )

        self.ends = Ends(groups, self.layers, [], node, memory)
        self.gpu = GpuOrder(self.ends.own.port.node.when_written, device.synchronize, 0)
        self.lost: list[Reason] = []
        self.over = threading.Event()
        self.sending = PrefillRooms(self._concluded, lambda _: None)
        self.receiving = DecodeRooms(lambda _, reason: self.lost.append(reason))
        for one in self.pools:
            made.callback(one.close)
        made.callback(self.ends.close)
        made.callback(self.gpu.close)

    def _concluded(self, room: int, transfer_id: str, error: str) -> None:
        self.lost += [Reason.of(error)] if error else []
        self.over.set()

    def pages(self, numbers: list[int]) -> list[bytes]:
        return [one.array[: PAGES * ITEM].reshape(PAGES, ITEM)[numbers].tobytes() for one in self.pools]


Make = Callable[..., tuple[Rank, Rank]]


@pytest.fixture
def stream(device: Device) -> Iterator[CudaStream]:
    """What both ranks compute on."""
    made = CudaStream(device)
    yield made
    made.close()


@pytest.fixture
def ranks(double: Fake, device: Device, stream: CudaStream, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(driver, "LIBRARY", double.path)
    with ExitStack() as made:

        def make_event(_: DeviceMemory) -> DriverEvent:
            event = DriverEvent(device, lambda: stream.handle)
            made.callback(event.close)
            return event

        monkeypatch.setattr(DeviceMemory, "make_event", make_event)
        yield lambda kind="mapped": (Rank("p", device, 1, kind, made), Rank("d", device, 100, kind, made))


def ask(prefill: Rank, decode: Rank, room: int, prefix: int = 0) -> str:
    """Decode has pages and asks; its offer is the caller's."""
    transfer_id = decode.receiving.open(room, prefix, DST, 0)
    assert prefill.sending.asked(room, transfer_id, prefix, {KV: (prefill.ends.own, len(SRC))})
    return transfer_id


def offer(prefill: Rank, decode: Rank, room: int, transfer_id: str) -> Callable[[], None]:
    where = {KV: (decode.ends.own, prefill.ends.own.port.node.address)}
    return partial(decode.receiving.sender_is_at, room, transfer_id, where)


@pytest.mark.parametrize(("kind", "lane"), [("mapped", "mapped-cuda"), ("tcp", "staged-tcp")])
def test_a_chunk_goes_from_pools_to_pools(ranks: Make, kind: str, lane: str) -> None:
    prefill, decode = ranks(kind)
    transfer_id = ask(prefill, decode, 7)
    decode.gpu.after_all(offer(prefill, decode, 7, transfer_id), decode.lost.append)
    with prefill.gpu.behind(None):
        prefill.sending.chunk(7, 0, SRC[:2], last=False)
        prefill.sending.chunk(7, 2, SRC[2:], last=True)
    assert prefill.over.wait(WAIT_S)
    assert (prefill.lost, decode.lost) == ([], [])
    assert decode.pages(DST) == prefill.pages(SRC)
    assert [peer["lane"] for peer in prefill.ends.own.port.node.report().peers] == [lane]


def test_a_layer_is_pushed_when_its_pass_has_written_it_and_the_hook_does_not_wait(
    ranks: Make, double: Fake, stream: CudaStream
) -> None:
    """Nor are the numbers of its pages read before: they are on their way from the GPU, too."""
    prefill, decode = ranks()
    transfer_id = ask(prefill, decode, 7)
    decode.gpu.after_all(offer(prefill, decode, 7, transfer_id), decode.lost.append)
    assert wait(lambda: transfer_id in prefill.sending.transfer_ids(7))
    before, numbers = decode.pages(DST), torch.zeros(len(SRC), dtype=torch.int64)
    double.hold_stream(stream.handle)
    try:
        part = WrittenPages(prefill.sending, 7, 0, numbers, len(SRC))
        for layer in range(LAYERS):
            part.written(prefill.gpu, layer)
        assert not prefill.over.wait(0.2)
        assert decode.pages(DST) == before
        numbers[:] = torch.tensor(SRC)
    finally:
        double.go_on_stream(stream.handle)
    assert wait(lambda: decode.pages(DST) == prefill.pages(SRC)), "before the chunk is given"
    prefill.sending.chunk(7, 0, SRC, last=True)
    assert prefill.over.wait(WAIT_S)
    assert (prefill.lost, decode.lost) == ([], [])


def test_the_hooks_of_a_pass_push_its_pages_layer_by_layer(
    ranks: Make, double: Fake, stream: CudaStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's hooks, without SGLang: its registry is a stand-in, its scheduler what the hooks read of one."""
    registry = ModuleType("hook_registry")
    registry.HookRegistry = registry.HookType = SimpleNamespace()  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
    monkeypatch.delitem(sys.modules, "pdlink.integrations.sglang_parts.layerwise", raising=False)
    layerwise = importlib.import_module("pdlink.integrations.sglang_parts.layerwise")
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory, **more: empty(*args, **more))

    prefill, decode = ranks()
    transfer_id = ask(prefill, decode, 7)
    decode.gpu.after_all(offer(prefill, decode, 7, transfer_id), decode.lost.append)
    manager: Any = SimpleNamespace(
        sending=prefill.sending, gpu=prefill.gpu, layer_ids=prefill.layers, kv_args=SimpleNamespace(page_size=PAGE)
    )
    slots = torch.tensor([[page * PAGE + token for page in SRC for token in range(PAGE)]])
    scheduler = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=slots),
        token_to_kv_pool_allocator=SimpleNamespace(translate_kv_indices_for_transfer=lambda indices: indices),
    )
    sender = SimpleNamespace(kv_mgr=manager, num_kv_indices=len(SRC), curr_idx=0, bootstrap_room=7)
    num_tokens = len(SRC) * PAGE
    request = SimpleNamespace(
        disagg_kv_sender=sender,
        origin_input_ids=[0] * num_tokens,
        extend_end=num_tokens,
        start_send_idx=0,
        kv=SimpleNamespace(req_pool_idx=0),
    )
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: True), reqs=[request])
    hooks = layerwise.Layerwise(manager)

    def run(scheduler: Any, batch: Any) -> None:
        for layer in range(LAYERS):
            where = SimpleNamespace(layer_id=layer)
            hooks.around_forward(lambda *_: None, None, None, None, None, where)

    before = decode.pages(DST)
    double.hold_stream(stream.handle)
    try:
        hooks.around_batch(run, scheduler, batch)  # returns although nothing of it has run
        assert decode.pages(DST) == before
    finally:
        double.go_on_stream(stream.handle)
    assert wait(lambda: decode.pages(DST) == prefill.pages(SRC)), "before the chunk is given"
    monkeypatch.delitem(sys.modules, "pdlink.integrations.sglang_parts.layerwise")


def test_pages_of_a_pass_whose_room_is_another_request_s_by_now_are_dropped(
    ranks: Make, double: Fake, stream: CudaStream
) -> None:
    prefill, decode = ranks()
    ask(prefill, decode, 7)
    double.hold_stream(stream.handle)
    try:
        part = WrittenPages(prefill.sending, 7, 0, torch.tensor([1, 1, 1, 1, 1]), len(SRC))
        part.written(prefill.gpu, 0)
        prefill.sending.end(7, ABORTED)
        decode.receiving.forget(7)
        transfer_id = ask(prefill, decode, 7)
    finally:
        double.go_on_stream(stream.handle)
    prefill.over.clear()
    decode.gpu.after_all(offer(prefill, decode, 7, transfer_id), decode.lost.append)
    prefill.gpu.later(lambda: prefill.sending.chunk(7, 0, SRC, last=True), prefill.lost.append)
    assert wait(lambda: decode.pages(DST) == prefill.pages(SRC))


def test_a_prefix_that_the_step_before_may_still_write_follows_sglang_s_event(
    ranks: Make, double: Fake, device: Device, stream: CudaStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stream of its own: what the scheduler launches next does not wait."""
    current, forward, apart, written = [stream.handle], CudaStream(device), CudaStream(device), CudaEvent(device)

    class SideStream:
        def __init__(self, index: int) -> None:
            assert index == 0
            self.handle = apart.handle

        def wait_event(self, event: CudaEvent) -> None:
            device.wait(self.handle, event)

    @contextmanager
    def entered(side: SideStream) -> Iterator[None]:
        current.append(side.handle)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", SideStream)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    with ExitStack() as events:

        def make_event(_: DeviceMemory) -> DriverEvent:
            event = DriverEvent(device, lambda: current[-1])
            events.callback(event.close)
            return event

        monkeypatch.setattr(DeviceMemory, "make_event", make_event)
        prefill, decode = ranks()
        transfer_id = ask(prefill, decode, 7)
        offer(prefill, decode, 7, transfer_id)()
        before = decode.pages(DST)
        double.hold_stream(forward.handle)
        written.record(forward)
        try:
            with prefill.gpu.behind(written):
                prefill.sending.chunk(7, 0, SRC, last=True)
            assert not prefill.over.wait(0.3)
            assert decode.pages(DST) == before
        finally:
            double.go_on_stream(forward.handle)
        assert prefill.over.wait(WAIT_S)
        assert decode.pages(DST) == prefill.pages(SRC)
        assert current == [stream.handle]
        for rank in (prefill, decode):
            rank.ends.close()
    written.close()
    forward.close()
    apart.close()


def test_pages_are_offered_when_the_device_has_done_what_was_launched(
    ranks: Make, double: Fake, device: Device
) -> None:
    """The last step of a request that has ended may still write them, on a stream that nobody tells us of."""
    prefill, decode = ranks()
    transfer_id = ask(prefill, decode, 7)
    before = decode.pages(DST)
    forward = CudaStream(device)
    double.hold_stream(forward.handle)
    try:
        decode.gpu.after_all(offer(prefill, decode, 7, transfer_id), decode.lost.append)
        prefill.sending.chunk(7, 0, SRC, last=True)
        assert not prefill.over.wait(0.3)
        assert decode.pages(DST) == before
    finally:
        double.go_on_stream(forward.handle)
    assert prefill.over.wait(WAIT_S)
    assert decode.pages(DST) == prefill.pages(SRC)
    forward.close()


def test_rooms_of_a_gpu_that_has_failed_hear_of_it(ranks: Make, double: Fake) -> None:
    _, decode = ranks()
    double.fail("cuCtxSynchronize", 700)
    acted: list[int] = []
    decode.gpu.after_all(lambda: acted.append(1), decode.lost.append)
    assert wait(lambda: len(decode.lost) == 1)
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in decode.lost[0].words
    decode.gpu.after_all(lambda: acted.append(2), decode.lost.append)
    assert wait(lambda: acted == [2])


def test_an_event_is_recorded_on_the_stream_of_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has chosen no GPU has number 0."""
    recorded: list[Any] = []
    event = SimpleNamespace(record=recorded.append, synchronize=lambda: None, query=lambda: True, cuda_event=77)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=1000 + index))
    memory: Any = DeviceMemory()
    memory.device = SimpleNamespace(index=3)
    made = memory.make_event()
    made.record()
    assert [one.cuda_stream for one in recorded] == [1003]
    assert (made.handle, made.stream, made.reached()) == (77, 1003, True)
    assert isinstance(memory.make_event(), buffers._TorchEvent)


def wait(true: Callable[[], object]) -> bool:
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if true():
            return True
        pause.wait(0.01)
    return False
