"""Between pages and records by pairs of blocks, on the double.

What a GPU stored is read into host pages of another layout by byte runs, which share no arithmetic with the pairs.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pdlink import _cuda
from pdlink.cuda import copies
from pdlink.cuda.launches import Launches
from pdlink.cuda.steps import PinnedSteps
from pdlink.cuda.ways import Ways
from pdlink.kv.layout import KVLayout, LayerLayout, Part, paged_layout
from pdlink.kv.plan import template
from pdlink.memory.blocks import BlockPool
from pdlink.memory.buffers import Buffer
from pdlink.store import gpu_pages
from pdlink.store.gpu_pages import GpuPages
from pdlink.store.groups import Blocks, RecordGroup
from pdlink.store.record import shape_of
from pdlink.store.source import Source
from tests.cuda.double import Kv
from tests.cuda.fake import IMAGE, Fake
from tests.events import Reached
from tests.store.test_source import opened
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdlink.cuda.driver import Device
    from pdlink.store.interface import AnyStore

LAYERS, HEADS, CHUNK, TOKENS = 2, 3, 32, 150
PROMPT = list(range(TOKENS + 1))
BY_KERNEL, BY_ENGINE = Ways(1 << 62, 1 << 62), Ways(0, 0)


def paged(order: str, block_tokens: int, head_dim: int, itemsize: int = 1, num_parts: int = 2) -> KVLayout:
    return paged_layout(
        dtype="bfloat16" if itemsize == 2 else "uint8",
        itemsize=itemsize,
        num_layers=LAYERS,
        num_blocks=256 // block_tokens,
        block_tokens=block_tokens,
        num_heads=HEADS,
        head_dim=head_dim,
        order=order,
        num_parts=num_parts,
    )


def apart(layout: KVLayout) -> KVLayout:
    """Each part of each layer in a buffer of its own, as SGLang's pools."""
    layers = [
        replace(layer, parts=tuple(Part(2 * index + part, 0) for part in range(len(layer.parts))))
        for index, layer in enumerate(layout.layers)
    ]
    return replace(layout, layers=tuple(layers))


def side_by_side(block_tokens: int, head_nbytes: int) -> KVLayout:
    """[block, head, token, K then V]: vLLM 0.26 and later."""
    row, blocks = 2 * head_nbytes, 256 // block_tokens
    strides = (HEADS * block_tokens * row, row, block_tokens * row)
    size = blocks * strides[0]
    layers = tuple(
        LayerLayout((Part(0, size * layer), Part(0, size * layer + head_nbytes)), *strides) for layer in range(LAYERS)
    )
    return KVLayout("bfloat16", block_tokens, blocks, HEADS, head_nbytes, layers)


LAYOUTS = {
    "HND, bf16, blocks of 16": paged("LPBHT", 16, 64, 2),
    "HND, bf16, blocks of 128": paged("LPBHT", 128, 64, 2),
    "HND, fp8 with a scale behind each head": paged("LPBHT", 16, 132),
    "HND, fp8 of an odd length": paged("LPBHT", 16, 33),
    "NHD, K and V in buffers of their own, blocks of 1": apart(paged("LPBTH", 1, 64, 2)),
    "HND, K and V in buffers of their own": apart(paged("LPBHT", 16, 64, 2)),
    "K and V side by side, blocks of 16": side_by_side(16, 128),
    "K and V side by side, blocks of 128": side_by_side(128, 128),
    "all layers of a token together": paged("BTLPH", 1, 64, 2),
    "one latent part, blocks of 1": paged("LPBTH", 1, 64, 2, num_parts=1),
}


