"""A subscriber to KV events that is not ours: vLLM's structs, and the index that its example keeps."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import zmq

from pdlink.observe.kv_publisher import END

WAIT_MS = 60_000

# As in vllm/distributed/kv_events.py of vLLM 0.32.


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(EventBatch).decode


class Subscriber:
    """An index as vLLM's example keeps it: a gap in the sequence is asked for."""

    def __init__(self, address: str, topic: str = "") -> None:
        endpoint, _, replay = address.partition(",")
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.subscribe(topic.encode())
        self.sub.rcvtimeo = WAIT_MS
        self.sub.connect(endpoint)
        self.replay = self.context.socket(zmq.DEALER)
        self.replay.rcvtimeo = WAIT_MS
        if replay:
            self.replay.connect(replay)
        self.last = 0
        self.known: set[tuple[str | None, bytes | int]] = set()
        self.replays = 0
        self.told: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        """Since everything was cleared."""
        self.batches: list[list[Any]] = []
        """All that it heard, with the keys that vLLM does not have."""

    def hear(self) -> EventBatch:
        """The next batch, after those before it that were missed."""
        _, sequence, batch = self.sub.recv_multipart()
        number = int.from_bytes(sequence, "big")
        if number > self.last + 1:
            self.ask()
        if number > self.last:
            self.apply(number, batch)
        return decode(batch)

    def ask(self) -> None:
        self.replays += 1
        self.replay.send_multipart([b"", (self.last + 1).to_bytes(8, "big")])
        while True:
            _, _, sequence, batch = self.replay.recv_multipart()
            if sequence == END:
                return
            self.apply(int.from_bytes(sequence, "big"), batch)

    def apply(self, number: int, batch: bytes) -> None:
        self.batches.append(msgspec.msgpack.decode(batch)[1])
        for event in decode(batch).events:
            if isinstance(event, AllBlocksCleared):
                self.known.clear()
                self.told.clear()
                continue
            self.told.append(event)
            if isinstance(event, BlockStored):
                self.known |= {(event.medium, block) for block in event.block_hashes}
            else:
                self.known -= {(event.medium, block) for block in event.block_hashes}
        self.last = number

    def hears(self, known: set[tuple[str | None, bytes | int]]) -> bool:
        deadline_s = time.monotonic() + WAIT_MS / 1000
        while self.known != known and time.monotonic() < deadline_s:
            if self.sub.poll(100):
                self.hear()
            elif self.replay.get(zmq.LAST_ENDPOINT):
                self.ask()
        return self.known == known

    def close(self) -> None:
        self.context.destroy(linger=0)
