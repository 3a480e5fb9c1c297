"""SGLang's prefix tree and KV pool with our linker in a process of their own, without a model.

Takes a line of JSON for each thing to do, and answers with one. Run by `test_sglang_linker.py`. A pool on a GPU is
one of the host that says so, whose memory the double of the CUDA driver takes for a GPU's.
"""

from __future__ import annotations

import threading
import time
from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import torch.distributed
from sglang.srt.managers.io_struct import SetInternalStateReq
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture

from pdlink.api.session import SGLANG_END, with_source
from pdlink.cuda import driver
from pdlink.cuda.buffers import DeviceMemory
from pdlink.cuda.driver import CudaFailure, CudaStream, Device
from pdlink.integrations.sglang_parts import sessions
from tests.cuda.fake import fake
from tests.events import Reached
from tests.integrations.sglang_process import serve
from tests.waiting import WAIT_S

PAGE, LAYERS = 16, 3


class OnGpu:
    """A tensor of the host that the double takes for one on a GPU."""

    device = torch.device("cuda", 0)

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        fake().lend(tensor.data_ptr(), tensor.numel() * tensor.element_size(), -1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


class Engine:
    def open(
        self, store: str = "", *, latent: bool = False, gpu: bool = False, other: bool = False, memory: float = 0.0
    ) -> dict[str, Any]:
        """memory: GiB of a store inside, in place of the one at that address."""
        get_parallel().override_permanently(
            tp_rank=0, tp_size=1, attn_tp_rank=0, attn_tp_size=1, pp_rank=0, pp_size=1
        )
        config = CacheConfig(page_size=PAGE, num_layers=LAYERS, kv_size=512, head_num=2, head_dim=8)
        sessions.install(lambda name, around: HookRegistry.register(name, around, HookType.AROUND))
        HookRegistry.apply_hooks()
        self.cache, made, self.requests = build_fixture(config)
        server = ServerArgs(model_path="dummy", page_size=PAGE)
        set_global_server_args_for_scheduler(server)
        self.pool = made.get_kvcache()
        if latent:
            self.pool = MLATokenToKVPool(
                size=512,
                page_size=PAGE,
                dtype=torch.bfloat16,
                kv_lora_rank=24,
                qk_rope_head_dim=8,
                layer_num=LAYERS,
                device="cpu",
                enable_memory_saver=False,
            )
        params = self.cache.cache_init_params
        # The kit's own gives out slots from 1 on, also with pages.
        self.allocator = PagedTokenToKVPoolAllocator(512, PAGE, torch.bfloat16, "cpu", self.pool, need_sort=False)
        self.cache.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator = self.allocator
        if other:
            self.pool.__class__ = type("OtherPool", (type(self.pool),), {})
        self.gpu, forward = gpu, None
        if gpu:
            driver.LIBRARY = fake().path  # type: ignore[misc]
            self.device = Device(0, fake().path)
            self.device.open()
            forward, self.computing = CudaStream(self.device), CudaStream(self.device)
            DeviceMemory.make_event = lambda _: Reached()  # type: ignore[method-assign,assignment]
            DeviceMemory.compute_stream = lambda _: self.computing.handle  # type: ignore[method-assign,assignment]
            for name in ("kv_buffer",) if latent else ("k_buffer", "v_buffer"):
                setattr(self.pool, name, [OnGpu(tensor) for tensor in getattr(self.pool, name)])
            self.read = OnGpu(torch.zeros_like(self._buffers()[0]))
        linker = {
            "linker": "PDLinkLinker",
            "linker_module_path": "pdlink.integrations.sglang_linker",
            "linker_extra_config": {"tiers": {"max_local_cpu_size": memory} if memory else {"store": store}},
        }
        self.linker: Any = create_unified_cache_linker(
            server,
            params,
            backend="dynamic",
            config=linker,
            components=set(self.cache.components),
            forward_stream=SimpleNamespace(cuda_stream=forward.handle) if forward is not None else None,
        )
        self.cache.init_cache_linker(self.linker)
        self.counter = self.cache.linker.layer_done_counter
        self.pool.register_layer_transfer_counter(self.counter)
        return {"on_gpu": self.linker._pages.on_gpu}

    def store(self, start: int, pages: int) -> dict[str, Any]:
        """A prompt that was computed joins the tree, which offers it to the linker."""
        tokens = self._tokens(start, pages)
        self.cache.insert(InsertParams(key=RadixKey(array("q", tokens)), value=self._computed(tokens)))
        return self._offload()

    def _computed(self, tokens: list[int]) -> Any:
        """Slots with the KV of a prompt."""
        slots = self.allocator.alloc(len(tokens))
        for kind, buffer in enumerate(self._buffers()):
            buffer[slots] = self._values(kind, tokens, buffer)
        return slots

    def _offload(self) -> dict[str, Any]:
        offered, deadline_s = len(self.cache.linker.pending_offloads), time.monotonic() + WAIT_S
        while self.cache.linker.pending_offloads and time.monotonic() < deadline_s:
            self.cache.check_hicache_events()
            time.sleep(0.01)
        return {"offered": offered, "left": len(self.cache.linker.pending_offloads)}

    def turn(self, start: int, pages: int, session: str, salt: str) -> dict[str, Any]:
        """A request of a session computes its prompt, and ends: as the scheduler calls SGLang's functions for both.

        What the store says of its sessions, when it has begun and when it has ended.
        """
        tokens = self._tokens(start, pages)
        request = self._request(f"turn {start}", tokens, salt, session)
        request.output_ids = array("q")
        request.refresh_fill_ids()
        self.requests.alloc([request])
        self.requests.write((request.kv.req_pool_idx, slice(0, len(tokens))), self._computed(tokens))
        request.kv.kv_committed_len = request.kv.kv_allocated_len = request.extend_end = len(tokens)
        request.last_node = self.cache.root_node_handle()
        request.lock = self.cache.lock(request.last_node)
        checkpoint_kv_cache(request, self.cache)
        begun = self._sessions()
        request.finished_reason = FINISH_LENGTH(length=0)
        release_kv_cache(request, self.cache, checkpoint=True)
        return {"begun": begun, "ended": self._sessions(), **self._offload()}

    def _sessions(self) -> list[Any]:
        assert sessions.TURNS._kept is not None
        sessions.TURNS._kept[2].wait()
        states = self.linker._pages.source.store.state().sessions
        return [(each.name, each.owner, each.records, each.waits) for each in states]

    def end_session(self, session: str, salt: str) -> dict[str, Any]:
        """As the proxy has it ended: what its call reaches in the scheduler."""
        said = msgspec.json.encode({"session_id": session, "cache_salt": salt, "owner": "0a"}).decode()
        asked = SetInternalStateReq(server_args={SGLANG_END + said: 1})
        return {"ended": Scheduler.set_internal_state(None, asked).updated}

    def name(self, start: int, pages: int, source: str, session: str = "") -> dict[str, Any]:
        """A request comes whose prompt the store at this address has."""
        request = self._request(f"name {start}", self._tokens(start, pages), "", with_source(session, source))
        scheduler = SimpleNamespace(tree_cache=self.cache, _set_or_validate_priority=lambda _: False)
        scheduler._release_aborted_request = lambda _: None  # it goes no further
        Scheduler._add_request_to_queue(scheduler, request)
        return {}

    def forget(self) -> dict[str, Any]:
        self.cache.reset()
        self.allocator.clear()
        for buffer in self._buffers():
            buffer.zero_()
        return {}

    def fetch(self, start: int, pages: int, salt: str = "") -> dict[str, Any]:
        """A prompt comes, and a pass computes what is beyond its prefix: as the scheduler calls tree and pool.

        launched: whether attention got every layer while the GPU had copied nothing. wrong: values in the pool.
        """
        tokens = self._tokens(start, pages)
        request = self._request(f"fetch {start}", tokens, salt)
        key = RadixKey(array("q", tokens), cache_salt=salt)
        match = self.cache.match_prefix(MatchPrefixParams(key=key, req=request))
        if not match.host_hit_length:
            return {"tokens": 0}
        request.last_node = match.last_device_node
        params = InitLoadBackParams(
            best_match_node=match.best_match_node, host_hit_length=match.host_hit_length, req=request
        )
        self.cache.init_load_back(params)
        slots = self.cache.linker.private_load_indices[request.rid]
        stream = self._loads()
        if stream is not None:
            fake().hold_stream(stream)
        self.counter.set_consumer(self.cache.ready_to_load_host_cache())
        reading = threading.Thread(target=self._attend, daemon=True)
        reading.start()
        if stream is not None:
            reading.join(WAIT_S)
        launched, empty = not reading.is_alive(), not any(buffer.any() for buffer in self._buffers())
        if stream is not None:
            fake().go_on_stream(stream)
        reading.join(WAIT_S)
        if stream is not None:
            self.computing.synchronize()
        failed = self.cache.finish_external_linker_loads([request])
        self.counter.set_consumer(-1)
        wrong = sum(
            int((buffer[slots] != self._values(kind, tokens, buffer)).sum())
            for kind, buffer in enumerate(self._buffers())
        )
        answer = {"tokens": len(slots), "wrong": wrong, "failed": len(failed)}
        return answer | ({"launched": launched and empty} if stream is not None else {})

    def found(self, start: int, pages: int) -> dict[str, Any]:
        """What the tree promises of a prompt."""
        tokens = self._tokens(start, pages)
        request = self._request(f"found {start}", tokens, "")
        key = RadixKey(array("q", tokens), cache_salt="")
        return {"tokens": self.cache.match_prefix(MatchPrefixParams(key=key, req=request)).host_hit_length}

    def pin_nothing(self) -> dict[str, Any]:
        """Let the driver refuse to pin memory from now on."""

        def refuse(*_: object) -> int:
            raise CudaFailure("cuMemHostRegister_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")

        Device.pin = refuse  # type: ignore[method-assign,assignment]
        return {}

    def faults(self) -> dict[str, Any]:
        return {"faults": fake().take_faults() if self.gpu else []}

    def close(self) -> dict[str, Any]:
        self.cache.linker.close()
        return {}

    def _attend(self) -> None:
        for layer in range(LAYERS):
            held = self.pool.get_key_buffer(layer)
            if self.gpu:  # the double notes it if that is in no order with the copies
                nbytes = held.numel() * held.element_size()
                self.device.copy(self.read.data_ptr(), held.data_ptr(), nbytes, self.computing.handle)

    def _loads(self) -> int | None:
        gpu = self.linker._pages.source.gpu
        return None if gpu is None else int(gpu._loads.copies._stream.handle)

    def _buffers(self) -> list[Any]:
        latent = isinstance(self.pool, MLATokenToKVPool)
        held = self.pool.kv_buffer if latent else [*self.pool.k_buffer, *self.pool.v_buffer]
        return [getattr(one, "tensor", one) for one in held]

    @staticmethod
    def _request(name: str, tokens: list[int], salt: str, session: str | None = None) -> Req:
        return Req(
            rid=name,
            origin_input_text="",
            origin_input_ids=array("q", tokens),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
            session_id=session,
            cache_salt=salt or None,
        )

    @staticmethod
    def _tokens(start: int, pages: int) -> list[int]:
        return list(range(start, start + pages * PAGE))

    @staticmethod
    def _values(kind: int, tokens: list[int], like: Any) -> Any:
        values = (torch.tensor(tokens) * 7 + kind * 3) % 127 + 1
        spread = torch.arange(like[0].numel()).reshape(like[0].shape)
        return (values.reshape(-1, *[1] * spread.ndim) + spread).to(like.dtype)


if __name__ == "__main__":
    serve(Engine)
