"""A cache that goes through memory of the host: two servers whose transports see the mirror alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdlink.errors import ConfigError
from pdlink.integrations.shared_allocation import SharedAllocation
from pdlink.integrations.vllm_parts import host_copy
from pdlink.integrations.vllm_parts.host_copy import HostCopy
from pdlink.integrations.vllm_parts.layout import PACKED, ROWS, STATE, CacheGroups, GroupKind, LayerView, describe
from pdlink.integrations.vllm_parts.requests import ComputedChunk, OfferedBlocks, Scheduled, StepPlan
from pdlink.integrations.vllm_parts.store_book import BlocksToLoad, BlocksToSave, BookedPrompt, Keep, StorePlan
from tests.endpoint.conftest import Node, Pair
from tests.integrations.test_worker import DST, NAMES, SRC, Server, ask, cache_of, offer
from tests.waiting import until

Tensors = dict[str, torch.Tensor]


def on(kind: str) -> Any:
    return SimpleNamespace(device=torch.device(kind))


@pytest.mark.parametrize(
    ("devices", "buffer_device", "needed"),
    [
        (["cpu"], "cpu", False),
        (["cuda:0"], "cuda", False),
        (["cuda:0"], "cpu", True),
        (["xpu"], "xpu", True),
        (["xpu"], "cpu", True),
        (["meta"], "cuda", True),
        (["cpu", "xpu"], "cpu", True),
    ],
)
def test_what_transports_cannot_read_goes_through_the_host(
    devices: list[str], buffer_device: str, needed: bool
) -> None:
    """vLLM's default is the platform's device, before 0.32 partly cuda: on CPUs and GPUs nothing is copied."""
    assert host_copy.is_needed([on(device) for device in devices], buffer_device) == needed


def test_a_mirror_lies_over_itself_as_the_cache_does() -> None:
    pages = torch.arange(4 << 18, dtype=torch.float32)
    cache = {
        "a": pages.view(4, 2, -1)[:, 0],
        "b": pages.view(4, -1)[1:, 5:25].view(3, 4, 5),
        "c": torch.zeros(10, 8, dtype=torch.bfloat16).t(),
        "d": torch.zeros(300, 4, dtype=torch.float8_e4m3fn),
    }
    allocation = SharedAllocation()
    mirrored = host_copy.mirror(cache, allocation)
    for name, tensor in cache.items():
        mine = mirrored[name]
        assert (mine.dtype, mine.shape, mine.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert mine.storage_offset() == tensor.storage_offset()
    assert mirrored["a"].untyped_storage().data_ptr() == mirrored["b"].untyped_storage().data_ptr()
    assert [buffer.ptr for buffer in allocation.buffers] == [mirrored["a"].untyped_storage().data_ptr()]
    mirrored["b"][:] = 7
    assert (mirrored["a"] == 7).sum() == 3 * 20, "other servers of the host map one memory file"
    assert not (cache["a"] == 7).all()


def test_a_mirror_that_the_host_has_no_room_for_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"kv_buffer_device: got a cache on meta.*--gpu-memory-utilization"):
        host_copy.mirror({"a": torch.empty(1 << 50, device="meta")}, SharedAllocation())


# -- two servers


def views(node: Node) -> Tensors:
    """The mirror, as vLLM shapes layers: [K or V, block, token, head, bytes]."""
    kv, pages = node.layout, torch.from_numpy(node.buffer.array)
    found = {}
    for name, layer in zip(NAMES, kv.layers, strict=True):
        step = layer.parts[1].offset - layer.parts[0].offset
        shape = (2, kv.num_blocks, kv.block_tokens, kv.num_heads, kv.head_nbytes)
        strides = (step, layer.block_stride, layer.token_stride, layer.head_stride, 1)
        found[name] = pages.as_strided(shape, strides, layer.parts[0].offset)
    return found


class OnDevice(Server):
    """A server whose cache is elsewhere."""

    def __init__(self, node: Node, *, ratio: int = 1, layerwise: bool = True) -> None:
        super().__init__(node, ratio=ratio)
        mirrored = views(node)
        self.device = {name: tensor.clone() for name, tensor in mirrored.items()}
        self.half.host = HostCopy(self.device, mirrored, cache_of(node, ratio), layerwise=layerwise)

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.device.values():
            tensor.random_(0, 256, generator=generator)

    def rows(self, name: str, blocks: list[int], num_tokens: int) -> torch.Tensor:
        return self.device[name][:, blocks].flatten(1, 2)[:, :num_tokens]


@pytest.fixture(params=[True, False], ids=["layerwise", "whole"])
def servers(request: pytest.FixtureRequest) -> Iterator[tuple[Pair, OnDevice, OnDevice]]:
    """As in test_worker.py: blocks of 4 tokens, and of two kernel blocks with 8."""
    pair = Pair()
    pair.prefill.buffer.array[:] = 0
    prefill = OnDevice(pair.prefill, layerwise=request.param)
    prefill.fill(1)
    yield pair, prefill, OnDevice(pair.decode, ratio=2, layerwise=request.param)
    pair.close()


def same(prefill: OnDevice, decode: OnDevice, start: int = 0, end: int = 29) -> bool:
    return all(
        torch.equal(prefill.rows(name, SRC, end)[:, start:], decode.rows(name, DST, end)[:, start:]) for name in NAMES
    )


@pytest.mark.parametrize("hooks", [True, False])
def test_kv_crosses_from_device_to_device_in_chunks(servers: tuple[Pair, OnDevice, OnDevice], hooks: bool) -> None:
    pair, prefill, decode = servers
    ask(prefill, decode)
    offer(decode)
    decode.step()
    prefill.step([Scheduled("p", (tuple(SRC[:4]),), True, 0, 16)], hooks=hooks)
    prefill.step([Scheduled("p", (tuple(SRC[4:]),), False, 16, 14)], hooks=hooks)
    assert prefill.end("p")
    until(lambda: not decode.half.transfers.is_awaited or bool(pair.decode.rows(DST, 29, 2).any()), "it lands")
    assert not any(tensor.any() for tensor in decode.device.values()), "in the host's memory, and nowhere else yet"
    assert not decode.until_reported(received="d").failed
    assert same(prefill, decode)
    prefill.until_reported(sent="p")
    decode.end("d")
    decode.step()
    assert prefill.idle()
    assert decode.idle()
    for server in (prefill, decode):
        assert server.half.host is not None
        assert not server.half.host._tables
        assert not server.half.host._coming


def test_what_a_hook_announces_is_what_the_device_has_by_then(servers: tuple[Pair, OnDevice, OnDevice]) -> None:
    """And a prefix of vLLM's own cache, which the same step may compute."""
    _, prefill, decode = servers
    ask(prefill, decode)
    offer(decode)
    decode.step()
    prefill.half.begin(prefill.book.step([Scheduled("p", (tuple(SRC),), True, 16, 14)]))
    prefill.fill(2)
    for name in NAMES:
        prefill.half.layer_saved(name)
    prefill.half.end()
    decode.until_reported(received="d")
    assert same(prefill, decode)


