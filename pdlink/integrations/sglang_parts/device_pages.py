"""`DevicePages`: the KV pool of one SGLang rank, kept in a store without a copy in between: loaded layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdlink.integrations.sglang_parts.hicache import open_records, plan_of
from pdlink.integrations.sglang_parts.versions import UnsupportedSglang
from pdlink.kv.layout import KVLayout, LayerLayout, Part
from pdlink.memory.borrowed import BorrowedBuffer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.integrations.sglang_parts.hicache import RankScheme
    from pdlink.integrations.sglang_parts.settings import StoreSettings
    from pdlink.memory.buffers import HostBuffer
    from pdlink.store.blocks import RecordPlan
    from pdlink.store.interface import AnyFetch
    from pdlink.store.source import StoreSource


def layout_of(pool: Any, page_tokens: int) -> tuple[KVLayout, list[HostBuffer]]:
    """A pool of plain attention on the CPU: for each layer a tensor [slot, head, dim] of K and one of V.

    Raises UnsupportedSglang for other pools.
    """
    keys, values = getattr(pool, "k_buffer", None), getattr(pool, "v_buffer", None)
    if not keys or not values or len(keys) != len(values):
        raise UnsupportedSglang(
            f"KV pool {type(pool).__name__}: got no K and V for each layer; limit plain attention; use HiCache"
        )
    tensors = [tensor for pair in zip(keys, values, strict=True) for tensor in pair]
    first = tensors[0]
    if any(
        one.device.type != "cpu" or one.shape != first.shape or one.ndim != 3 or not one.is_contiguous()
        for one in tensors
    ):
        raise UnsupportedSglang(
            f"KV pool {type(pool).__name__}: got {tuple(first.shape)} on {first.device} and others; limit dense "
            "tensors [slot, head, dim] of one shape on the CPU; use HiCache"
        )
    slots, num_heads, dim = first.shape
    head = dim * first.element_size()
    token = num_heads * head
    layers = tuple(
        LayerLayout((Part(2 * number, 0), Part(2 * number + 1, 0)), page_tokens * token, token, head)
        for number in range(len(keys))
    )
    dtype = str(first.dtype).removeprefix("torch.")
    layout = KVLayout(dtype, page_tokens, slots // page_tokens, num_heads, head, layers)
    return layout, [BorrowedBuffer(one.data_ptr(), one.numel() * one.element_size(), one) for one in tensors]


class DevicePages:
    """Thread-safe, as the store is."""

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
    ) -> None:
        """Raises ConfigError, UnsupportedSglang, OSError."""
        layout, buffers = layout_of(pool, page_tokens)
        self.num_layers = len(layout.layers)
        self.source, self.records = open_records(
            settings, ranks, layout, buffers, model=model, revision=revision, num_kv_heads=num_kv_heads
        )

    def begin(self, hashes: Sequence[str], pages: Sequence[int]) -> Load | None:
        """Hold the records of these pages until they are loaded; None if the store has not all of them."""
        fetch = self.records.hold(hashes, "linker")
        return None if fetch is None else Load(self.source, fetch, pages)

    def close(self) -> None:
        self.source.close()
        self.source.store.close()


class Load:
    """Records on their way into pages. Used by one thread."""

    def __init__(self, source: StoreSource, fetch: AnyFetch, pages: Sequence[int]) -> None:
        self._source, self._fetch, self._pages = source, fetch, pages
        self._plan: RecordPlan | None = None

    def wait(self) -> bool:
        """Until all records are in memory; False if one does not come."""
        slots = self._fetch.done.result()
        if len(slots) < len(self._pages):
            return False
        self._plan = plan_of(self._source, list(enumerate(slots)), self._pages, loading=True)
        return True

    def layer(self, number: int) -> None:
        """Copy one layer, after `wait`. What it has written counts once `close` says so."""
        assert self._plan is not None
        self._source.copy(self._plan, number, loading=True)

    def close(self) -> bool:
        """Whether the records stood all the time."""
        return bool(self._fetch.close())
