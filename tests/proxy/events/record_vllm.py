"""Frames of vLLM's own KV events, made by its own code: block hashes, KV cache manager, encoder and publisher.

`.venv-vllm/bin/python -m tests.proxy.events.record_vllm > tests/proxy/events/vllm.json` writes what
`test_engine_events.py` reads where there is no vLLM. There is no model: the cache manager is told what a scheduler
would tell it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from unittest import mock

import torch
import vllm
from vllm import SamplingParams
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

from .frames import OTHER, PROMPT, frames

_HASH = get_hash_fn_by_name("sha256")


class _Cache:
    """A worker's KV cache of a few blocks, and what it says."""

    def __init__(self, block_tokens: int, num_blocks: int, *, window: int = 0) -> None:
        """window: of a second group of layers that attend to so many tokens; 0 for a model without."""
        sizes: dict[str, Any] = {
            "block_size": block_tokens,
            "num_kv_heads": 1,
            "head_size": 8,
            "dtype": torch.float32,
        }
        groups = [KVCacheGroupSpec(["0"], FullAttentionSpec(**sizes))]
        if window:
            groups.append(KVCacheGroupSpec(["1"], SlidingWindowSpec(**sizes, sliding_window=window)))
        self._tokens = block_tokens
        self._manager = KVCacheManager(
            KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=512,
            scheduler_block_size=block_tokens,
            hash_block_size=block_tokens,
            enable_kv_cache_events=True,
        )

    def serves(self, name: str, prompt: list[int], **more: Any) -> None:
        """A request comes, its prompt is computed, and it ends."""
        hasher = kv_cache_utils.get_request_block_hasher(self._tokens, _HASH)
        asked = Request(name, prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher, **more)
        blocks, num_computed, *_ = self._manager.get_computed_blocks(asked)
        took = self._manager.allocate_slots(asked, len(prompt) - num_computed, num_computed, blocks)
        assert took is not None, "the cache is too small"
        asked.num_computed_tokens = len(prompt)
        self._manager.free(asked)

    def clear(self) -> None:
        assert self._manager.reset_prefix_cache()

    def said(self) -> KVEventBatch:
        return KVEventBatch(ts=1.5, events=self._manager.take_events())


def batches() -> dict[str, list[KVEventBatch]]:
    """By what happens, what is published of it."""
    kv_cache_utils.init_none_hash(_HASH)
    found: dict[str, list[KVEventBatch]] = {}
    worker = _Cache(16, 10)
    worker.serves("first", PROMPT[:48])
    first = worker.said()
    worker.serves("longer", PROMPT)  # a block behind those
    found["a chain of parents"] = [first, worker.said()]
    worker.serves("other", OTHER[:124])  # takes the room of some
    found["blocks pushed out"] = [*found["a chain of parents"], worker.said()]
    worker.clear()
    found["all cleared"] = [*found["blocks pushed out"], worker.said()]
    worker.serves("again", PROMPT[:32])
    found["filled again"] = [*found["all cleared"], worker.said()]
    large = _Cache(32, 10)
    large.serves("first", PROMPT)
    found["blocks of 32"] = [large.said()]
    named = _Cache(16, 40)
    named.serves("salted", PROMPT[:32], cache_salt="tenant")
    named.serves("adapted", PROMPT[:32], lora_request=LoRARequest("adapter", 1, "/nowhere"))
    found["a salt and a LoRA"] = [named.said()]
    with mock.patch.dict(os.environ, VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES="0"):
        whole = _Cache(16, 10)
        whole.serves("first", PROMPT[:32])
        found["names of 32 bytes"] = [whole.said()]
    hybrid = _Cache(16, 40, window=32)
    hybrid.serves("first", PROMPT)
    found["a sliding window beside"] = [hybrid.said()]
    return found


def recorded() -> dict[str, Any]:
    def publisher(where: str, replay: str) -> Any:
        return ZmqEventPublisher(0, endpoint=where, replay_endpoint=replay, topic="kv")

    return {
        "vllm": vllm.__version__,
        "frames": {what: frames(publisher, found) for what, found in batches().items()},
    }


if __name__ == "__main__":
    json.dump(recorded(), sys.stdout, indent=1)
    sys.stdout.write("\n")