def test_what_decode_has_of_a_prompt_stays_as_it_is(servers: tuple[Pair, OnDevice, OnDevice]) -> None:
    _, prefill, decode = servers
    decode.fill(3)
    before = [decode.rows(name, DST, 16).clone() for name in NAMES]
    others = [block for block in range(decode.node.layout.num_blocks) if block not in DST]
    apart = [decode.device[name][:, others].clone() for name in NAMES]
    ask(prefill, decode)
    offer(decode, 16)
    decode.step()
    prefill.step([Scheduled("p", (tuple(SRC),), True, 8, 22)])
    decode.until_reported(received="d")
    assert same(prefill, decode, 16)
    for index, name in enumerate(NAMES):
        assert torch.equal(decode.rows(name, DST, 16), before[index])
        assert torch.equal(decode.device[name][:, others], apart[index])


def test_nothing_is_copied_for_nobody(servers: tuple[Pair, OnDevice, OnDevice]) -> None:
    """Decode has the prompt."""
    pair, prefill, decode = servers
    ask(prefill, decode)
    decode.book.allocated("d", ((5, 2),), 0)
    decode.step()
    prefill.step()
    until(lambda: not prefill.half.transfers._requests["p"].num_open, "prefill has heard it")
    prefill.step([Scheduled("p", (tuple(SRC),), True, 0, 30)])
    assert not pair.prefill.buffer.array.any()


# -- plans for several groups

BLOCKS, TOKENS, WINDOW = 24, 4, 8


class Hybrid:
    """Full attention, a window and a state, all in the same memory, with pages of 64 elements."""

    def __init__(self, piece_nbytes: int | None = None) -> None:
        self.pages = torch.arange(BLOCKS * 64, dtype=torch.float32)
        self.mirror_pages = torch.full_like(self.pages, torch.nan)
        kinds = [
            GroupKind(("full",), ROWS, head_size=4, block_tokens=TOKENS),
            GroupKind(("window",), ROWS, head_size=4, block_tokens=TOKENS, window=WINDOW),
            GroupKind(("state",), STATE, block_tokens=TOKENS),
        ]
        self.device, self.mirrored = self.shaped(self.pages), self.shaped(self.mirror_pages)
        caches = []
        for kind in kinds:
            tensor = self.device[kind.names[0]]
            view = LayerView(kind.names[0], tuple(tensor.shape), tuple(tensor.stride()), 4, 0, 0)
            caches.append(describe([view], kind))
        self.host = HostCopy(self.device, self.mirrored, CacheGroups.of(caches, BLOCKS), layerwise=True)

    @staticmethod
    def shaped(pages: torch.Tensor) -> Tensors:
        attention = pages.view(BLOCKS, 2, TOKENS, 8)
        return {"full": attention, "window": attention, "state": pages.view(BLOCKS, 64)[:, :50]}

    def taken(self) -> list[int]:
        """Blocks of the mirror that were written."""
        return (~self.mirror_pages.view(BLOCKS, 64).isnan().all(1)).nonzero().flatten().tolist()

    def given(self) -> list[int]:
        """Blocks of the device that were written since it was filled."""
        before = torch.arange(BLOCKS * 64, dtype=torch.float32).view(BLOCKS, 64)
        return (self.pages.view(BLOCKS, 64) != before).any(1).nonzero().flatten().tolist()


