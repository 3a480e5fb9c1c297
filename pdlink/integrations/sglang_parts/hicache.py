"""`HostPages`: the host pools of one SGLang rank, kept in a store: `PDLinkHiCache` without SGLang's classes."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pdlink.errors import ConfigError, TransferFailed
from pdlink.integrations.loaded_weights import HERE
from pdlink.integrations.sglang_parts import host_pool
from pdlink.integrations.sglang_parts.pages import PageRecords, restorable
from pdlink.integrations.sglang_parts.sessions import TURNS
from pdlink.integrations.sglang_parts.versions import UnsupportedSglang
from pdlink.kv import hashing
from pdlink.serve.admin import AdminServer
from pdlink.store.groups import Blocks
from pdlink.store.opening import SourceGroup, open_source
from pdlink.store.record import HEADER_NBYTES, Group, RecordShape
from pdlink.store.slots import WHOLE
from pdlink.store.source import CallersBlocks
from pdlink.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.integrations.sglang_parts.settings import StorageSettings, StoreSettings
    from pdlink.kv.layout import KVLayout
    from pdlink.memory.buffers import AnyBuffer
    from pdlink.store.gpu_pages import Mark
    from pdlink.store.interface import AnyStore
    from pdlink.store.slots import Slot
    from pdlink.store.source import Source

log = logging.getLogger(__name__)


class RankScheme(NamedTuple):
    """Which part of the model's KV this process has."""

    tp: tuple[int, int]
    """Rank and number of ranks; of an attention group with data parallel attention."""
    pp: tuple[int, int]
    cp: tuple[int, int]
    latent: bool
    """All tensor parallel ranks have the same KV."""

    @property
    def stage(self) -> str:
        """What no two ranks share; empty for a model in one stage."""
        parts = [f"{name} {rank} of {size}" for name, (rank, size) in (("pp", self.pp), ("cp", self.cp)) if size > 1]
        return " ".join(parts)

    @property
    def whole(self) -> str:
        return f"{self.stage} tp {self.tp[0]} of {self.tp[1]}"

    @property
    def number(self) -> int:
        """Of this process among all of them."""
        return (self.pp[0] * self.cp[1] + self.cp[0]) * self.tp[1] + self.tp[0]


@dataclass(frozen=True)
class Pool:
    pool: Any
    records: PageRecords
    page_tokens: int

    def pages(self, host_indices: Any) -> list[int]:
        return host_pool.pages_at(host_indices, self.page_tokens)


