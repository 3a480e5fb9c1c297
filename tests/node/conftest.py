"""Two nodes in this process, over the transport that does as it is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import pdlink
from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import paged_layout
from pdlink.memory.blocks import BlockPool
from pdlink.protocol.deadlines import Deadlines
from tests.loopback import LoopbackHub, LoopbackTransport

LAYERS, TOKENS = 3, 21
SRC, DST = [5, 1, 9, 2, 30, 7], [11, 3, 20]
TIMEOUTS = Deadlines(heartbeat_s=0.05, peer_s=5.0, connect_s=6.0, lease_s=7.0, request_s=60.0)


def groups(block_tokens: int) -> KVGroups:
    layout = paged_layout(
        dtype="float32",
        itemsize=4,
        num_layers=LAYERS,
        num_blocks=32,
        block_tokens=block_tokens,
        num_heads=2,
        head_dim=4,
    )
    return KVGroups((layout,))


def rows(node: pdlink.Node, blocks: list[int], layer: int, part: int) -> Any:
    """The KV of the prompt, as [token, bytes]."""
    return node.pages(layer, part)[blocks].reshape(len(blocks) * node.groups.layouts[0].block_tokens, -1)[:TOKENS]


def fill(node: pdlink.Node) -> None:
    """KV that differs from byte to byte."""
    random = np.random.default_rng(7)
    for layer in range(LAYERS):
        for part in range(2):
            pages = node.pages(layer, part)
            pages[:] = random.integers(0, 256, pages.shape, np.uint8)


def assert_same(prefill: pdlink.Node, decode: pdlink.Node, layers: range = range(LAYERS)) -> None:
    for layer in layers:
        for part in range(2):
            assert np.array_equal(rows(decode, DST, layer, part), rows(prefill, SRC, layer, part)), (layer, part)


def compute(outgoing: pdlink.Outgoing, layers: range = range(LAYERS)) -> None:
    for layer in layers:
        outgoing.layer_ready(layer)
    if layers.stop == LAYERS:
        outgoing.finish(42)


@dataclass
class Pair:
    hub: LoopbackHub = field(default_factory=LoopbackHub)

    def __post_init__(self) -> None:
        self.prefill = self.node("prefill", 4)
        self.decode = self.node("decode", 8)
        fill(self.prefill)

    def node(self, name: str, block_tokens: int, **more: Any) -> pdlink.Node:
        pool = BlockPool(32)
        pool.take(32)  # so that every block is one that a request holds
        return pdlink.Node(
            name,
            groups(block_tokens),
            transports=[LoopbackTransport(self.hub)],
            deadlines=TIMEOUTS,
            pool=pool,
            **more,
        )

    def close(self) -> None:
        self.hub.hold = False
        self.hub.deliver_all()
        self.decode.close()
        self.prefill.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()
