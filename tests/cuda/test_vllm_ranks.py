"""Ranks of vLLM whose KV cache is on a GPU: which lane they take, and bytes, on the test double of the driver.

The tensors are said to be on a GPU; what they lie in is memory that the double takes for a GPU's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pdlink.cuda import driver
from pdlink.cuda.buffers import DeviceMemory
from pdlink.cuda.driver import Device
from pdlink.errors import ConfigError
from pdlink.integrations.vllm_parts import params, versions
from pdlink.integrations.vllm_parts.layout import UnsupportedCache
from pdlink.integrations.vllm_parts.memory import regions
from pdlink.integrations.vllm_parts.rank import Rank
from pdlink.integrations.vllm_parts.requests import RequestBook, Scheduled
from pdlink.integrations.vllm_parts.settings import read
from pdlink.integrations.vllm_parts.store_book import StoreBook
from tests.cuda.double import DriverEvent, Kv
from tests.cuda.fake import Fake, fake
from tests.cuda.virtual import Segment
from tests.events import Reached
from tests.waiting import WAIT_S

LAYERS, BLOCKS, HEADS, TOKENS, SIZE = 3, 16, 2, 4, 8
SHAPE = (BLOCKS, HEADS, TOKENS, 2 * SIZE)
NAMES = [f"model.layers.{index}" for index in range(LAYERS)]
PROMPT = list(range(14))
CHUNK = 4
ID = params.transfer_id("a", PROMPT)


class GpuTensor:
    """A view of one layer in an allocation of all, as vLLM makes it, that says that it is on a GPU."""

    device = torch.device("cuda", 0)

    def __init__(self, kv: Kv | VirtualKv, layer: int) -> None:
        self._kv, self._layer = kv, layer
        nbytes = int(np.prod(SHAPE)) * 4
        self.seen = kv.array[layer * nbytes : (layer + 1) * nbytes].view(np.float32).reshape(SHAPE)
        self.shape = SHAPE

    def stride(self) -> tuple[int, ...]:
        return tuple(one // 4 for one in self.seen.strides)

    def element_size(self) -> int:
        return 4

    def data_ptr(self) -> int:
        return int(self.seen.ctypes.data)

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=lambda: self._kv.ptr, nbytes=lambda: self._kv.nbytes)


class VirtualKv:
    """Memory as of vLLM's cumem allocator."""

    def __init__(self, device: Device, nbytes: int, seed: int) -> None:
        self._segment = Segment(device, nbytes, 4096)
        self.ptr, self.nbytes, self.array = self._segment.ptr, nbytes, self._segment.array
        self.array[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)

    def close(self) -> None:
        self._segment.close()