class HostPages:
    """Opens the store with the first pool, the one of the KV."""

    def __init__(
        self, settings: StorageSettings, ranks: RankScheme, pool: Any, *, model: str, revision: str, num_kv_heads: int
    ) -> None:
        """num_kv_heads: of the model. Ranks of a store process fill the same records; a store inside has the rank's.

        Raises ConfigError, UnsupportedSglang, OSError."""
        self._settings, self._ranks = settings, ranks
        self._model, self._revision = model, revision
        page, layout = host_pool.page_tokens(pool), host_pool.layout_of(pool)
        if layout is None:
            raise UnsupportedSglang(
                f"host pool {type(pool).__name__}: got layout {pool.layout}; expected plain KV in layer_first, "
                "page_first, page_first_direct or page_head; choose another --hicache-mem-layout"
            )
        buffers = [host_pool.borrowed(pool.kv_buffer)]
        opened = open_records(
            settings, ranks, layout, buffers, model=model, revision=revision, num_kv_heads=num_kv_heads
        )
        self._source: Source | None = opened.source
        self._close = opened.close
        self.kv = Pool(pool, opened.records, page)
        self.others: dict[str, Pool] = {}

    @property
    def store(self) -> AnyStore:
        assert self._source is not None, "closed"
        return self._source.store

    def add(self, name: str, pool: Any) -> None:
        """A further pool: of states, an indexer, a draft model. Raises UnsupportedSglang."""
        if pool is self.kv.pool:
            self.others[name] = self.kv
            return
        segments = host_pool.segments_of(pool)
        assert self._source is not None
        shape = RecordShape("uint8", 1, (Group("latent", (0,), 1, 1, sum(segments.nbytes)),))
        revision = f"sglang {self._revision} {name} {self._ranks.whole} {segments.form}"
        namespace = hashing.namespace(hashing.Origin(self._model, revision, "uint8", layout=shape.text))
        copy = partial(self._copy_segments, pool, segments)
        records = PageRecords(self._source.store, shape, WHOLE, namespace, copy, self._source.lookup_timeout_s)
        self.others[name] = Pool(pool, records, host_pool.page_tokens(pool))

    def hits(self, hashes: Sequence[str], wanted: Sequence[tuple[str, int]]) -> tuple[int, dict[str, int], list[int]]:
        """Pages of the longest usable prefix, each pool's own, and all usable lengths, ascending.

        wanted: further pools, and how many of the last pages each needs; 0: all.
        """
        num_kv = self.kv.records.num_known(hashes)
        usable, own = set(range(1, num_kv + 1)), {"kv": num_kv}
        for name, trailing in wanted:
            known = self.others[name].records.known(hashes[:num_kv])
            mine = restorable(num_kv, known, trailing)
            own[name] = max(mine, default=0)
            usable &= mine
        return max(usable, default=0), own, sorted(usable)

    def clear(self) -> None:
        """Forget the pages of this model, in the form of these pools; not what others keep in the same store."""
        if self._source is not None:
            for records in {id(pool.records): pool.records for pool in (self.kv, *self.others.values())}.values():
                records.clear()

    def close(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            self._close()

    def _copy_segments(
        self,
        pool: Any,
        segments: host_pool.Segments,
        slots: Sequence[tuple[int, Slot]],
        pages: Sequence[int],
        *,
        loading: bool,
    ) -> None:
        import torch

        assert self._source is not None
        arena, tokens = self._source.store.array, host_pool.page_tokens(pool)
        for index, slot in slots:
            pointers, _ = pool.get_page_buffer_meta(torch.arange(pages[index] * tokens, (pages[index] + 1) * tokens))
            for number, runs in host_pool.runs_of(segments, pointers, slot.offset + HEADER_NBYTES):
                array = segments.buffers[number].array
                for place, offset, nbytes in runs.tolist():
                    mine, kept = array[place : place + nbytes], arena[offset : offset + nbytes]
                    if loading:
                        mine[:] = kept
                    else:
                        kept[:] = mine


class OpenedRecords(NamedTuple):
    source: Source
    records: PageRecords
    close: Callable[[], None]
    """Ends the store, and all that serves it."""


def open_records(
    settings: StoreSettings,
    ranks: RankScheme,
    layout: KVLayout,
    buffers: Sequence[AnyBuffer],
    *,
    model: str,
    revision: str,
    num_kv_heads: int,
) -> OpenedRecords:
    """The store for pages of plain KV that lie so in these buffers, and its HTTP.

    num_kv_heads: as of `HostPages`. Of buffers of a GPU the caller makes the copies.
    Raises ConfigError, OSError, and for a GPU CudaFailure, CudaUnavailable.
    """
    tiers = settings.tiers.model_copy(update={"chunk_size": layout.block_tokens})
    heads = total = None
    if tiers.store is not None and not ranks.latent:
        heads, total = _heads(ranks.tp, layout.num_heads, num_kv_heads)
    apart = ranks.stage if ranks.latent or heads is not None else ranks.whole
    source = open_source(
        tiers,
        settings.name if tiers.store is not None or ranks.tp[1] == 1 else f"{settings.name}/{ranks.tp[0]}",
        [SourceGroup(layout, f"sglang {revision} {apart}", heads=heads, num_heads=total)],
        buffers,
        CallersBlocks(),
        model=model,
        hashed_by="sglang",
    )
    assert source is not None, "the settings want a store"
    group, copy = source.groups[0], partial(copy_pages, source)
    records = PageRecords(
        source.store, group.shape, group.share, hashing.namespace(group.origin), copy, source.lookup_timeout_s
    )

    def tell_scope() -> None:
        source.tell_scope(HERE.change)

    with ExitStack() as opening:
        opening.callback(source.store.close)
        opening.callback(source.close)
        opening.callback(HERE.when_changed(tell_scope))
        tell_scope()
        opening.callback(TURNS.keep_in(records, source.scope))
        if settings.admin is not None:
            assert isinstance(source.store, Store)
            admin = AdminServer(settings.name, source.store, settings.admin, ranks.number)
            opening.callback(admin.close)
        return OpenedRecords(source, records, opening.pop_all().close)


def copy_pages(
    source: Source,
    slots: Sequence[tuple[int, Slot]],
    pages: Sequence[int],
    *,
    loading: bool,
    after: Mark | None = None,
) -> None:
    """Copy between whole pages and records. slots: (index in `pages`, record), of adjacent ones.

    after: as of `Source.copy_now`. Raises TransferFailed.
    """
    begin, end = _tokens_of(source, slots)
    blocks = Blocks(tuple(pages), 0)
    if not source.copy_now(source.groups[0], slots, blocks, begin, end, loading=loading, after=after):
        raise TransferFailed("the GPU has not copied")


def _tokens_of(source: Source, slots: Sequence[tuple[int, Slot]]) -> tuple[int, int]:
    page = source.groups[0].chunk_tokens
    return slots[0][0] * page, (slots[-1][0] + 1) * page


def _heads(tp: tuple[int, int], num_mine: int, total: int) -> tuple[range, int]:
    """Which KV heads this rank has, of how many. Ranks beyond the number of heads share them."""
    rank, size = tp
    first = rank * total // size
    if num_mine * size < total or first + num_mine > total:
        raise ConfigError(
            f"num_kv_heads: got {total} for {size} ranks with {num_mine} each; expected the model's; correct it"
        )
    return range(first, first + num_mine), total
