"""KV of a GPU into a store's arena and back, layer by layer, beside one large copy; and how the copies are chosen."""

from __future__ import annotations

import random
import statistics
import threading
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import numpy as np

from pdlink.cuda.buffers import DeviceBuffer, PinnedBuffer
from pdlink.cuda.driver import Device
from pdlink.kv.layout import paged_layout
from pdlink.memory.blocks import BlockPool
from pdlink.store.eviction import Lru
from pdlink.store.gpu_pages import GpuPages
from pdlink.store.groups import RecordGroup
from pdlink.store.source import Source
from pdlink.store.store import Store

from .figures import GpuFigure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.cuda.ways import Ways
    from pdlink.kv.layout import KVLayout

BLOCK_TOKENS, CHUNK_TOKENS, WAIT_S = 16, 256, 30.0


def run() -> list[GpuFigure]:
    with closing(Device(0)) as device:
        device.open()
        return [*measured(device), *measured(device, order="LPBHT")[:2]]


def measured(
    device: Device,
    *,
    layers: int = 32,
    tokens: int = 8192,
    heads: int = 8,
    repeats: int = 5,
    order: str = "LPBTH",
    image: bytes | None = None,
    ways: Ways | None = None,
) -> list[GpuFigure]:
    """tokens: of whole chunks. Medians of `repeats`, after one that pins the arena. image, ways: as of `GpuPages`.

    order: of the pages' axes, NHD by default; of HND ones ("LPBHT") each head of a token goes alone.

    Raises RuntimeError if other bytes come back.
    """
    layout = paged_layout(
        dtype="bfloat16",
        itemsize=2,
        num_layers=layers,
        num_blocks=2 * tokens // BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        num_heads=heads,
        head_dim=128,
        order=order,
    )
    kind = "GPU pages" if order == "LPBTH" else "HND pages"
    nbytes = layers * 2 * tokens * heads * 128 * 2
    with ExitStack() as made:
        pages = made.enter_context(closing(DeviceBuffer(device, layout.extent(0))))
        host = made.enter_context(closing(PinnedBuffer(device, nbytes)))
        host.array[:] = np.random.default_rng(0).integers(0, 256, len(host.array), np.uint8)
        for begin in range(0, pages.nbytes, nbytes):
            device.copy(pages.ptr + begin, host.device_ptr, min(nbytes, pages.nbytes - begin))
        device.synchronize()
        outwards_s = _median(repeats, lambda: _one_copy(device, host.device_ptr, pages.ptr, nbytes))
        inwards_s = _median(repeats, lambda: _one_copy(device, pages.ptr, host.device_ptr, nbytes))
        gpu = GpuPages([pages], image=image, ways=ways)
        store = Store(nbytes + nbytes // 8 + (1 << 20), Lru(), lends=True)
        store.open()
        made.callback(store.close)
        pool = BlockPool(layout.num_blocks)
        source = Source(
            store,
            [RecordGroup(layout, model="m", revision="r", chunk_tokens=CHUNK_TOKENS)],
            [pages],
            pool,
            gpu=gpu,
        )
        made.callback(source.close)
        blocks = pool.take(layout.num_blocks)
        random.Random(0).shuffle(blocks)
        mine, others = blocks[: layout.num_blocks // 2], blocks[layout.num_blocks // 2 :]
        prompt = list(range(tokens + 1))  # its last token is computed
        stored, loaded = [], []
        for _ in range(repeats + 1):
            store.clear()
            stored.append(_store(source, prompt, mine))
            loaded.append(_load(source, prompt, others))
        _compare(device, layout, pages, mine, others, host)
        figures = [
            _figure(f"{kind} to arena, layer by layer", statistics.median(stored[1:]), nbytes, outwards_s),
            _figure(f"arena to {kind}, layer by layer", statistics.median(loaded[1:]), nbytes, inwards_s),
            _figure(f"{kind} to arena, the first time", stored[0], nbytes, outwards_s),
        ]
        for row in gpu.ways.table:
            name = f"runs of {row.run_nbytes >> 10} KiB {'to' if row.to_device else 'from'} the GPU, copy engine"
            figures.append(GpuFigure(name, row.engine_s, against="kernel", ratio=row.kernel_s / row.engine_s))
    return figures


def _figure(name: str, seconds: float, nbytes: int, whole_s: float) -> GpuFigure:
    return GpuFigure(name, seconds, nbytes / seconds / 1e9, "one large copy", whole_s / seconds)


def _median(repeats: int, work: Callable[[], object]) -> float:
    times = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def _one_copy(device: Device, dst: int, src: int, nbytes: int) -> None:
    device.copy(dst, src, nbytes)
    device.synchronize()


def _store(source: Source, tokens: list[int], blocks: Sequence[int]) -> float:
    prompt, over = source.prompt("store", source.keys(tokens)), threading.Event()
    began_s = time.perf_counter()
    for layer in range(source.groups[0].num_layers):
        prompt.store(0, len(tokens) - 1, blocks, layer)
    prompt.close()
    source.when_settled(over.set)
    if not over.wait(WAIT_S):
        raise RuntimeError(f"the copies are not over after {WAIT_S} s")
    return time.perf_counter() - began_s


def _load(source: Source, tokens: list[int], blocks: Sequence[int]) -> float:
    prompt = source.prompt("load", source.keys(tokens))
    found = prompt.lookup()
    if found != len(tokens) - 1:
        raise RuntimeError(f"stored: got {found}; {len(tokens) - 1} tokens were put")
    began_s = time.perf_counter()
    end = prompt.load(0, found, [blocks]).done.result(WAIT_S)
    if end != len(tokens) - 1:
        raise RuntimeError(f"loaded: got {end} of {len(tokens) - 1} tokens")
    return time.perf_counter() - began_s


def _compare(
    device: Device,
    layout: KVLayout,
    pages: DeviceBuffer,
    mine: Sequence[int],
    others: Sequence[int],
    host: PinnedBuffer,
) -> None:
    """Every sixteenth pair of blocks, in the first and last layer."""
    for layer in (layout.layers[0], layout.layers[-1]):
        for part in layer.parts:
            for pair in list(zip(mine, others, strict=True))[::16]:
                for at, block in enumerate(pair):
                    page = pages.ptr + part.offset + block * layer.block_stride
                    device.copy(host.device_ptr + at * layer.block_stride, page, layer.block_stride)
                device.synchronize()
                kept, came = host.array[: 2 * layer.block_stride].reshape(2, -1)
                if not np.array_equal(kept, came):
                    raise RuntimeError(f"block {pair[0]} came back into block {pair[1]} with other bytes")
