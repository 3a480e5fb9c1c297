"""SGLang's prefix tree, HiCache controller and host pool in a process of their own, without a model.

Takes a line of JSON for each thing to do, and answers with one. Run by `test_sglang_hicache.py`.
"""

from __future__ import annotations

import json
import sys
import time
from array import array
from typing import Any

import torch
import torch.distributed
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel, get_serving
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.srt.utils.network import get_open_port
from sglang.test.kits.unified_radix_cache.config import CacheConfig, ComponentType
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix, node_device_value
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures
from sglang.test.test_utils import CustomTestCase

from tests.sglang_cpu import host_pools

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

    def open(self, form: str, extra: dict[str, Any], layout: str, tp: tuple[int, int]) -> None:
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


def main() -> None:
    host_pools.install()
    place = f"tcp://127.0.0.1:{get_open_port()}"
    torch.distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    engine = Engine()
    answers = sys.stdout
    sys.stdout = sys.stderr
    try:
        for line in sys.stdin:
            call = json.loads(line)
            try:
                answer = getattr(engine, call.pop("do"))(**call)
            except Exception as error:  # noqa: BLE001  the test shows it
                answer = {"error": f"{type(error).__name__}: {error}"}
                import traceback

                traceback.print_exc()
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        engine.doCleanups()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