class Server:
    def __init__(
        self, name: str, device: Device, seed: int, extra: dict[str, Any], *, memory: str = "", sleeps: bool = False
    ) -> None:
        """memory: "pooled" for one that nothing exports, "virtual" for chunks that have shareable handles."""
        nbytes = LAYERS * int(np.prod(SHAPE)) * 4
        self.kv = VirtualKv(device, nbytes, seed) if memory == "virtual" else Kv(device, nbytes, seed, Reached)
        if memory == "pooled":
            fake().make_pooled(self.kv.ptr)
        self.tensors = {name: GpuTensor(self.kv, index) for index, name in enumerate(NAMES)}
        model = SimpleNamespace(
            served_model_name="m",
            revision=None,
            hf_text_config=SimpleNamespace(to_dict=dict),
            dtype="float32",
            quantization=None,
            get_total_num_kv_heads=lambda: HEADS,
            enable_sleep_mode=sleeps,
        )
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1),
            kv_transfer_config=SimpleNamespace(engine_id=name, kv_load_failure_policy="fail"),
            model_config=model,
            cache_config=SimpleNamespace(cache_dtype="auto"),
            compilation_config=SimpleNamespace(static_forward_context={}),
        )
        spec = SimpleNamespace(head_size=SIZE, dtype="torch.float32", block_size=TOKENS)
        group = SimpleNamespace(kv_cache_spec=spec, layer_names=NAMES)
        cache = SimpleNamespace(kv_cache_groups=[group], num_blocks=BLOCKS)
        store = StoreBook(CHUNK) if "tiers" in extra else None
        self.book = RequestBook(sends=True, receives=True, shares_prefixes=True, store=store)
        self.rank = Rank(config, cache, read(extra))
        self.over: set[str] = set()

    def open(self) -> Server:
        self.rank.open(self.tensors)  # type: ignore[arg-type]
        return self

    def step(self, parts: list[Scheduled] | None = None, *, hooks: bool = True) -> set[str]:
        """What vLLM does in one step; what has ended. hooks: off in a full graph."""
        plan = self.book.step(parts or [], frozenset())
        self.rank.steps.withdraw(plan)
        self.rank.steps.begin(plan)
        for name in NAMES if hooks and parts else ():
            self.rank.steps.layer_saved(name)
        self.rank.steps.end()
        over, self.over = self.over, set()
        results = self.rank.steps.results(over)
        assert not results.failed, results.reasons
        if self.book.store is not None:
            self.book.store.looked(results.looked)
        self.book.received(results.received, results.reasons)
        self.book.sent(results.sent)
        return results.received | results.sent

    def until(self, true: Callable[[set[str]], object]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not true(self.step()):
            assert time.monotonic() < deadline_s
            self.rank.steps.pause(0.01)

    def close(self) -> None:
        self.rank.close()
        self.kv.close()


@pytest.fixture
def server(double: Fake, device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    monkeypatch.setattr(driver, "LIBRARY", double.path)
    monkeypatch.setattr(DeviceMemory, "compute_stream", lambda _: 0)
    monkeypatch.setattr(versions, "content", lambda _: "digest")
    monkeypatch.setattr(versions, "frees_early", lambda: False)  # asks vLLM's scheduler
    with ExitStack() as made:

        def make_event(_: DeviceMemory) -> DriverEvent:
            event = DriverEvent(device, lambda: 0)
            made.callback(event.close)
            return event

        monkeypatch.setattr(DeviceMemory, "make_event", make_event)

        def make(name: str, seed: int, extra: dict[str, Any] | None = None, **more: Any) -> Server:
            one = Server(name, device, seed, extra or {}, **more)
            made.callback(one.close)
            return one

        yield make


LANES = {
    "mapped-cuda": {"transport": {"kind": "mapped"}},
    "staged-tcp": {"transport": {"kind": "tcp"}},
}


@pytest.mark.parametrize("hooks", [True, False], ids=["piecewise graphs", "full graphs"])
@pytest.mark.parametrize("lane", LANES)
def test_a_prompt_crosses_between_two_gpus(server: Callable[..., Server], lane: str, hooks: bool) -> None:
    prefill, decode = (server(name, seed, LANES[lane]).open() for seed, name in enumerate(("p", "d")))
    [node] = prefill.rank._nodes
    prefill.book.arrived("p", {"transfer_id": "a", "leg": "prefill"}, PROMPT)
    control = {"control": node.address}
    decode.book.arrived("d", {"transfer_id": "a", "leg": "decode", "prefill": control}, PROMPT)
    count, parked = decode.book.missing("d", 0)
    assert parked
    assert count == len(PROMPT) - 1
    src, dst = [3, 9, 1, 12], [4, 0, 15, 7]
    decode.book.allocated("d", (dst,), count)
    decode.step()
    prefill.step([Scheduled("p", (tuple(src),), True, 0, len(PROMPT))], hooks=hooks)
    prefill.over.add("p")
    prefill.book.ended("p")
    ended: set[str] = set()
    deadline_s = time.monotonic() + WAIT_S
    while ended != {"p", "d"}:
        assert time.monotonic() < deadline_s, ended
        ended |= prefill.step() | decode.step()
        decode.rank.steps.pause(0.01)
    for name in NAMES:
        sent, got = (
            one.tensors[name].seen[blocks].transpose(0, 2, 1, 3).reshape(-1, HEADS, 2 * SIZE)[: len(PROMPT) - 1]
            for one, blocks in ((prefill, src), (decode, dst))
        )
        assert got.tobytes() == sent.tobytes(), name
    assert [peer["lane"] for peer in node.report().peers] == [lane]


@pytest.mark.parametrize(
    ("memory", "sleeps", "reason"),
    [
        ("pooled", False, "no other process can map: neither CUDA IPC nor a shareable handle exports it"),
        ("virtual", True, "of which a peer would not hear.*turn sleep mode off"),
    ],
)
def test_memory_that_no_peer_can_map_goes_through_slots_and_the_log_says_why(
    server: Callable[..., Server], caplog: pytest.LogCaptureFixture, memory: str, sleeps: bool, reason: str
) -> None:
    """UCX would leave its CUDA lane silently."""
    one = server("p", 0, memory=memory, sleeps=sleeps).open()
    [node] = one.rank._nodes
    assert node.transports[0] == "staged-mapped"
    assert "staged-tcp" in node.transports
    assert not {"mapped-cuda", "ucx"} & {*node.transports}
    told = {lane: text for lane in ("mapped-cuda", "ucx") for text in caplog.messages if f"used: {lane}: " in text}
    assert re.search(reason, told["mapped-cuda"])
    assert "CUDA IPC does not share: virtual memory (expandable_segments" in told["ucx"]
    assert "take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF, or sleep mode off" in told["ucx"]


def test_virtual_memory_with_handles_is_mapped_by_a_peer(server: Callable[..., Server]) -> None:
    """As of `--enable-cumem-allocator` without sleep mode. `test_virtual.py` has bytes between processes."""
    [node] = server("p", 0, memory="virtual").open().rank._nodes
    assert node.transports[0] == "mapped-cuda"


@pytest.mark.parametrize("hooks", [True, False], ids=["piecewise graphs", "full graphs"])
def test_a_prompt_is_kept_and_comes_back_into_other_blocks_of_the_gpu(
    server: Callable[..., Server], double: Fake, hooks: bool
) -> None:
    """A step returns although the GPU has run nothing of it. Virtual memory is kept like other, too."""
    tiers = {"max_local_cpu_size": 0.01, "chunk_size": CHUNK, "load_if_faster": False}
    one = server("p", 0, {"tiers": tiers}, memory="" if hooks else "virtual").open()
    assert one.book.store is not None
    src, dst, shared = [3, 9, 1, 12], [4, 0, 15, 7], len(PROMPT) // CHUNK * CHUNK
    one.book.store.arrived("a", PROMPT, "", "", ())
    one.until(lambda _: one.book.missing("a", 0)[0] == 0)
    one.book.allocated("a", (src,), 0)
    double.hold()
    try:
        one.step([Scheduled("a", (tuple(src),), True, 0, len(PROMPT))], hooks=hooks)
        assert one.book.ended("a"), "its blocks are kept until they are copied"
        one.over.add("a")
        for _ in range(5):
            assert one.step() == set()
            one.rank.steps.pause(0.01)
    finally:
        double.go_on()
    one.until(lambda ended: "a" in ended)
    before = {name: one.tensors[name].seen[src].copy() for name in NAMES}
    for name in NAMES:
        one.tensors[name].seen[src] = 0.0
    one.book.store.arrived("b", PROMPT, "", "", ())
    one.until(lambda _: one.book.missing("b", 0)[0] is not None)
    assert one.book.missing("b", 0) == (shared, True)
    one.book.allocated("b", (dst,), shared)
    one.until(lambda ended: "b" in ended)
    for name in NAMES:
        kept, got = (
            pages.transpose(0, 2, 1, 3).reshape(-1, HEADS, 2 * SIZE)[:shared]
            for pages in (before[name], one.tensors[name].seen[dst])
        )
        assert got.tobytes() == kept.tobytes(), name


def test_checksums_of_a_cache_on_a_gpu_are_refused_at_start(server: Callable[..., Server]) -> None:
    with pytest.raises(ConfigError, match=r"transport.verify: got 'all' for a KV cache on a GPU.*set it to off"):
        server("p", 0, {"transport": {"verify": "all"}}).open()


def test_a_cache_on_two_devices_is_refused() -> None:
    tensors = [SimpleNamespace(device=torch.device("cuda", index)) for index in range(2)]
    with pytest.raises(UnsupportedCache, match="cuda:0, cuda:1; it must be on the CPU or one GPU"):
        regions(tensors, [])  # type: ignore[arg-type]
