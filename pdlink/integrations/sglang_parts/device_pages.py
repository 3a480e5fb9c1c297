"""`DevicePages`: the KV pool of one SGLang rank, kept in a store without a copy in between: loaded layer by layer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pdlink.errors import TransferFailed
from pdlink.integrations.sglang_parts.device_loads import DeviceLoad, LoadBatch
from pdlink.integrations.sglang_parts.gpu import to_host
from pdlink.integrations.sglang_parts.hicache import copy_pages, open_records
from pdlink.integrations.sglang_parts.host_pool import pages_at
from pdlink.integrations.sglang_parts.pages import StillCopied
from pdlink.integrations.sglang_parts.versions import UnsupportedSglang
from pdlink.kv.layout import KVLayout, LayerLayout, Part
from pdlink.memory.borrowed import BorrowedPlace, borrow_place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.integrations.sglang_parts.hicache import RankScheme
    from pdlink.integrations.sglang_parts.settings import StoreSettings
    from pdlink.memory.buffers import AnyBuffer, StreamEvent
    from pdlink.store.gpu_pages import Mark
    from pdlink.store.slots import Slot

    Pages = Callable[[], list[int]]
    """Numbers of pages, which are read when what was launched before has run."""

_SCALES = ("k_scale_buffer", "native_k_scale_buffer", "kv_scale_buffer")


def is_latent(pool: Any) -> bool:
    """Whether a pool has one tensor for each layer, as of MLA."""
    return not getattr(pool, "k_buffer", None) and bool(getattr(pool, "kv_buffer", None))


def layout_of(pool: Any, page_tokens: int) -> tuple[KVLayout, list[AnyBuffer]]:
    """A pool of plain attention, with tensors [slot, head, dim]: for each layer one of K and one of V, or a latent.

    Opens the GPU that they are on, for each buffer. Raises UnsupportedSglang for other pools, CudaUnavailable,
    CudaFailure.
    """
    name = type(pool).__name__
    keys, values = getattr(pool, "k_buffer", None), getattr(pool, "v_buffer", None)
    if is_latent(pool):
        by_layer: list[tuple[Any, ...]] = [(latent,) for latent in pool.kv_buffer]
    elif keys and values and len(keys) == len(values):
        by_layer = [*zip(keys, values, strict=True)]
    else:
        raise UnsupportedSglang(
            f"KV pool {name}: got no K and V for each layer, nor a latent; expected plain attention; use HiCache"
        )
    if scales := [one for one in _SCALES if getattr(pool, one, None) is not None]:
        raise UnsupportedSglang(
            f"KV pool {name}: got scales beside the KV ({scales[0]}); expected KV that needs none; set "
            "--kv-cache-dtype auto, or fp8_e4m3"
        )
    tensors = [tensor for of_layer in by_layer for tensor in of_layer]
    first = tensors[0]
    if any(
        one.device != first.device or one.shape != first.shape or one.ndim != 3 or not one.is_contiguous()
        for one in tensors
    ) or first.device.type not in ("cpu", "cuda"):
        raise UnsupportedSglang(
            f"KV pool {name}: got {tuple(first.shape)} on {first.device} and others; expected dense tensors "
            "[slot, head, dim] of one shape, on the CPU or one GPU of CUDA; use HiCache"
        )
    slots, num_heads, dim = first.shape
    head = dim * first.element_size()
    token = num_heads * head
    num_parts = len(by_layer[0])
    layers = tuple(
        LayerLayout(
            tuple(Part(num_parts * number + part, 0) for part in range(num_parts)), page_tokens * token, token, head
        )
        for number in range(len(by_layer))
    )
    dtype = str(first.dtype).removeprefix("torch.")
    layout = KVLayout(dtype, page_tokens, slots // page_tokens, num_heads, head, layers)
    gpu = first.device.index if first.device.type == "cuda" else None
    return layout, [
        borrow_place(BorrowedPlace(one.data_ptr(), one.numel() * one.element_size(), gpu, one)) for one in tensors
    ]


class DevicePages:
    """Thread-safe, as the store is, but for `store` and the batches, each of one thread at a time."""

    def __init__(
        self,
        settings: StoreSettings,
        ranks: RankScheme,
        pool: Any,
        page_tokens: int,
        *,
        model: str,
        revision: str,
        num_kv_heads: int,
        streams: Sequence[int] = (),
    ) -> None:
        """streams: of a GPU, that write the pool beside the one that the calling thread computes on.

        Raises ConfigError, UnsupportedSglang, OSError, and for a pool on a GPU CudaUnavailable, CudaFailure.
        """
        layout, self._buffers = layout_of(pool, page_tokens)
        self._page, self._streams = page_tokens, streams
        self.num_layers = len(layout.layers)
        self.source, self.records, self._close = open_records(
            settings, ranks, layout, self._buffers, model=model, revision=revision, num_kv_heads=num_kv_heads
        )
        self._stores = not ranks.latent or ranks.tp[0] == 0 or settings.tiers.store is None
        """Whether this rank stores: all have the same latent."""

    @property
    def on_gpu(self) -> bool:
        return self.source.gpu is not None

    @property
    def lost(self) -> bool:
        """Whether a GPU has failed with copies under way, which may write to pages until this process ends."""
        return self.source.lost

    # --- The scheduler's thread

    def pages(self, slots: Any) -> Pages:
        """The pages that a tensor of slots names."""
        if slots.device.type == "cpu":
            numbers = pages_at(slots, self._page)
            return lambda: numbers
        there = to_host(slots)
        return lambda: pages_at(there, self._page)

    def begin(self, hashes: Sequence[str], pages: Pages) -> DeviceLoad | None:
        """Hold the records of these pages until they are loaded; None if the store has not all of them."""
        fetch = self.records.hold(hashes, "linker")
        return None if fetch is None else DeviceLoad(self.source, fetch, len(hashes), pages)

    def batch(self, loads: Sequence[DeviceLoad]) -> LoadBatch:
        """For the pass that computes these prompts. On a GPU it follows what was launched by now."""
        launched = [self._launched() for _ in loads]
        return LoadBatch(self.source, loads, launched[-1][0], [mark for _, mark in launched])

    def offer(self, hashes: Sequence[str], pages: Pages) -> Callable[[], list[bool]]:
        """To be called by a thread that may wait: stores what is not there yet, once what was launched by now has
        written it; for each page whether it is there."""
        if not self._stores:
            return lambda: [True] * len(hashes)
        ready, mark = self._launched()
        if ready is None or mark is None:
            return lambda: self.records.set(hashes, pages())

        def store() -> list[bool]:
            unused = [mark]
            try:
                ready.synchronize()
                return self.records.set(hashes, pages(), partial(self._store, unused))
            finally:
                for one in unused:
                    self.source.unmark(one)

        return store

    def _launched(self) -> tuple[StreamEvent | None, Mark | None]:
        """On a GPU an event behind the numbers of pages, and a mark behind all that writes the pool."""
        if self.source.gpu is None:
            return None, None
        ready = self._buffers[0].make_event()
        assert ready is not None
        ready.record()
        return ready, self.source.gpu.mark(*self._streams)

    # --- A thread that may wait

    def _store(
        self, marks: list[Mark], slots: Sequence[tuple[int, Slot]], pages: Sequence[int], *, loading: bool
    ) -> None:
        """On a GPU. marks: taken; the copies follow the first."""
        try:
            copy_pages(self.source, slots, pages, loading=loading, after=marks.pop())
        except TransferFailed:
            if self.lost:
                raise StillCopied("the GPU has failed with copies under way") from None
            raise

    def close(self) -> None:
        self._close()
        for buffer in self._buffers:
            buffer.close()
