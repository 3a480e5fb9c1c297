"""`PDLinkLinker`: a pdlink store behind SGLang's prefix cache without a tier on the host in between
(`--unified-cache-external-linker-backend dynamic`, docs/sglang.md).

| SGLang calls | in the scheduler's thread | in a thread of ours |
|---|---|---|
| lookup | asks the store how much of a prompt it has | |
| load, start_layer_wise_loading | holds the records | copies layer by layer, while attention waits for its layer |
| offload | | stores whole pages; SGLang keeps them until then |

On a GPU the copies are the GPU's, in streams of their own. Attention is launched when the copy of its layer has been
launched, and waits for it on the GPU. SGLang itself waits for the copies of a pass when it has launched the pass.
"""

from __future__ import annotations

import contextlib
import logging
import queue
from concurrent.futures import InvalidStateError
from functools import partial
from typing import TYPE_CHECKING, Any

import sglang
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker
from sglang.srt.runtime_context import get_parallel, get_serving

from pdlink.errors import TransferFailed
from pdlink.integrations.sglang_parts import versions
from pdlink.integrations.sglang_parts.device_pages import DevicePages, is_latent
from pdlink.integrations.sglang_parts.hicache import RankScheme
from pdlink.integrations.sglang_parts.metrics import SHOWN
from pdlink.integrations.sglang_parts.pages import guarded
from pdlink.integrations.sglang_parts.settings import read_linker
from pdlink.integrations.sglang_parts.versions import UnsupportedSglang
from pdlink.store.line import Line

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from pdlink.integrations.sglang_parts.device_loads import DeviceLoad, LoadBatch

log = logging.getLogger(__name__)

_STOP_S = 30.0
"""For copies that are under way when SGLang ends the linker."""


_POOLS = (MHATokenToKVPool, MLATokenToKVPool)
"""Others have more than K and V or a latent, or number their pages in another way."""


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
                f"prefix cache: got parts {sorted(strange)} beside it; expected plain attention; use HiCache"
            )
        self.forward_stream = forward_stream
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        if type(pool) not in _POOLS:
            raise UnsupportedSglang(
                f"KV pool: got {type(pool).__name__}; expected {', '.join(one.__name__ for one in _POOLS)}; "
                "use HiCache"
            )
        parallel, latent = get_parallel(), is_latent(pool)
        tp = (int(parallel.attn_tp_rank), int(parallel.attn_tp_size))
        heads = 1 if latent else versions.num_kv_heads(int(pool.head_num), tp[1], server_args)
        self._pages = DevicePages(
            settings,
            RankScheme(
                tp, (params.pp_rank, params.pp_size), (params.attn_cp_rank, params.attn_cp_size), latent=latent
            ),
            pool,
            int(params.page_size),
            model=str(get_serving().served_model_name or ""),
            revision=f"{versions.content(server_args)} {versions.precision(server_args)}",
            num_kv_heads=settings.num_kv_heads or heads,
            streams=[int(forward_stream.cuda_stream)] if hasattr(forward_stream, "cuda_stream") else [],
        )
        self._shown_no_more = SHOWN.add_store(server_args, self._pages.source.store)
        self.pools = {PoolName.KV: pool}
        self.layer_done_counter = LayerWiseLoadCounter(
            self._pages.num_layers, self._follow if self._pages.on_gpu else None
        )
        self._queued: dict[str, DeviceLoad] = {}
        self._batches: dict[int, tuple[LoadBatch, Future[bool]]] = {}
        """Not finished by SGLang."""
        self._loads_fail = False
        self._stored: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._loader, self._storer = Line("pdlink-sglang-load"), Line("pdlink-sglang-store")

    # --- Loading

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        if self._loads_fail:
            return []
        hashes = list(_kv(transfers).keys)
        found = guarded(lambda: [True] * self._pages.records.num_known(hashes), 0, _failed("look-up"))
        return list(range(1, len(found) + 1))

    def load(self, rid: str, transfers: list[Any]) -> bool:
        kv = _kv(transfers)
        begun: list[DeviceLoad] = []

        def begin() -> list[bool]:
            load = self._pages.begin(list(kv.keys), self._pages.pages(kv.device_indices))
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
        batch = self._pages.batch(loads)
        self._batches[index] = batch, self._loader.submit(partial(self._load, index, batch, len(loads)))
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Raises TransferFailed, which ends the server, for a GPU that may still write to these pages."""
        ready = bool(self.layer_done_counter.finish(counter_index))
        found = self._batches.pop(counter_index, None)
        landed = found is None or found[1].result()
        if self._pages.lost:
            raise TransferFailed("the GPU has failed with copies into the KV pool under way; start the server again")
        return ready and landed

    def _follow(self, index: int, layer: int) -> None:
        """SGLang's counter calls it where attention is launched, once the layer is ready."""
        if index in self._batches:
            self._batches[index][0].follow(layer)

    def _load(self, index: int, batch: LoadBatch, num_prompts: int) -> bool:
        def ready(layer: int) -> None:
            with contextlib.suppress(InvalidStateError, KeyError):  # the batch has failed meanwhile
                self.layer_done_counter.complete(index, layer)

        try:
            batch.run(ready)
        except Exception as error:  # noqa: BLE001  attention waits for these layers
            log.warning("pdlink store: load of %d prompts failed: %s: %s", num_prompts, type(error).__name__, error)
            if isinstance(error, TransferFailed) and not self._loads_fail:
                self._loads_fail = True
                log.error("pdlink store: nothing is loaded any more: the GPU does not copy; start the server again")
            self.layer_done_counter.fail(index, error)
            return False
        return True

    # --- Storing

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """SGLang keeps the pages until the offload is complete; on a GPU the pass that writes them may still run."""
        kv = _kv(transfers)
        hashes = list(kv.keys)
        keep = self._pages.offer(hashes, self._pages.pages(kv.device_indices))
        self._storer.put(lambda: self._stored.put(all(guarded(keep, len(hashes), _failed("store")))))
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
        self._batches.clear()
        self.layer_done_counter.reset()

    def close(self) -> None:
        self.reset()
        for line in (self._loader, self._storer):
            line.close(_STOP_S)
        self._shown_no_more()
        self._pages.close()


def _kv(transfers: list[Any]) -> Any:
    """Plain attention has no other."""
    (kv,) = transfers
    return kv


def _failed(verb: str) -> Callable[[Exception], None]:
    def say(error: Exception) -> None:
        log.warning("pdlink store: %s failed: %s: %s", verb, type(error).__name__, error)

    return say
