"""`PDLinkLinker`: a pdlink store behind SGLang's prefix cache without a tier on the host in between
(`--unified-cache-external-linker-backend dynamic`, docs/sglang.md).

| SGLang calls | in the scheduler's thread | in a thread of ours |
|---|---|---|
| lookup | asks the store how much of a prompt it has | |
| load, start_layer_wise_loading | holds the records | copies layer by layer, while attention waits for its layer |
| offload | | stores whole pages; SGLang keeps them until then |
"""

from __future__ import annotations

import logging
import queue
from typing import TYPE_CHECKING, Any

import sglang
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker
from sglang.srt.runtime_context import get_parallel, get_serving

from pdlink.integrations.sglang_parts import versions
from pdlink.integrations.sglang_parts.device_pages import DevicePages
from pdlink.integrations.sglang_parts.hicache import RankScheme
from pdlink.integrations.sglang_parts.host_pool import pages_at
from pdlink.integrations.sglang_parts.pages import guarded
from pdlink.integrations.sglang_parts.settings import read_linker
from pdlink.integrations.sglang_parts.versions import UnsupportedSglang
from pdlink.store.line import Line

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.integrations.sglang_parts.device_pages import Load

log = logging.getLogger(__name__)

_STOP_S = 30.0
"""For copies that are under way when SGLang ends the linker."""


class PDLinkLinker(UnifiedCacheLinker):  # type: ignore[misc]  # SGLang is not installed where types are checked
    """SGLang names it in `--unified-cache-external-linker-config`. A store that fails is a miss, with a WARNING; one
    that fails in the middle of a load costs the requests of that batch, which SGLang aborts."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        """Raises UnsupportedSglang and ConfigError, with which the server does not start."""
        settings = read_linker(extra_config or {})
        versions.check(sglang.__version__, accept_newer=settings.untested_sglang == "accept")
        if strange := {one.name for one in components} - {ComponentType.FULL.name}:
            raise UnsupportedSglang(
                f"prefix cache: got parts {sorted(strange)} beside it; limit plain attention; use HiCache"
            )
        self.forward_stream = forward_stream
        self._page = int(params.page_size)
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        parallel = get_parallel()
        tp = (int(parallel.attn_tp_rank), int(parallel.attn_tp_size))
        self._pages = DevicePages(
            settings,
            RankScheme(
                tp, (params.pp_rank, params.pp_size), (params.attn_cp_rank, params.attn_cp_size), latent=False
            ),
            pool,
            self._page,
            model=str(get_serving().served_model_name or ""),
            revision=f"{versions.content(server_args)} {versions.precision(server_args)}",
            num_kv_heads=settings.num_kv_heads or versions.num_kv_heads(int(pool.head_num), tp[1], server_args),
        )
        self.pools = {PoolName.KV: pool}
        self.layer_done_counter = LayerWiseLoadCounter(self._pages.num_layers)
        self._queued: dict[str, Load] = {}
        self._stored: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._loader, self._storer = Line("pdlink-sglang-load"), Line("pdlink-sglang-store")

    # --- Loading

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        hashes = list(_kv(transfers).keys)
        found = guarded(lambda: [True] * self._pages.records.num_known(hashes), 0, _failed("look-up"))
        return list(range(1, len(found) + 1))

    def load(self, rid: str, transfers: list[Any]) -> bool:
        kv = _kv(transfers)
        begun: list[Load] = []

        def begin() -> list[bool]:
            load = self._pages.begin(list(kv.keys), pages_at(kv.device_indices, self._page))
            begun.extend([load] if load is not None else [])
            return [load is not None]

        if not guarded(begin, 1, _failed("load"))[0]:
            return False
        self._queued[rid] = begun[0]
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        load = self._queued.pop(rid, None)
        if load is not None:
            load.close()
        return load is not None

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        loads, self._queued = list(self._queued.values()), {}
        index = int(self.layer_done_counter.update_producer())
        self._loader.put(lambda: self._load(index, loads))
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return bool(self.layer_done_counter.finish(counter_index))

    def _load(self, index: int, loads: list[Load]) -> None:
        """The last layer is complete when the records have stood until its end."""
        last, closed = self._pages.num_layers - 1, 0
        try:
            if not all(load.wait() for load in loads):
                raise LookupError("records that the store has promised did not come")
            for layer in range(last + 1):
                for load in loads:
                    load.layer(layer)
                if layer < last:
                    self.layer_done_counter.complete(index, layer)
            stood = True
            while closed < len(loads):
                closed += 1
                stood &= loads[closed - 1].close()
            if not stood:
                raise LookupError("the store has ended while its records were copied")
            self.layer_done_counter.complete(index, last)
        except Exception as error:  # noqa: BLE001  attention waits for these layers
            log.warning("pdlink store: load of %d prompts failed: %s: %s", len(loads), type(error).__name__, error)
            self.layer_done_counter.fail(index, error)
            for load in loads[closed:]:
                load.close()

    # --- Storing

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """The pages are written: SGLang offloads what a finished pass has computed, and a CPU has no streams."""
        kv = _kv(transfers)
        hashes, pages = list(kv.keys), pages_at(kv.device_indices, self._page)

        def store() -> None:
            kept = guarded(lambda: self._pages.records.set(hashes, pages), len(hashes), _failed("store"))
            self._stored.put(all(kept))

        self._storer.put(store)
        return True

    def num_completed_offloads(self) -> int:
        return self._stored.qsize()

    def pop_completed_offload(self) -> bool:
        return self._stored.get_nowait()

    # --- Life

    def reset(self) -> None:
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        for line in (self._loader, self._storer):
            line.wait()
        while self._stored.qsize():
            self._stored.get_nowait()
        self.layer_done_counter.reset()

    def close(self) -> None:
        self.reset()
        for line in (self._loader, self._storer):
            line.close(_STOP_S)
        self._pages.close()


def _kv(transfers: list[Any]) -> Any:
    """Plain attention has no other."""
    (kv,) = transfers
    return kv


def _failed(verb: str) -> Callable[[Exception], None]:
    def say(error: Exception) -> None:
        log.warning("pdlink store: %s failed: %s: %s", verb, type(error).__name__, error)

    return say
