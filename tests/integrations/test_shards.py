"""Servers with different numbers of ranks: the smaller one's ranks are several shards."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from pdlink.integrations.vllm_parts.layout import CacheGroups, CacheLayout, UnsupportedCache, of_rank
from pdlink.integrations.vllm_parts.requests import RequestBook, Scheduled
from pdlink.integrations.vllm_parts.worker import WorkerHalf
from pdlink.kv.layout import KVLayout, paged_layout
from pdlink.memory.buffers import Buffer
from tests.endpoint.conftest import TIMEOUTS, WAIT_S, Node
from tests.loopback import LoopbackHub

PROMPT = list(range(30))
NAMES = ("model.0", "model.1", "model.2")
SRC = [7, 3, 9, 1, 12, 0, 20, 4]


class ShardNode(Node):
    """A node with the bytes of one memory for all."""

    def __init__(self, hub: LoopbackHub, shard: int, kv: KVLayout, memory: Buffer) -> None:
        super().__init__(hub, f"prefill/{shard}", kv, TIMEOUTS)
        self.buffer.array[:] = memory.array[: self.buffer.nbytes]


@pytest.mark.parametrize(("num_heads", "shards"), [(4, 2), (4, 4), (6, 3), (1, 2)])
def test_a_rank_with_several_shards_feeds_as_many_ranks(num_heads: int, shards: int) -> None:
    """One prefill rank with all heads; a decode rank for every shard, with its heads (or a copy of the only one)."""
    hub = LoopbackHub()
    each = max(1, num_heads // shards)

    def sized(heads: int, block_tokens: int) -> KVLayout:
        return paged_layout(
            dtype="float32",
            itemsize=4,
            num_layers=3,
            num_blocks=32,
            block_tokens=block_tokens,
            num_heads=heads,
            head_dim=4,
            order="LBPHT",
        )

    whole = sized(num_heads, 4)
    cache = CacheLayout(whole, {name: (index,) for index, name in enumerate(NAMES)}, 1)
    source = Buffer(whole.extent(0))
    source.array[:] = np.random.default_rng(3).integers(0, 256, source.nbytes, np.uint8)
    nodes = [ShardNode(hub, shard, cache.shard(shard, shards).layout, source).open() for shard in range(shards)]
    peers = [Node(hub, f"decode/{shard}", sized(each, 8), TIMEOUTS).open() for shard in range(shards)]
    controls = tuple(node.node.address for node in nodes)
    news = threading.Event()
    ranks = WorkerHalf(
        [node.node for node in nodes],
        CacheGroups.of([cache.shard(0, shards)], whole.num_blocks),
        preemption_s=5.0,
        news=news,
    )
    book = RequestBook(sends=True, receives=False, shares_prefixes=False)
    theirs = RequestBook(sends=False, receives=True, shares_prefixes=False)
    book.arrived("p", {"transfer_id": "a", "leg": "prefill"}, PROMPT)
    theirs.arrived("d", {"transfer_id": "a", "leg": "decode", "prefill": {"control": controls}}, PROMPT)
    theirs.allocated("d", [5, 2, 9, 7], 29)
    plan = theirs.step([])
    receivers = [
        WorkerHalf(
            [peer.node],
            CacheGroups.of([CacheLayout(peer.layout, cache.planes, 1)], peer.layout.num_blocks),
            first_shard=shard,
            preemption_s=5.0,
            news=news,
        )
        for shard, peer in enumerate(peers)
    ]
    try:
        for receiver in receivers:
            receiver.begin(plan)
        ranks.begin(book.step([Scheduled("p", tuple(SRC), True, 0, 30)]))
        for name in NAMES:
            ranks.layer_saved(name)
        ranks.end()
        waiting, sent = set(range(shards)), False
        deadline_s = time.monotonic() + WAIT_S
        over = {"p"}
        while waiting or not sent:
            assert time.monotonic() < deadline_s
            waiting -= {shard for shard in waiting if receivers[shard].results(()).received}
            results, over = ranks.results(over), set()
            sent = sent or results.sent == {"p"}
        for shard, (node, peer) in enumerate(zip(nodes, peers, strict=True)):
            for layer in range(3):
                for token in range(29):
                    got = vector(peer, [5, 2, 9, 7], layer, token)
                    assert np.array_equal(got, vector(node, SRC, layer, token)), (shard, layer, token)
    finally:
        for one in (*peers, *nodes):
            one.close()
        source.close()


def vector(node: Node, blocks: list[int], layer: int, token: int) -> list[bytes]:
    """The head vectors of one token, K then V."""
    kv = node.layout
    place = kv.layers[layer]
    at = blocks[token // kv.block_tokens] * place.block_stride + token % kv.block_tokens * place.token_stride
    starts = [
        part.offset + at + head * place.head_stride for part in place.parts for head in range(kv.num_heads)
    ]  # fmt: skip
    return [node.buffer.array[start : start + kv.head_nbytes].tobytes() for start in starts]


@pytest.mark.parametrize(("rank", "num_ranks", "num_shards"), [(0, 4, 2), (1, 2, 3), (0, 3, 4)])
def test_shards_that_cannot_be_dealt_out_are_refused(rank: int, num_ranks: int, num_shards: int) -> None:
    with pytest.raises(UnsupportedCache, match="dealt out"):
        of_rank(rank, num_ranks, num_shards)


def test_every_shard_has_one_rank() -> None:
    for num_ranks, num_shards in ((1, 1), (2, 2), (2, 8), (3, 6)):
        dealt = [shard for rank in range(num_ranks) for shard in of_rank(rank, num_ranks, num_shards)]
        assert dealt == list(range(num_shards))
