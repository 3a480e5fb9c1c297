"""SGLang's prefix tree, HiCache controller and host pool in a process of their own, without a model.

Takes a line of JSON for each thing to do, and answers with one. Run by `test_sglang_hicache.py`.
"""

from __future__ import annotations

import functools
import json
import time
from array import array
from typing import Any, ClassVar

import torch
import torch.distributed
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import get_storage_hash_str
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed
from sglang.srt.runtime_context import get_parallel, get_serving
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.test_utils import CustomTestCase

from pdlink.cuda.driver import Device
from pdlink.integrations.sglang import PDLinkHiCache
from tests.cuda.fake import fake
from tests.integrations import sglang_kit
from tests.integrations.sglang_process import serve
from tests.sglang_cpu import host_pools

sglang_kit.use()

from sglang.test.kits.unified_radix_cache.config import CacheConfig, ComponentType  # noqa: E402
from sglang.test.kits.unified_radix_cache.fixtures import (  # noqa: E402
    build_fixture,
    match_prefix,
    node_device_value,
)
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures  # noqa: E402

PAGE = 16
FORMS = {
    "plain": CacheConfig(page_size=PAGE, num_layers=3, kv_size=512, head_num=2, head_dim=8),
    "mamba": CacheConfig(
        page_size=PAGE,
        num_layers=4,
        full_attention_layer_ids=(1, 3),
        kv_size=512,
        head_dim=8,
        components=(ComponentType.FULL, ComponentType.MAMBA),
        enable_mamba_extra_buffer=True,
        mamba_cache_size=60,
    ),
    "swa": CacheConfig(
        page_size=PAGE,
        num_layers=4,
        full_attention_layer_ids=(1, 3),
        kv_size=512,
        head_dim=8,
        components=(ComponentType.FULL, ComponentType.SWA),
        sliding_window_size=PAGE,
    ),
}


