"""Other stores of KV as lanes of `pdlink bench tiers`, each in a process of its own, where their wheels are.

Each is used through the calls that its own engine side makes; what can be prepared is prepared before it is timed.
Versions that these lines were written for: lmcache 0.5.6, aibrix-kvcache 0.8.0, vllm 0.32.0, sglang 0.5.23. None of
them has a checksum of what it reads.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.machinery
import importlib.util
import logging
import os
import select
import sys
import threading
import types
from pathlib import Path
from typing import Any

from .tier_lanes import CHUNK_TOKENS, TierLane

GIB = 1 << 30
_TOUCHES = 5
"""Turns, not timed, after which a pool of four turns' memory has been touched."""


def importable(path: str, module: str) -> None:
    """Look for packages in these folders, too. Raises ImportError, without importing, if the module is not there."""
    sys.path += [folder for folder in path.split(os.pathsep) if folder]
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise ImportError(f"{module} is not installed")
    logging.disable(logging.WARNING)


class LMCache(TierLane):
    """Its two backends in one process, as its storage manager calls them: memory, and files opened with O_DIRECT."""

    def __init__(self, path: str, directory: str, *, on_disk: bool) -> None:
        importable(path, "lmcache")
        self._directory, self._on_disk = directory, on_disk
        self._round = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def begin(self, nbytes: int, count: int) -> None:
        super().begin(nbytes, count)
        import torch

        config_of: Any = importlib.import_module("lmcache.v1.config").LMCacheEngineConfig
        metadata_of: Any = importlib.import_module("lmcache.v1.metadata").LMCacheMetadata
        backends = "lmcache.v1.storage_backend"
        self._torch = torch
        self._key: Any = importlib.import_module("lmcache.utils").CacheEngineKey
        self._format: Any = importlib.import_module("lmcache.v1.memory_management").MemoryFormat.KV_2LTD
        self._shape = torch.Size((2, 1, CHUNK_TOKENS, nbytes // 4 // CHUNK_TOKENS))
        config = config_of.from_defaults(
            chunk_size=CHUNK_TOKENS,
            local_cpu=not self._on_disk,
            max_local_cpu_size=max(1.0, 4 * count * nbytes / GIB),
            local_disk=f"file://{self._directory}/",
            max_local_disk_size=2.0,
            extra_config={"use_odirect": True},
        )
        head = nbytes // 4 // CHUNK_TOKENS
        metadata = metadata_of("bench", 1, 1, 0, 0, torch.bfloat16, (1, 2, CHUNK_TOKENS, 1, head))
        self._memory: Any = importlib.import_module(f"{backends}.local_cpu_backend").LocalCPUBackend(
            config, metadata, "cpu"
        )
        self._backend = self._memory
        if self._on_disk:
            disk: Any = importlib.import_module(f"{backends}.local_disk_backend").LocalDiskBackend
            self._backend = disk(config, self._loop, self._memory, "cpu", metadata=metadata)
        self._old: list[Any] = []
        for _ in range(_TOUCHES):
            self.put()

    def put(self) -> None:
        torch = self._torch
        for key in self._old:
            self._backend.remove(key)
        self._round += 1
        self._old = [
            self._key("bench", 1, 0, self._round * 1_000_000 + number, torch.bfloat16) for number in range(self.count)
        ]
        done = threading.Semaphore(0)
        for key, record in zip(self._old, self._views(0), strict=True):
            kept = self._memory.allocate(self._shape, torch.bfloat16, self._format)
            kept.tensor.view(torch.uint8).view(-1).copy_(torch.frombuffer(record, dtype=torch.uint8))
            self._backend.submit_put_task(key, kept, on_complete_callback=lambda _: done.release())
            kept.ref_count_down()
        for _ in self._old:
            if not done.acquire(timeout=60):
                raise OSError("LMCache did not finish a put")

    def get(self) -> None:
        torch = self._torch
        for key, room in zip(self._old, self._views(1), strict=True):
            kept = self._backend.get_blocking(key)
            if kept is None:
                raise OSError("LMCache did not find a record")
            torch.frombuffer(room, dtype=torch.uint8).copy_(kept.tensor.view(torch.uint8).view(-1))
            kept.ref_count_down()


class LMCacheNativeFiles(TierLane):
    """Its file system adapter in C++, O_DIRECT, with its default number of threads."""

    _NUM_THREADS = 4

    def __init__(self, path: str, directory: str) -> None:
        importable(path, "lmcache")
        client: Any = importlib.import_module("lmcache.lmcache_fs").LMCacheFSClient
        self._client = client(directory, self._NUM_THREADS, use_odirect=True)
        self._round = 0
        self._keys: list[str] = []

    def put(self) -> None:
        if self._keys:
            self._wait(self._client.submit_batch_delete(self._keys))
        self._round += 1
        self._keys = [f"bench@1@0@{self._round:x}{number:08x}" for number in range(self.count)]
        self._wait(self._client.submit_batch_set(self._keys, self._views(0)))

    def get(self) -> None:
        self._wait(self._client.submit_batch_get(self._keys, self._views(1)))

    def close(self) -> None:
        self._client.close()

    def _wait(self, future: int) -> None:
        while True:
            select.select([self._client.event_fd()], [], [])
            for number, succeeded, error, *_ in self._client.drain_completions():
                if number == future:
                    if not succeeded:
                        raise OSError(f"LMCache's file adapter failed: {error}")
                    return


class AibrixMemory(TierLane):
    """AIBrix' first level by its own calls: put copies into blocks; acquire, then a copy out of them."""

    def __init__(self, path: str, directory: str) -> None:
        del directory
        importable(path, "aibrix_kvcache")
        self._round = 0

    def begin(self, nbytes: int, count: int) -> None:
        super().begin(nbytes, count)
        import torch

        spec: Any = importlib.import_module("aibrix_kvcache.spec")
        memory: Any = importlib.import_module("aibrix_kvcache.memory")
        self._view: Any = importlib.import_module("aibrix_kvcache.cache_hashable").TokenListView
        tensors = spec.KVCacheTensorSpec(heads=[0], layers=[0], head_size=nbytes // 4 // CHUNK_TOKENS)
        layout = spec.KVCacheBlockLayout.LCND
        block = spec.KVCacheBlockSpec(CHUNK_TOKENS, torch.bfloat16, layout, tensors)
        room_nbytes = 4 * count * (nbytes + 4096)
        self._torch, self._shape = torch, block.block_shape
        self._cache: Any = importlib.import_module("aibrix_kvcache.l1.l1_cache").L1Cache(
            "S3FIFO", room_nbytes, memory.TensorPoolAllocator.create(capacity_nbytes=room_nbytes), block
        )
        for _ in range(_TOUCHES):
            self.put()

    def put(self) -> None:
        self._round += 1
        begin = self._round * self.count * CHUNK_TOKENS
        self._tokens = self._view(tuple(range(begin, begin + self.count * CHUNK_TOKENS)))
        kept = self._cache.put(None, self._tokens, self._tensors(0))
        if not kept.is_ok() or kept.get() != self.count:
            raise OSError("AIBrix did not keep all records")

    def get(self) -> None:
        found = self._cache.acquire(None, self._tokens)
        if not found.is_ok() or len(found.get()) != self.count:
            raise OSError("AIBrix did not find all records")
        for room, block in zip(self._tensors(1), found.get(), strict=True):
            room.copy_(block.to_tensor(self._torch.bfloat16, self._shape))
            block.ref_down()

    def _tensors(self, half: int) -> list[Any]:
        torch = self._torch
        records = [torch.frombuffer(record, dtype=torch.bfloat16) for record in self._views(half)]
        return [record.view(self._shape) for record in records]


class AibrixFiles(TierLane):
    """AIBrix' shared file system connector: a file for each block, through the page cache."""

    def __init__(self, path: str, directory: str) -> None:
        importable(path, "aibrix_kvcache")
        shfs: Any = importlib.import_module("aibrix_kvcache.l2.connectors.shfs").SHFSConnector
        self._region: Any = importlib.import_module("aibrix_kvcache.memory").ExternalMemoryRegion
        self._files = shfs(directory, None)
        self._round = 0
        self._keys: list[bytes] = []

    def put(self) -> None:
        for old in self._keys:
            self._files._delete(old)
        self._round += 1
        self._keys = [b"%016d%016d" % (number, self._round) for number in range(self.count)]
        self._move(self._files._put, 0)

    def get(self) -> None:
        self._move(self._files._get, 1)

    def _move(self, move: Any, half: int) -> None:
        import torch

        for key, record in zip(self._keys, self._views(half), strict=True):
            if not move(key, self._region(torch.frombuffer(record, dtype=torch.uint8), 0, self.nbytes)).is_ok():
                raise OSError("AIBrix' files lack a record")


class VllmFiles(TierLane):
    """vLLM's file tier: a file for each block, O_DIRECT, one thread."""

    def __init__(self, path: str, directory: str) -> None:
        importable(path, "vllm")
        folder = Path(str(importlib.util.find_spec("vllm").submodule_search_locations[0]))  # type: ignore[union-attr,index]
        spec = importlib.util.spec_from_file_location("vllm_fs_io", folder / "v1/kv_offload/tiering/fs/io.py")
        assert spec is not None
        assert spec.loader is not None
        self._io: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._io)
        self._directory, self._round = Path(directory), 0
        self._paths: list[str] = []

    def put(self) -> None:
        for old in self._paths:
            Path(old).unlink()
        self._round += 1
        self._paths = [str(self._directory / f"{self._round}-{number}") for number in range(self.count)]
        for path, record in zip(self._paths, self._views(0), strict=True):
            self._io._store_block(path, record, 0, self.nbytes)

    def get(self) -> None:
        for path, room in zip(self._paths, self._views(1), strict=True):
            self._io._load_block(path, room, 0, self.nbytes)


class HiCacheFiles(TierLane):
    """SGLang's file backend of HiCache: buffered files."""

    def __init__(self, path: str, directory: str) -> None:
        importable(path, "sglang")
        for name in ("torchvision", "torchvision.io", "torchvision.transforms"):  # imported, and not needed for files
            stub: Any = types.ModuleType(name)
            stub.__spec__, stub.__path__ = importlib.machinery.ModuleSpec(name, None), []
            stub.decode_jpeg = stub.InterpolationMode = None
            sys.modules.setdefault(name, stub)
        storage: Any = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
        config = storage.HiCacheStorageConfig(0, 1, 0, 1, 1, 1, False, False, False, "bench")
        self._files = storage.HiCacheFile(config, directory)
        self._directory, self._round = Path(directory), 0
        self._keys: list[str] = []

    def put(self) -> None:
        import torch

        for old in self._directory.glob("*.bin"):
            old.unlink()
        self._round += 1
        self._keys = [f"{self._round}-{number}" for number in range(self.count)]
        for key, record in zip(self._keys, self._views(0), strict=True):
            if not self._files.set(key, torch.frombuffer(record, dtype=torch.uint8)):
                raise OSError("HiCacheFile did not keep a record")

    def get(self) -> None:
        import torch

        for key, room in zip(self._keys, self._views(1), strict=True):
            if self._files.get(key, torch.frombuffer(room, dtype=torch.uint8)) is None:
                raise OSError("HiCacheFile did not find a record")


MEMORY: dict[str, tuple[Any, dict[str, bool]]] = {
    "LMCache LocalCPU": (LMCache, {"on_disk": False}),
    "AIBrix L1": (AibrixMemory, {}),
}
DISK: dict[str, tuple[Any, dict[str, bool]]] = {
    "LMCache LocalDisk": (LMCache, {"on_disk": True}),
    "LMCache fs_native": (LMCacheNativeFiles, {}),
    "AIBrix SHFS": (AibrixFiles, {}),
    "vLLM fs": (VllmFiles, {}),
    "SGLang HiCacheFile": (HiCacheFiles, {}),
}
"""Classes, and what they are made with beside path and directory."""


def make(name: str, path: str, directory: str) -> TierLane:
    """One of them, for `Remote`."""
    kind, more = {**MEMORY, **DISK}[name]
    Path(directory).mkdir(parents=True, exist_ok=True)
    lane: TierLane = kind(path, directory, **more)
    return lane
