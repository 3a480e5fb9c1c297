"""What SGLang loads by name (docs/sglang.md): `PDLinkHiCache`, the third level of its HiCache, and `register`, the
plugin with which servers take `--disaggregation-transfer-backend pdlink`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import sglang
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult
from sglang.srt.runtime_context import get_server_args

from pdlink.config import SglangConfig, load
from pdlink.config.loading import mention_foreign
from pdlink.integrations.sglang_parts import versions
from pdlink.integrations.sglang_parts.hicache import HostPages, RankScheme
from pdlink.integrations.sglang_parts.metrics import SHOWN
from pdlink.integrations.sglang_parts.pages import guarded
from pdlink.integrations.sglang_parts.settings import read_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

BACKEND = "pdlink"
"""Of `--disaggregation-transfer-backend`."""


def register() -> None:
    """SGLang's entry point `sglang.srt.plugins`, called in each of its processes before arguments are read.

    Raises UnsupportedSglang, which SGLang logs; the backend's name is unknown then.
    """
    from sglang.srt.arg_groups import choices
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from pdlink.integrations.sglang_parts import allocation, sessions, weights

    versions.check(sglang.__version__, accept_newer=load(SglangConfig).untested_sglang == "accept")
    if BACKEND in utils.TransferBackend._value2member_map_:
        return
    choices.add_disagg_transfer_backend_choices([BACKEND])
    member = object.__new__(utils.TransferBackend)
    member._name_, member._value_ = BACKEND.upper(), BACKEND
    member._sort_order_ = len(utils.TransferBackend)
    # An Enum has no public way to get one member more.
    utils.TransferBackend._member_names_.append(member._name_)
    utils.TransferBackend._member_map_[member._name_] = member
    utils.TransferBackend._value2member_map_[BACKEND] = member
    type.__setattr__(utils.TransferBackend, member._name_, member)

    def get_kv_class(original: Callable[..., Any], backend: Any, kind: Any) -> Any:
        if backend is not member or kind is utils.KVClassType.KVARGS:
            return original(backend, kind)
        from pdlink.integrations.sglang_parts.requests import classes

        return classes()[kind.name]

    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", get_kv_class, HookType.AROUND)
    allocation.install(BACKEND)
    for each in (sessions, weights):
        each.install(lambda name, around: HookRegistry.register(name, around, HookType.AROUND))


class PDLinkHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang is not installed where types are checked
    """Pages of HiCache's host pool in a pdlink store. SGLang names it in `--hicache-storage-backend-extra-config`.

    SGLang calls it from its threads for prefetch and backup. Nothing that goes wrong with the store is raised there:
    it is a miss, with a WARNING.
    """

    def __init__(self, storage_config: Any, kwargs: dict[str, Any]) -> None:
        """Raises UnsupportedSglang and ConfigError, with which the server does not start."""
        self._settings = read_storage(storage_config.extra_config or {})
        versions.check(sglang.__version__, accept_newer=self._settings.untested_sglang == "accept")
        mention_foreign()
        self._config = storage_config
        self._pages: HostPages | None = None

    # --- Life

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        config, server = self._config, get_server_args()
        ranks = RankScheme(
            (config.tp_rank, config.tp_size),
            (config.pp_rank, config.pp_size),
            (config.attn_cp_rank, config.attn_cp_size),
            bool(config.is_mla_model),
        )
        self._pages = HostPages(
            self._settings,
            ranks,
            mem_pool_host,
            model=str(config.model_name or ""),
            revision=f"{versions.content(server)} {versions.precision(server)}",
            num_kv_heads=self._num_kv_heads(mem_pool_host, server),
        )
        self._shown_no_more = SHOWN.add_store(server, self._pages.store)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        name = str(host_pool_name)
        if name != "kv":
            self._open.add(name, host_pool)

    def clear(self) -> None:
        self._open.clear()

    def close(self) -> None:
        pages, self._pages = self._pages, None
        if pages is not None:
            self._shown_no_more()
            pages.close()

    # --- KV by page

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return sum(self._guarded("look-up", lambda: [True] * self._open.kv.records.num_known(keys), 0))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        kv = self._open.kv
        return self._guarded("load", lambda: kv.records.get(keys, kv.pages(host_indices)), len(keys))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        kv = self._open.kv
        return self._guarded("store", lambda: kv.records.set(keys, kv.pages(host_indices)), len(keys))

    # --- With further pools

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        wanted = [
            (str(transfer.name), _trailing(transfer))
            for transfer in pool_transfers or ()
            if transfer.hit_policy != PoolHitPolicy.BLOCK_GROUPS
        ]
        result = PoolTransferResult.empty()

        def look() -> list[bool]:
            nonlocal result
            usable, own, lengths = self._open.hits(keys, wanted)
            result = PoolTransferResult(usable, {name: hits for name, hits in own.items() if hits}, lengths)
            return []

        self._guarded("look-up", look, 0)
        return result

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return self._each(transfers, "load")

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return self._each(transfers, "store")

    def _each(self, transfers: Sequence[Any], verb: str) -> dict[str, list[bool]]:
        results: dict[str, list[bool]] = {}
        for transfer in transfers:
            keys = list(transfer.keys or [])

            def do(transfer: Any = transfer, keys: list[str] = keys) -> list[bool]:
                pool = self._open.kv if str(transfer.name) == "kv" else self._open.others[str(transfer.name)]
                pages = pool.pages(transfer.host_indices)
                if len(pages) != len(keys):
                    raise ValueError(f"host indices: got {len(pages)} pages for {len(keys)} keys")
                return (pool.records.get_any if verb == "load" else pool.records.set)(keys, pages)

            results[transfer.name] = self._guarded(verb, do, len(keys))
        return results

    # --- The interface without places, which `interface_v1` turns off

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        return None

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    # --- Inside

    @property
    def _open(self) -> HostPages:
        assert self._pages is not None, "SGLang registers its pool first and closes last"
        return self._pages

    def _num_kv_heads(self, pool: Any, server: Any) -> int:
        mine, num_ranks = int(getattr(pool, "head_num", 1)), int(self._config.tp_size)
        if self._settings.num_kv_heads is not None:
            return self._settings.num_kv_heads
        return mine * num_ranks if self._config.is_mla_model else versions.num_kv_heads(mine, num_ranks, server)

    def _guarded(self, verb: str, call: Callable[[], list[bool]], num: int) -> list[bool]:
        def failed(error: Exception) -> None:
            log.warning("pdlink store: %s of %d pages failed: %s: %s", verb, num, type(error).__name__, error)

        return guarded(call, num, failed)


def _trailing(transfer: Any) -> int:
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return 0
    return max(1, len(transfer.keys or ()))