class Pages:
    """An engine's cache without the engine."""

    def __init__(self, store: AnyStore, layout: KVLayout, device: Device | None, seed: int, **more: Any) -> None:
        self.layout = layout
        num_regions = 1 + max(part.region for layer in layout.layers for part in layer.parts)
        sizes = [layout.extent(region) for region in range(num_regions)]
        self.buffers: list[Any] = [
            Buffer(nbytes) if device is None else _Kv(device, nbytes, seed + at, Reached)
            for at, nbytes in enumerate(sizes)
        ]
        for at, buffer in enumerate(self.buffers):
            random = np.random.default_rng(seed + at)
            buffer.array[:] = random.integers(0, 256, len(buffer.array), np.uint8)
        self.pool = BlockPool(layout.num_blocks)
        args: dict[str, Any] = {"ways": BY_KERNEL, "step_nbytes": 4096} | more
        self.gpu = None if device is None else GpuPages(self.buffers, image=IMAGE, **args)
        group = RecordGroup(layout, model="m", revision="r", chunk_tokens=CHUNK)
        self.source = Source(store, [group], self.buffers, self.pool, gpu=self.gpu)
        numbers = self.pool.take(-(-TOKENS // layout.block_tokens))
        self.blocks = list(reversed(numbers))

    def store(self, passes: Sequence[int]) -> None:
        prompt = self.source.prompt("p", self.source.keys(PROMPT))
        for begin, end in zip([0, *passes], passes, strict=False):
            for layer in range(LAYERS):
                prompt.store(begin, end, self.blocks, layer)
        prompt.close()
        done = threading.Event()
        self.source.when_settled(done.set)
        assert done.wait(WAIT_S)

    def load(self, begin: int) -> int:
        prompt = self.source.prompt("q", self.source.keys(PROMPT))
        return prompt.load(begin, prompt.lookup(), [self.blocks]).done.result(WAIT_S)

    def token(self, layer: int, part: int, token: int) -> bytes:
        shape, block_tokens = self.layout.layers[layer], self.layout.block_tokens
        at = self.blocks[token // block_tokens] * shape.block_stride + token % block_tokens * shape.token_stride
        memory, first = self.buffers[shape.parts[part].region].array, shape.parts[part].offset + at
        heads = [memory[first + head * shape.head_stride :][: self.layout.head_nbytes] for head in range(HEADS)]
        return b"".join(head.tobytes() for head in heads)

    def tokens(self, begin: int, end: int) -> list[bytes]:
        parts = range(len(self.layout.layers[0].parts))
        return [self.token(*of, token) for token in range(begin, end) for of in _pairs(parts)]

    def close(self) -> None:
        self.source.close()
        for buffer in self.buffers:
            buffer.close()


class _Kv(Kv):
    def compute_stream(self) -> int:
        return 0


def _pairs(parts: range) -> list[tuple[int, int]]:
    return [(layer, part) for layer in range(LAYERS) for part in parts]


def _noted(made: list[str], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(name)
        return call(*args, **kwargs)

    return noted


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way copies were made."""
    made: list[str] = []
    for of, name in ((_cuda.Moves, "of_pairs"), (Launches, "copy")):
        monkeypatch.setattr(of, name, _noted(made, name, getattr(of, name)))
    monkeypatch.setattr(copies, "_cuda", SimpleNamespace(Moves=_noted(made, "runs", _cuda.Moves)))
    return made


@pytest.fixture
def world(double: Fake, device: Device) -> Iterator[Any]:
    """A store and a way to make pages over it, on the GPU or not."""
    with ExitStack() as stack:
        store = stack.enter_context(opened(records=64))

        def make(layout: KVLayout, seed: int, *, host: bool = False, **more: Any) -> Pages:
            return stack.enter_context(closing(Pages(store, layout, None if host else device, seed, **more)))

        yield make


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_kernels_copy_by_pairs_of_blocks_both_ways_and_no_byte_differs(
    world: Any, layout: KVLayout, launched: list[str]
) -> None:
    """Of the first chunk a part is left alone: its bytes, and those of blocks that are not named, stay."""
    gpu, other, kept = world(layout, 1), world(layout, 20), TOKENS // CHUNK * CHUNK
    gpu.store([7, 33, 100, TOKENS])
    plain = paged("LPBTH", 16, layout.head_nbytes, num_parts=len(layout.layers[0].parts))
    host = world(replace(plain, dtype=layout.dtype), 10, host=True)
    assert host.load(0) == kept
    assert host.tokens(0, kept) == gpu.tokens(0, kept)
    before = [buffer.array.copy() for buffer in other.buffers]
    begin = 16 if layout.block_tokens == 16 else 0
    assert other.load(begin) == kept
    assert set(launched) == {"of_pairs"}
    assert other.tokens(begin, kept) == gpu.tokens(begin, kept)
    written = [buffer.array.copy() for buffer in other.buffers]
    _mask(other, range(begin, kept), written, before)
    assert all(map(np.array_equal, written, before)), "and nothing beside them"


def _mask(pages: Pages, tokens: range, *both: list[Any]) -> None:
    """Zero these tokens in copies of all buffers."""
    layout = pages.layout
    for layer in layout.layers:
        for part in layer.parts:
            for token in tokens:
                block, inside = divmod(token, layout.block_tokens)
                at = part.offset + pages.blocks[block] * layer.block_stride + inside * layer.token_stride
                for head in range(HEADS):
                    first = at + head * layer.head_stride
                    for memory in both:
                        memory[part.region][first : first + layout.head_nbytes] = 0


def test_the_copy_engine_takes_runs_of_its_length_and_no_pairs(world: Any, launched: list[str]) -> None:
    world(paged("LPBTH", 16, 64), 1).store([TOKENS])
    assert set(launched) == {"of_pairs"}
    launched.clear()
    hnd = world(paged("LPBHT", 16, 64), 2, ways=BY_ENGINE)
    hnd.load(0)
    assert set(launched) == {"copy"}
    launched.clear()
    between = world(paged("LPBHT", 16, 64), 3, ways=Ways(64, 65))
    between.load(0)
    assert set(launched) == {"of_pairs"}, "a run of 64 bytes is shorter than the engine takes that way"


def test_more_units_than_a_launch_takes_are_several(
    world: Any, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 tokens; of what is loaded the first is not whole."""
    monkeypatch.setattr(gpu_pages, "MOST_PAIRS", 3)
    gpu, other = world(paged("LPBHT", 16, 64), 1), world(paged("LPBHT", 16, 64), 2)
    gpu.store([TOKENS])
    assert len(launched) == LAYERS * -(-(TOKENS // CHUNK * CHUNK // 16) // 3)
    assert other.load(5) == 128
    assert other.tokens(5, 128) == gpu.tokens(5, 128)


def test_an_arena_without_one_base_for_the_gpu_is_copied_by_runs(
    world: Any, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the GPU has addresses of its own for each registration of host memory."""
    gpu, other = world(paged("LPBHT", 16, 64), 1), world(paged("LPBHT", 16, 64), 2)
    gpu.store([TOKENS])
    launched.clear()
    monkeypatch.setattr(PinnedSteps, "one_base", lambda *_: None)
    assert other.load(0) == 128
    assert set(launched) == {"runs"}
    assert other.tokens(0, 128) == gpu.tokens(0, 128)


def test_blocks_that_are_not_there_are_refused_before_a_kernel_runs(world: Any) -> None:
    gpu = world(paged("LPBHT", 16, 64), 1)
    slots = [(0, type("Slot", (), {"offset": 4096})())]
    for blocks in ((0,), (0, 16), (-1, 1)):
        with pytest.raises(ValueError, match="blocks"):
            gpu.source.plan(gpu.source.groups[0], slots, Blocks(blocks, 0), 0, CHUNK, loading=True)


def test_the_length_of_the_runs_of_whole_blocks_is_known_before_they_are_made() -> None:
    wanted = {"LPBHT": 64, "LPBTH": 16 * HEADS * 64, "BLPTH": 16 * HEADS * 64}
    for order, expected in wanted.items():
        layout = paged(order, 16, 64)
        assert template(layout, shape_of(layout, CHUNK).whole()).run_nbytes() == expected
