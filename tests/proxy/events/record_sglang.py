"""Frames of SGLang's own KV events, made by its own recorder, encoder and publisher.

`python -m tests.proxy.events.record_sglang > tests/proxy/events/sglang.json`, where SGLang can be imported. Its radix
cache calls the recorder with its nodes; here they are stand-ins with the fields that the recorder reads.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from typing import Any

import sglang
from sglang.srt.disaggregation.kv_events import KVEventBatch, StorageMedium, ZmqEventPublisher
from sglang.srt.mem_cache.events import KVCacheEventRecorder

from .frames import OTHER, PROMPT, frames


@dataclass
class _Key:
    token_ids: list[int]
    extra_key: str | None = None
    cache_salt: str | None = None
    is_bigram: bool = False

    def __len__(self) -> int:
        return len(self.token_ids) - self.is_bigram


@dataclass
class _Node:
    key: _Key
    parent: Any = None

    def __post_init__(self) -> None:
        before = self.parent.hash_value[-1] if self.parent is not None and self.parent.hash_value else ""
        self.hash_value: list[str] = []
        for at in range(0, len(self.key), 16):
            said = f"{before} {self.key.cache_salt} {self.key.token_ids[at : at + 16]}"
            before = hashlib.sha256(said.encode()).hexdigest()
            self.hash_value.append(before)
        self.event_hash_value = self.hash_value


def batches() -> dict[str, list[Any]]:
    """By what happens, what is published of it."""
    recorder = KVCacheEventRecorder(enabled=True, page_size=16)
    root = _Node(_Key([]))

    def said() -> Any:
        return KVEventBatch(ts=1.5, events=recorder.take())

    found: dict[str, list[Any]] = {}
    first = _Node(_Key(PROMPT[:48]), root)
    longer, other = _Node(_Key(PROMPT[48:]), first), _Node(_Key(OTHER[:32]), root)
    recorder.record_store(first)
    batch = said()
    recorder.record_store(longer)
    found["a chain of parents"] = [batch, said()]
    recorder.record_store(first, StorageMedium.CPU)
    recorder.record_store(other, StorageMedium.DISK)
    recorder.record_remove(longer)
    recorder.record_remove(first)
    found["moved to the host's memory"] = [*found["a chain of parents"], said()]
    recorder.record_remove(first, StorageMedium.CPU)
    found["blocks pushed out"] = [*found["moved to the host's memory"], said()]
    recorder.record_all_cleared()
    found["all cleared"] = [*found["blocks pushed out"], said()]
    recorder.record_store(_Node(_Key(PROMPT[:32], cache_salt="tenant"), root))
    found["a salt"] = [said()]
    recorder.record_store(_Node(_Key(PROMPT[:33], is_bigram=True), root))
    found["pairs of tokens"] = [said()]
    return found


def recorded() -> dict[str, Any]:
    def publisher(where: str, replay: str) -> Any:
        return ZmqEventPublisher(0, endpoint=where, replay_endpoint=replay, topic="kv", bind=True)

    return {
        "sglang": sglang.__version__,
        "frames": {what: frames(publisher, found) for what, found in batches().items()},
    }


if __name__ == "__main__":
    json.dump(recorded(), sys.stdout, indent=1)
    sys.stdout.write("\n")
