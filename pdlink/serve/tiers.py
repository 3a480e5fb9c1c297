"""Tiers of the built-in engine: prompts are looked up before they are computed, and kept when they are.

`Tiered` stands between the engine and its port. What the store has of a prompt is loaded into the request's blocks,
and then pushed like what is computed; what is computed goes to the store, layer by layer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from pdlink.errors import ConfigError
from pdlink.kv import hashing
from pdlink.kv.sources import TokenRange
from pdlink.memory.buffers import Buffer
from pdlink.store.policies.registry import make_policy
from pdlink.store.record import shape_of
from pdlink.store.source import StoreSource
from pdlink.store.store import Store
from pdlink.store.tiers.disk import Disk
from pdlink.store.tiers.opening import open_tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from pdlink.config import TiersConfig
    from pdlink.engine.models import LoadedModel
    from pdlink.engine.paged_cache import PagedCache
    from pdlink.memory.blocks import BlockPool
    from pdlink.node.port import EnginePort
    from pdlink.observe.metrics import Gauges
    from pdlink.store.source import StoredPrompt, StoreLoad
    from pdlink.store.tiers.base import Tier

_GIB = 1 << 30


@dataclass(eq=False, slots=True)
class _Request:
    prompt: StoredPrompt
    end: int
    """Tokens before this one were found in the store."""
    blocks: Sequence[int] = ()
    load: StoreLoad | None = None


class Tiered:
    """Implements `pdlink.engine.request.KVListener`; hands on to the port what it is told."""

    def __init__(self, port: EnginePort, source: StoreSource, arrived: Callable[[str, int], None]) -> None:
        """arrived: told, in any thread, up to which token a request's KV came; the rest is to be computed."""
        self._port, self._source, self._arrived = port, source, arrived
        self._requests: dict[str, _Request] = {}
        """Added to before the engine knows the request; otherwise the engine's thread's."""

    async def look(self, request_id: str, prompt: Sequence[int], salt: str) -> StoredPrompt | None:
        """Look up a prompt that is to be computed here otherwise. Holds nothing."""
        try:
            stored = self._source.prompt(request_id, prompt, salt)
        except OverflowError:  # no token of any vocabulary: the engine will say so
            return None
        if self._source.store.has_tiers:  # whose answers take time
            await asyncio.to_thread(stored.lookup)
        else:
            stored.lookup()
        return stored

    def begin(self, stored: StoredPrompt) -> None:
        """The engine is about to get this request, which ends with `ended`."""
        self._requests[stored.request_id] = _Request(stored, stored.found[0].end if stored.found else 0)

    def ended(self, request_id: str, *, forget: bool = False) -> None:
        """The request is over, or was not accepted. forget: its KV is not to be trusted."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            if request.load is not None:
                request.load.cancel()
            request.prompt.close(forget=forget)

    def admitted(self, request_id: str, block_table: Sequence[int], num_cached_tokens: int) -> None:
        self._port.admitted(request_id, block_table, num_cached_tokens)
        request = self._requests.get(request_id)
        if request is None:
            return
        request.blocks = block_table
        if num_cached_tokens < request.end:
            block_tokens = self._source.layout.block_tokens
            mine = block_table[num_cached_tokens // block_tokens : -(-request.end // block_tokens)]
            request.load = request.prompt.load(TokenRange(num_cached_tokens, request.end, request.prompt), mine)
            request.load.done.add_done_callback(partial(self._loaded, request, num_cached_tokens))

    def layer_needed(self, request_id: str, layer: int, timeout_s: float) -> bool:
        return self._port.layer_needed(request_id, layer, timeout_s)

    def prefilling(self, on: bool) -> None:
        self._port.prefilling(on)

    def layer_written(self, layer: int, spans: Sequence[tuple[str, int, int]]) -> None:
        self._port.layer_written(layer, spans)
        for request_id, start, end in spans:
            request = self._requests.get(request_id)
            if request is not None:
                request.prompt.store(start, end, request.blocks, layer)

    def _loaded(self, request: _Request, begin: int, done: Future[int]) -> None:
        """In the copier's thread."""
        request_id, end = request.prompt.request_id, done.result()
        if end > begin:
            for layer in range(len(self._source.layout.layers)):
                self._port.layer_written(layer, [(request_id, begin, end)])
        if self._requests.get(request_id) is request:  # the next one of that id has other blocks
            self._arrived(request_id, end)

    def gauges(self) -> Gauges:
        """For /metrics."""
        store = self._source.store
        return {
            "store_nbytes": ("Bytes of the store's memory, by use, and of each tier", store.gauges()),
            "tiers_answering": ("0 for a tier that is left alone since it failed or stalled", store.answering()),
        }

    def close(self) -> None:
        """After the engine has ended."""
        self._source.close()
        self._source.store.close()


def open_source(
    config: TiersConfig,
    name: str,
    model: LoadedModel,
    cache: PagedCache,
    pool: BlockPool,
    released: Callable[[], None],
) -> StoreSource | None:
    """The store that the settings describe, opened, as a source for this engine; None where they want none.

    name: the worker's. released: told that blocks were given back.
    Raises ConfigError, and OSError if there is not enough memory.
    """
    nbytes = int(config.max_local_cpu_size * _GIB)
    if nbytes == 0 or not isinstance(cache.buffer, Buffer):
        return None
    revision = f"{model.revision} {model.content}"
    shape = shape_of(cache.layout, config.chunk_size)
    if shape.nbytes > nbytes:
        raise ConfigError(
            f"tiers.chunk_size: got {config.chunk_size} tokens, {shape.nbytes} bytes of this model; limit {nbytes} "
            "bytes; lower it, or raise tiers.max_local_cpu_size"
        )
    namespace = hashing.namespace(
        model=model.name, revision=revision, dtype=shape.dtype, layout=shape.text, chunk_tokens=config.chunk_size
    )
    store = Store(
        nbytes,
        make_policy(config.cache_policy),
        _tiers(config, name, namespace.hex()[:32]),
        ingestion=config.ingestion,
        reserve_nbytes=int(config.reserve_local_cpu_size * _GIB),
    )
    source = StoreSource(
        store,
        cache.layout,
        [cache.buffer],
        pool,
        model=model.name,
        revision=revision,
        chunk_tokens=config.chunk_size,
        released=released,
    )
    store.open()
    return source


def _tiers(config: TiersConfig, name: str, namespace: str) -> list[Tier]:
    """Those below memory, in the order in which they are asked."""
    tiers: list[Tier] = []
    if config.local_disk is not None and config.max_local_disk_size is not None:
        directory = Path(config.local_disk.replace("{name}", quote(name, safe="")))
        tiers.append(Disk(directory, namespace, int(config.max_local_disk_size * _GIB)))
    if config.remote_url is not None:
        tiers.append(open_tier(config.remote_url, namespace))
    return tiers
