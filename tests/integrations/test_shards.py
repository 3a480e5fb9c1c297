"""Servers with different numbers of ranks: the smaller one's ranks are several shards."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from pdlink.integrations.vllm_parts.layout import CacheGroups, CacheLayout, UnsupportedCache
from pdlink.integrations.vllm_parts.requests import RequestBook, Scheduled
from pdlink.integrations.vllm_parts.shards import RankPlace, by_stage, dealt, shards_of
from pdlink.integrations.vllm_parts.worker import WorkerHalf
from pdlink.kv.layout import KVLayout, paged_layout
from pdlink.memory.buffers import Buffer
from tests.endpoint.conftest import TIMEOUTS, Node
from tests.integrations.vllm_engine import NO_ADAPTERS
from tests.loopback import LoopbackHub
from tests.waiting import WAIT_S

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
    cache = CacheLayout(whole, {name: (index,) for index, name in enumerate(NAMES)})
    source = Buffer(whole.extent(0))
    source.array[:] = np.random.default_rng(3).integers(0, 256, source.nbytes, np.uint8)
    nodes = [ShardNode(hub, shard, cache.shard(shard, shards).layout, source).open() for shard in range(shards)]
    peers = [Node(hub, f"decode/{shard}", sized(each, 8), TIMEOUTS).open() for shard in range(shards)]
    controls = tuple(node.node.address for node in nodes)
    news = threading.Event()
    parts = [CacheGroups.of([cache.shard(shard, shards)], whole.num_blocks) for shard in range(shards)]
    mine = [(shard, node.node, part) for shard, (node, part) in enumerate(zip(nodes, parts, strict=True))]
    ranks = WorkerHalf(
        mine, CacheGroups.of([cache], whole.num_blocks), preemption_s=5.0, news=news, adapters=NO_ADAPTERS
    )
    book = RequestBook(sends=True, receives=False, shares_prefixes=False)
    theirs = RequestBook(sends=False, receives=True, shares_prefixes=False)
    book.arrived("p", {"transfer_id": "a", "leg": "prefill"}, PROMPT)
    theirs.arrived("d", {"transfer_id": "a", "leg": "decode", "prefill": {"control": controls}}, PROMPT)
    theirs.allocated("d", ((5, 2, 9, 7),), 29)
    plan = theirs.step([])
    receivers = [half_of(peer, shard, cache.planes, news) for shard, peer in enumerate(peers)]
    try:
        for receiver in receivers:
            receiver.begin(plan)
        ranks.begin(book.step([Scheduled("p", (tuple(SRC),), True, 0, 30)]))
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


def half_of(node: Node, shard: int, planes: dict[str, tuple[int, ...]], news: threading.Event) -> WorkerHalf:
    cache = CacheGroups.of([CacheLayout(node.layout, planes)], node.layout.num_blocks)
    return WorkerHalf([(shard, node.node, cache)], cache, preemption_s=5.0, news=news, adapters=NO_ADAPTERS)


def vector(node: Node, blocks: list[int], layer: int, token: int) -> list[bytes]:
    """The head vectors of one token, K then V."""
    kv = node.layout
    place = kv.layers[layer]
    at = blocks[token // kv.block_tokens] * place.block_stride + token % kv.block_tokens * place.token_stride
    starts = [
        part.offset + at + head * place.head_stride for part in place.parts for head in range(kv.num_heads)
    ]  # fmt: skip
    return [node.buffer.array[start : start + kv.head_nbytes].tobytes() for start in starts]


STAGES = [["model.0"], ["model.1", "model.2"]]


@pytest.mark.parametrize("one_prefills", [True, False])
def test_a_rank_with_all_layers_and_two_stages_serve_each_other(one_prefills: bool) -> None:
    """Stage 0 has layer 0, stage 1 the others; the server in one stage has a node for the layers of each."""
    hub = LoopbackHub()

    def sized(num_layers: int) -> KVLayout:
        sizes = {"num_blocks": 32, "block_tokens": 4, "num_heads": 2, "head_dim": 4}
        return paged_layout(dtype="float32", itemsize=4, num_layers=num_layers, order="LBPHT", **sizes)

    cache = CacheLayout(sized(3), {name: (index,) for index, name in enumerate(NAMES)})
    parts = [cache.of_layers(frozenset(names)) for names in STAGES]
    memory = Buffer(cache.layout.extent(0))
    memory.array[:] = np.random.default_rng(3).integers(0, 256, memory.nbytes, np.uint8)
    whole = [ShardNode(hub, stage, part.layout, memory).open() for stage, part in enumerate(parts)]
    staged = [Node(hub, f"staged/{stage}", sized(len(names)), TIMEOUTS).open() for stage, names in enumerate(STAGES)]
    news = threading.Event()
    groups = [CacheGroups.of([part], 32) for part in parts]
    mine = [(stage, node.node, part) for stage, (node, part) in enumerate(zip(whole, groups, strict=True))]
    one = WorkerHalf(mine, CacheGroups.of([cache], 32), preemption_s=5.0, news=news, adapters=NO_ADAPTERS)
    stages = [
        half_of(node, stage, {name: (index,) for index, name in enumerate(names)}, news)
        for stage, (node, names) in enumerate(zip(staged, STAGES, strict=True))
    ]
    senders, sending = ([one], whole) if one_prefills else (stages, staged)
    receivers, receiving = (stages, staged) if one_prefills else ([one], whole)
    controls = tuple(node.node.address for node in sending)
    book = RequestBook(sends=True, receives=False, shares_prefixes=False)
    theirs = RequestBook(sends=False, receives=True, shares_prefixes=False)
    book.arrived("p", {"transfer_id": "a", "leg": "prefill"}, PROMPT)
    theirs.arrived("d", {"transfer_id": "a", "leg": "decode", "prefill": {"control": controls}}, PROMPT)
    dst = [5, 2, 9, 7, 11, 1, 0, 30]
    theirs.allocated("d", (dst,), 29)
    plan = theirs.step([])
    try:
        for receiver in receivers:
            receiver.begin(plan)
        prefills = book.step([Scheduled("p", (tuple(SRC),), True, 0, 30)])
        for index, sender in enumerate(senders):
            sender.begin(prefills)
            for name in NAMES if one_prefills else STAGES[index]:
                sender.layer_saved(name)
            sender.end()
        received: set[int] = set()
        sent: set[int] = set()
        deadline_s = time.monotonic() + WAIT_S
        over = {"p"}
        while len(received) < len(receivers) or len(sent) < len(senders):
            assert time.monotonic() < deadline_s
            received |= {index for index, each in enumerate(receivers) if each.results(()).received}
            sent |= {index for index, each in enumerate(senders) if each.results(over).sent}
            over = set()
        for stage, names in enumerate(STAGES):
            for layer in range(len(names)):
                for token in range(29):
                    got = vector(receiving[stage], dst, layer, token)
                    assert got == vector(sending[stage], SRC, layer, token), (stage, layer, token)
    finally:
        for each in (*staged, *whole):
            each.close()
        memory.close()


def test_shards_are_counted_alike_by_servers_of_other_ranks_and_stages() -> None:
    every = range(8)
    for stages, ranks in ((1, 1), (1, 2), (2, 1), (2, 4), (1, 4)):
        places = [RankPlace(stage, stages, rank, ranks) for stage in range(stages) for rank in range(ranks)]
        held = [shard for place in places for shard in shards_of(place, 2, 4)]
        assert sorted(shard.number for shard in held) == list(every)
        assert all(shard.stage == shard.number // 4 for shard in held)
    assert [shard.number for shard in shards_of(RankPlace(0, 1, 1, 2), 2, 4)] == [2, 3, 6, 7]
    assert shards_of(RankPlace(1, 2, 1, 2, 0, 3), 2, 2) == shards_of(RankPlace(1, 2, 1, 2), 2, 2), (
        "of those with the same KV"
    )
    assert shards_of(RankPlace(1, 2, 1, 2, 2, 3), 2, 2) == [], "one sends"


def test_layers_of_another_ranks_stage_are_refused() -> None:
    def stage_of(name: str, num_stages: int) -> int:
        return int(name.split(".")[1]) * num_stages // 4

    names = ["model.0", "model.1"]
    assert by_stage(names, [0, 1], 4, stage_of) == {0: ["model.0"], 1: ["model.1"]}
    with pytest.raises(UnsupportedCache, match="stages: got 4, of which 2 has layer"):
        by_stage([*names, "model.2"], [0, 1], 4, stage_of)
    with pytest.raises(UnsupportedCache, match="no layer"):
        by_stage(["model.0"], [0, 1], 4, stage_of)


@pytest.mark.parametrize(("rank", "num_ranks", "num_shards"), [(0, 4, 2), (1, 2, 3), (0, 3, 4)])
def test_shards_that_cannot_be_dealt_out_are_refused(rank: int, num_ranks: int, num_shards: int) -> None:
    with pytest.raises(UnsupportedCache, match="dealt out"):
        dealt(rank, num_ranks, num_shards)


def test_every_shard_has_one_rank() -> None:
    for num_ranks, num_shards in ((1, 1), (2, 2), (2, 8), (3, 6)):
        found = [shard for rank in range(num_ranks) for shard in dealt(rank, num_ranks, num_shards)]
        assert found == list(range(num_shards))