class Engine(UnifiedRadixCacheStorageFixtures, CustomTestCase):  # type: ignore[misc]
    def runTest(self) -> None: ...

    def open(
        self, form: str, extra: dict[str, Any], layout: str, tp: tuple[int, int], *, registered: bool = False
    ) -> None:
        """registered: the host pools are those of a server with a GPU, registered with the double of its driver."""
        host_pools.install(registered=registered)
        if registered:
            torch.cuda.cudart = Runtime
        self.cfg = FORMS[form]
        get_parallel().override_permanently(tp_rank=tp[0], tp_size=tp[1], pp_rank=0, pp_size=1)
        self.cache, self.allocator, self.requests = build_fixture(self.cfg)
        server = ServerArgs(
            model_path="dummy",
            page_size=PAGE,
            hicache_io_backend="direct",
            hicache_mem_layout=layout,
            hicache_write_policy="write_through",
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=json.dumps(extra),
            hicache_storage_prefetch_policy="wait_complete",
        )
        server._mamba_cache_chunk_size = 64
        set_global_server_args_for_scheduler(server)
        self.cache.init_hicache(server, self.cache.cache_init_params)
        self.addCleanup(self.cache.release_host_resources)
        self.cache.write_through_threshold = 1 << 30
        self.cache.load_back_threshold = 0
        self._attached()
        self.addCleanup(self.cache.cache_controller.detach_storage_backend)

    def _attached(self) -> None:
        controller = self.cache.cache_controller
        controller.prefetch_capacity_limit = controller.mem_pool_host.size

    def store(self, start: int, pages: int) -> dict[str, Any]:
        """Computes a prompt, as it were, and writes it through to the third level."""
        tokens = self._make_seq(start, pages)
        self._insert(self.cache, self.allocator, self.requests, tokens)
        node = match_prefix(self.cache, tokens).last_device_node
        where = self.cache.path_device_indices(node)
        for kind, buffer, slots in self._buffers(where):
            buffer[slots] = self._values(kind, tokens, buffer)
        for number, state in enumerate(self._states(node)):
            state[:] = self._mark(start, number)
        self._backup_node(self.cache, node)
        self._write_path_to_l3(self.cache, node)
        self._flush_l3_backups(self.cache)
        hashes = self._all_page_hashes(self.cache, node)
        return {"known": self.cache.cache_controller.storage_backend.batch_exists(hashes)}

    def fetch(self, start: int, pages: int) -> dict[str, Any]:
        """What another process, or this one after its memory was emptied, has of a prompt. -1 of `wrong`: nothing."""
        tokens = self._make_seq(start, pages)
        request = CacheRequestHandle(f"fetch {start}", 0)
        self.cache.prefetch_from_storage(request, self.cache.root_node_handle(), array("q", tokens), None, None)
        self._run_prefetch_to_completion(self.cache, request)
        host = match_prefix(self.cache, tokens).host_hit_length
        if not host:
            return {"tokens": 0, "wrong": 0}
        node = match_prefix(self.cache, tokens).best_match_node
        self._load_back_node(self.cache, node, req=self._make_req(self.requests))
        where = self.cache.path_device_indices(node)
        wrong = 0
        for kind, buffer, slots in self._buffers(where):
            wrong += int((buffer[slots] != self._values(kind, tokens[: len(where)], buffer)).sum())
        states = self._states(node)
        wrong += sum(int((state != self._mark(start, number)).sum()) for number, state in enumerate(states))
        return {"tokens": len(where), "wrong": wrong} | ({"states": len(states)} if states else {})

    def await_known(self, start: int, pages: int, timeout_s: float = 20.0) -> dict[str, Any]:
        """Until the store knows all of a prompt."""
        hashes = get_storage_hash_str(array("q", self._make_seq(start, pages)), None, page_size=PAGE)
        backend, deadline = self.cache.cache_controller.storage_backend, time.monotonic() + timeout_s
        while (known := backend.batch_exists(hashes)) < pages and time.monotonic() < deadline:
            time.sleep(0.1)
        return {"known": known}

    def tokens(self, start: int, pages: int) -> dict[str, Any]:
        return {"tokens": [int(token) for token in self._make_seq(start, pages)]}

    def names(self, start: int, pages: int, salt: str, extra_key: str) -> dict[str, Any]:
        """As its radix tree names the pages of such a request."""
        seed = storage_namespace_seed(extra_key or None, salt or None)
        return {"names": get_hash_str(array("q", self._make_seq(start, pages)), seed, page_size=PAGE)}

    def layouts(self) -> dict[str, Any]:
        """A page of each host pool, of every layout, in mapped and in shared memory, is loaded into the next pool.

        registered: pools that the GPU still has where SGLang has registered them.
        """
        controller = self.cache.cache_controller
        names, config = ["layer_first", "page_first", "page_first_direct", "page_head"], controller.storage_config
        pool = self._get_full_kv_pool(self.allocator)
        described, more = pool, dict[str, Any]()  # what 0.5.22 takes
        if hasattr(pool, "get_device_pool_infos"):
            described = pool.get_device_pool_infos()[0].buffer_info
            more = {"device_capacity_tokens": self.cfg.kv_size, "start_layer": 0, "end_layer": self.cfg.num_layers}
        hosts = [
            MHATokenToKVPoolHost(described, 2.0, 0, PAGE, name, allocator_type=kind, **more)
            for name in names
            for kind in ("default", "shm")
        ]
        backends = [PDLinkHiCache(config, {}) for _ in hosts]
        for backend, host in zip(backends, hosts, strict=True):
            backend.register_mem_pool_host(host)
        values = torch.randint(0, 100, (2, self.cfg.num_layers, PAGE, self.cfg.head_num, self.cfg.head_dim))
        dtype = hosts[0].kv_buffer.dtype
        values = values.to(dtype)
        for number, host in enumerate(hosts):
            host.kv_buffer.zero_()
            self._paged(host)[:] = values if number == 0 else 0
        where, wrong = torch.arange(3 * PAGE, 4 * PAGE), 0
        for number, (backend, host) in enumerate(zip(backends, hosts, strict=True)):
            if number:
                key, deadline = f"layouts {number - 1}", time.monotonic() + 20
                while not backend.batch_exists([key]) and time.monotonic() < deadline:
                    time.sleep(0.01)  # the store hears of it on the connection of the one before
                wrong += backend.batch_get_v1([key], where) != [True]
                wrong += int((self._paged(host) != values).sum())
                wrong += int((host.kv_buffer != 0).sum()) - int((values != 0).sum())
            wrong += backend.batch_set_v1([f"layouts {number}"], where) != [True]
        for backend in backends:
            backend.close()
        ranges = [(host.kv_buffer.data_ptr(), host.kv_buffer.numel() * dtype.itemsize) for host in hosts]
        return {"pools": len(hosts), "wrong": wrong, "registered": sum(one in Runtime.ranges for one in ranges)}

    @staticmethod
    def _paged(host: Any) -> Any:
        """Page 3 of a host pool, as [part, layer, token, head, dim]."""
        kv, page = host.kv_buffer, slice(3 * PAGE, 4 * PAGE)
        return {
            "layer_first": lambda: kv[:, :, page],
            "page_first": lambda: kv[:, page].transpose(1, 2),
            "page_first_direct": lambda: kv[:, 3],
            "page_head": lambda: kv[:, 3].permute(0, 3, 2, 1, 4),
        }[host.layout]()

    def clear(self) -> dict[str, Any]:
        return {"cleared": self.cache.clear_storage_backend()}

    def detach(self) -> dict[str, Any]:
        return dict(zip(("ok", "why"), self.cache.detach_storage_backend(), strict=True))

    def attach(self, extra: dict[str, Any]) -> dict[str, Any]:
        name = get_serving().served_model_name
        found = self.cache.attach_storage_backend("dynamic", json.dumps(extra), served_model_name=name)
        self._attached()
        return dict(zip(("ok", "why"), found, strict=True))

    def _buffers(self, where: Any) -> list[tuple[int, Any, Any]]:
        pool = self._get_full_kv_pool(self.allocator)
        kinds = [*pool.k_buffer, *pool.v_buffer]
        return [(kind, buffer, where) for kind, buffer in enumerate(kinds)]

    def _states(self, node: Any) -> list[Any]:
        """What a model keeps beside its KV at the end of a prompt, as views of the pools."""
        found: list[Any] = []
        if ComponentType.MAMBA in self.cfg.components:
            places = node_device_value(self.cache, node, ComponentType.MAMBA)
            kept = self.requests.mamba_pool.mamba_cache
            found += [tensor[:, int(place)] for tensor in (kept.temporal, *kept.conv) for place in places]
        if ComponentType.SWA in self.cfg.components:
            places = node_device_value(self.cache, node, ComponentType.SWA)
            pool = self.allocator.get_kvcache().swa_kv_pool
            found += [buffer[int(place)] for buffer in (*pool.k_buffer, *pool.v_buffer) for place in places]
        return found

    @staticmethod
    def _mark(start: int, number: int) -> int:
        return 1 + (start * 7 + number * 3) % 100

    def forget(self) -> dict[str, Any]:
        """Empties the device and the host: no pool has anything of what was in it."""
        self.cache.reset()
        pool = self.allocator.get_kvcache()
        pools = [pool, getattr(pool, "swa_kv_pool", None), getattr(pool, "full_kv_pool", None)]
        if ComponentType.MAMBA in self.cfg.components:
            pools.append(self.requests.mamba_pool.mamba_cache)
        pools += [entry.host_pool for entry in self.cache.cache_controller.mem_pool_host.entries]
        names = ("k_buffer", "v_buffer", "kv_buffer", "temporal", "conv", "temporal_buffer", "conv_buffer")
        num_emptied = 0
        for each in pools:
            for found in (getattr(each, name, None) for name in names):
                for tensor in found if isinstance(found, (list, tuple)) else [found]:
                    if isinstance(tensor, torch.Tensor):
                        tensor.zero_()
                        num_emptied += 1
        return {"emptied": num_emptied}

    def _values(self, kind: int, tokens: list[int], like: Any) -> Any:
        values = (torch.tensor(tokens) * 7 + kind * 3) % 127
        spread = torch.arange(like[0].numel()).reshape(like[0].shape)
        return (values.reshape(-1, *[1] * spread.ndim) + spread).to(like.dtype)


class Runtime:
    """What SGLang calls of the CUDA runtime to register host pools, on the double of the driver."""

    ranges: ClassVar[list[tuple[int, int]]] = []

    @classmethod
    @functools.cache
    def _device(cls) -> Device:
        device = Device(0, fake().path)
        device.open()
        return device

    @classmethod
    def cudaHostRegister(cls, ptr: int, nbytes: int, flags: int) -> int:
        cls._device().pin(ptr, nbytes)
        cls.ranges.append((ptr, nbytes))
        return 0

    @classmethod
    def cudaHostUnregister(cls, ptr: int) -> int:
        cls._device().unpin(ptr)
        cls.ranges = [one for one in cls.ranges if one[0] != ptr]
        return 0


if __name__ == "__main__":
    serve(Engine)