TABLES = ((1, 2, 3, 4, 5), (6, 7, 8, 9, 10), (0, 0, 0, 0, 11))
"""Of 18 tokens, 17 of which are sent. A state lies in the last block of its group."""


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "_PIECE_NBYTES", 2 * 64 * 4)


def test_of_a_chunk_is_copied_what_decode_needs_of_it_in_each_group(small_pieces: None) -> None:
    cache = Hybrid()
    first = StepPlan(chunks=[ComputedChunk("p", tuple(table[:2] for table in TABLES), True, 0, 8, 17)])
    rest = StepPlan(chunks=[ComputedChunk("p", tuple(table[2:] for table in TABLES), False, 8, 17, 17)])
    cache.host.compute(first, {"p"})
    assert cache.host.layer_saved("full")
    cache.host.end()
    assert cache.taken() == [1, 2], "the window is further back, and the state not that of the prompt"
    cache.host.compute(rest, {"p"})
    cache.host.end()
    assert cache.taken() == [1, 2, 3, 4, 5, 8, 9, 10, 11], "tokens 8 to 16 are what the window of token 17 sees"
    assert torch.equal(cache.mirrored["full"][1:6], cache.device["full"][1:6])
    assert torch.equal(cache.mirrored["state"][11], cache.device["state"][11])


def test_blocks_that_only_a_kernel_reads_are_copied_whole_as_soon_as_they_hold_a_token() -> None:
    tensor = torch.arange(BLOCKS * 64, dtype=torch.bfloat16).view(BLOCKS, 2, TOKENS, 8)
    mirrored = {"a": torch.zeros_like(tensor)}
    kind = GroupKind(("a",), PACKED, block_tokens=TOKENS)
    cache = CacheGroups.of([describe([LayerView("a", tuple(tensor.shape), tensor.stride(), 2, 0, 0)], kind)], BLOCKS)
    assert cache.groups.layouts[0].position_tokens == TOKENS
    host = HostCopy({"a": tensor}, mirrored, cache, layerwise=True)
    for chunk, there in (
        (ComputedChunk("p", ((3, 5),), True, 0, 6, 14), {3, 5}),
        (ComputedChunk("p", ((7, 2),), False, 6, 14, 14), {5, 7, 2}),
    ):
        mirrored["a"].zero_()
        host.compute(StepPlan(chunks=[chunk]), {"p"})
        host.end()
        assert set(mirrored["a"].flatten(1).any(1).nonzero().flatten().tolist()) == there
    assert torch.equal(mirrored["a"][7], tensor[7])


def test_a_store_is_given_every_chunk_and_the_state_at_the_end_of_a_step() -> None:
    cache = Hybrid()
    save = BlocksToSave("s", tuple(table[:4] for table in TABLES), True, 8, 16)
    cache.host.compute(StepPlan(store=StorePlan(saves=[save])), ())
    cache.host.end()
    assert cache.taken() == [0, 1, 2, 3, 4, 8, 9], "full attention from its beginning: what was loaded is kept, too"
    keep = Keep(BookedPrompt("s", b""), TABLES, 17)
    cache = Hybrid()
    cache.host.prepare(StepPlan(store=StorePlan(keeps=[keep])))
    assert cache.taken() == [0, *range(1, 12)]


@pytest.mark.parametrize("failed", [False, True])
def test_what_came_is_given_to_the_device_once_and_nothing_that_is_no_number(failed: bool) -> None:
    """The mirror's blocks had another group's bytes, NaN as numbers, behind the last token."""
    cache = Hybrid()
    plan = StepPlan(offers=[OfferedBlocks("d", TABLES, 8, 17, after_load=True)])
    plan.store.loads.append(BlocksToLoad("d", TABLES, 4, 8, receives=True))
    cache.host.prepare(plan)
    for name, first, last in (("full", 1, 4), ("window", 2, 4), ("state", 4, 5)):
        for block in TABLES[("full", "window", "state").index(name)][first:last]:
            cache.mirrored[name][block] = -1
    for name, block in (("full", 5), ("window", 10)):
        cache.mirrored[name][block, :, :1] = -1  # token 16
    cache.host.received(["d", "unknown"], {"d"} if failed else ())
    assert cache.given() == ([] if failed else [2, 3, 4, 5, 8, 9, 10, 11]), "vLLM had token 0 to 3"
    assert not cache.pages.isnan().any()
    if not failed:
        assert (cache.device["full"][5, :, 0] == -1).all()
        assert not cache.device["full"][5, :, 1:].any(), "zeros"
        assert (cache.device["state"][11] == -1).all()
    before = cache.pages.clone()
    cache.host.received(["d"], ())
    assert torch.equal(cache.pages, before)


def test_an_aborted_request_is_given_nothing() -> None:
    cache = Hybrid()
    cache.host.prepare(StepPlan(offers=[OfferedBlocks("d", TABLES, 0, 17)]))
    cache.host.over(["d"])
    cache.host.received(["d"], ())
    assert cache.given() == []
